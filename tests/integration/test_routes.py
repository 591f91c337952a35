"""Which engine carries a pull, and what happens when it cannot: the next one goes on, and everybody can see why."""

from __future__ import annotations

import dataclasses

import pytest

import tensorhub
from tensorhub.errors import BadRequest, EngineUnavailable, SourceFailed, VersionUnavailable
from tensorhub.ports import Chunks, Engine, Ranges
from tests.integration.conftest import Opener, blank, same, weights
from tests.support.engines import Meddler, meddled

MIB = 1 << 20


def refusing(error: Exception, *, large_only: bool) -> type[Meddler]:
    """An engine wrapper whose "memory" engine fails: at once, or only where tensors move."""

    class Refusing(Meddler):
        async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
            if self.inner.name == "memory" and (ranges.total_bytes > 4096 or not large_only):
                raise error
            await self.inner.read(peer, ranges, timeout_s, chunks)

    return Refusing


@pytest.mark.parametrize("large_only", [False, True], ids=["first contact", "midway"])
@pytest.mark.parametrize(
    "error", [EngineUnavailable("no route"), SourceFailed("reset by peer")], ids=["unreach", "fail"]
)
def test_a_failing_engine_falls_back_to_the_next(
    hub: Opener, monkeypatch: pytest.MonkeyPatch, error: Exception, large_only: bool
) -> None:
    """The same source is read over the next engine, without another source; `Replication` and `status` say why."""
    ours = weights(3)
    theirs = blank(ours)
    with meddled(monkeypatch, refusing(error, large_only=large_only)):
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1, digest="now")
        got = rollout.replicate(1, timeout=20)
    assert same(ours, theirs)
    assert [use.engine for use in got.sources][-1] == "local"
    assert {use.replica for use in got.sources} == {"trainer"}
    assert f"memory failed: {error.message}" in got.engine_reason  # type: ignore[attr-defined]
    (row,) = [row for row in trainer.status().holdings if row.seat.replica == "rollout"]
    assert row.route.startswith("local (memory failed: ")


def test_wrong_bytes_over_one_engine_are_read_again_over_the_next(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """transport_lies: an engine that reports success with other bytes is left, and the pull succeeds without it."""
    import ctypes

    def lie(engine: Engine) -> Meddler:
        wrapped = Meddler(engine)
        if engine.name == "memory":
            wrapped.after = lambda ranges: ctypes.memset(int(ranges.local[0]), 0x5A, 3)  # type: ignore[assignment]
        return wrapped

    ours = weights(4)
    theirs = blank(ours)
    with meddled(monkeypatch, lie):
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1, digest="now")
        got = rollout.replicate(1, timeout=20)
    assert got.verified
    assert same(ours, theirs)
    assert [use.engine for use in got.sources] == ["memory", "local"]
    assert "wrong bytes" in got.engine_reason


def test_when_every_engine_fails_the_error_names_them_all(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """all_errors_surface: what was tried, over which engine, and how each failed."""
    with meddled(monkeypatch, refusing(SourceFailed("reset by peer"), large_only=True)):
        trainer, rollout = (
            hub("trainer", weights(5), engine="memory"),
            hub("rollout", blank(weights(5)), engine="memory"),
        )
        trainer.publish(version=1, digest="now")
        with pytest.raises(VersionUnavailable, match="trainer#0 over memory: reset by peer"):
            rollout.replicate(1, timeout=20)
    assert rollout.version is None


def test_a_source_that_says_no_is_not_asked_over_another_engine(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the progress block says of itself holds over every engine: the next is another source."""
    trainer = hub("trainer", weights(6))
    trainer.publish(version=1, digest="now")
    opened: list[str] = []
    real = tensorhub.client.sources.Sources.open

    def spy(self: object, grant: object) -> object:
        source = real(self, grant)  # type: ignore[arg-type]
        opened.append(source.engine.name)
        return dataclasses.replace(source, incarnation=b"somebody else's!")  # type: ignore[arg-type]

    monkeypatch.setattr(tensorhub.client.sources.Sources, "open", spy)
    with pytest.raises(VersionUnavailable, match="was restarted"):
        hub("rollout", blank(weights(6))).replicate(1, timeout=20)
    assert opened == ["memory"]


@pytest.mark.parametrize("value", ["soon", "-1", "0", "1e9"])
def test_a_watchdog_setting_that_is_none_is_refused(hub: Opener, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """TENSORHUB_STALL_S is a positive number of seconds, at most a day; a typo is no default."""
    monkeypatch.setenv("TENSORHUB_STALL_S", value)
    with pytest.raises(BadRequest, match="TENSORHUB_STALL_S"):
        hub("trainer")
