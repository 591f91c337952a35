"""Bad input is a clear error that names model, version, replica, shard and tensor, and changes nothing."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorhub
from tensorhub.errors import (
    AlreadyPublished,
    BadRequest,
    Busy,
    Closed,
    LayoutMismatch,
    NotPublished,
    NotRegistered,
    SeatTaken,
    ServerUnavailable,
    TensorHubError,
    UnsupportedTensor,
    VersionConflict,
    VersionOrder,
)
from tests.integration.conftest import Opener, blank, same, weights
from tests.support.engines import Gate, Meddler, meddled


def test_a_set_is_published_once(hub: Opener) -> None:
    """Publishing a set that is published already is refused and leaves it readable."""
    ours = weights(1, rows=8)
    trainer = hub("trainer", ours)
    trainer.publish(version=1)
    with pytest.raises(AlreadyPublished, match="unpublish"):
        trainer.publish(version=2)
    assert hub("rollout", blank(ours)).replicate(timeout=20).version == 1


def test_a_complete_set_is_not_published_over(hub: Opener) -> None:
    """What was replicated is shown to others: unpublish comes before publishing something else from it."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    hub("trainer", ours).publish(version=1)
    rollout = hub("rollout", theirs)
    rollout.replicate(timeout=20)
    with pytest.raises(AlreadyPublished):
        rollout.publish(version=2)
    rollout.unpublish(timeout=20)
    rollout.publish(version=2)
    assert rollout.version == 2


def test_nothing_else_while_a_replicate_runs(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """double_replicate, commit_after_last_byte: anything else meanwhile is a named error, and nothing is shown yet."""
    ours, theirs = weights(1), blank(weights(1))
    gate = Gate()
    with meddled(monkeypatch, lambda engine: Meddler(engine, before=gate.pass_through)), ThreadPoolExecutor(1) as pool:
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1)
        running = pool.submit(rollout.replicate, timeout=20)
        try:
            assert gate.arrived.wait(20)
            for call in (
                lambda: rollout.replicate(timeout=5),
                lambda: rollout.publish(version=2),
                lambda: rollout.unpublish(timeout=5),
                lambda: rollout.register(theirs),
                lambda: rollout.suspend(timeout=5),
            ):
                with pytest.raises(Busy, match="replicate is running"):
                    call()
            assert rollout.version is None
        finally:
            gate.open()
        assert running.result(30).version == 1
    assert same(ours, theirs)


def test_unpublish_of_nothing(hub: Opener) -> None:
    """There must be something to unpublish."""
    trainer = hub("trainer", weights(1, rows=8))
    with pytest.raises(NotPublished, match="empty"):
        trainer.unpublish()
    with pytest.raises(NotRegistered, match="'b'"):
        trainer.unpublish(buffers="b")


@pytest.mark.parametrize("version", [True, 1.0, "7", None, -1, 2**63])
def test_a_version_is_an_int_in_range(hub: Opener, version: object) -> None:
    """Versions are plain ints; nothing else is quietly converted."""
    trainer = hub("trainer", weights(1, rows=8))
    with pytest.raises(VersionOrder):
        trainer.publish(version=version)  # type: ignore[arg-type]
    assert trainer.versions() == []


def test_versions_rise_within_a_lineage(hub: Opener) -> None:
    """A version that falls is refused; a new lineage may start lower and retires what was above."""
    trainer = hub("trainer", weights(1, rows=8))
    trainer.publish(version=5)
    trainer.unpublish()
    for number in (4, 5):
        with pytest.raises(VersionOrder, match="lineage"):
            trainer.publish(version=number)
    resumed = hub("trainer-2", weights(2, rows=8), lineage="resumed")
    resumed.publish(version=3)
    theirs = blank(weights(2, rows=8))
    assert hub("rollout", theirs).replicate(timeout=20).lineage == "resumed"
    assert same(theirs, weights(2, rows=8))
    with pytest.raises(VersionOrder, match="lineage"):
        trainer.publish(version=6)


def test_two_publishers_of_one_version_must_agree(hub: Opener) -> None:
    """Different bytes under one version: the second is offered to nobody and hears of it at its next call."""
    ours, others = weights(1, rows=8), weights(2, rows=8)
    first, second = hub("trainer-0", ours), hub("trainer-1", others)
    first.publish(version=1, digest="now")
    second.publish(version=1, digest="now")
    for i in range(3):
        theirs = blank(ours)
        got = hub(f"rollout-{i}", theirs).replicate(1, timeout=20)
        assert "trainer-1" not in {use.replica for use in got.sources}
        assert same(theirs, ours)
    with pytest.raises(VersionConflict, match="version 1"):
        second.unpublish(timeout=20)


def test_equal_publishers_share_the_load(hub: Opener) -> None:
    """Data-parallel trainers that publish the same bytes are sources alike."""
    ours = weights(1, rows=8)
    first, second = hub("trainer-0", ours), hub("trainer-1", {name: t.clone() for name, t in ours.items()})
    first.publish(version=1, digest="now")
    second.publish(version=1, digest="now")
    first.unpublish(timeout=20)
    theirs = blank(ours)
    assert [use.replica for use in hub("rollout", theirs).replicate(1, timeout=20).sources] == ["trainer-1"]
    second.unpublish(timeout=20)


def test_a_seat_has_one_live_process(hub: Opener) -> None:
    """A second claim to a taken (replica, shard) is refused by name; a closed hub frees it."""
    first = hub("trainer", shard=0, shards=2)
    with pytest.raises(SeatTaken, match="trainer"):
        hub("trainer", shard=0, shards=2)
    first.close()
    hub("trainer", shard=0, shards=2)


def test_use_before_register(hub: Opener) -> None:
    """Unregistered use says which call is missing."""
    trainer = hub("trainer")
    for call in (
        lambda: trainer.publish(version=1),
        lambda: trainer.replicate(timeout=1),
        trainer.unpublish,
    ):
        with pytest.raises(NotRegistered, match=r"register\(\)"):
            call()


def test_meta_tensors_have_no_bytes(hub: Opener) -> None:
    """Tensors without memory are refused, each by name."""
    trainer = hub("trainer")
    with pytest.raises(UnsupportedTensor, match=r"(?s)'a'.*'b'"):
        trainer.register({"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")})


def test_layouts_that_differ(hub: Opener) -> None:
    """shape_mismatch_early, dtype_mismatch_early, dest_without_source, source_without_dest: all listed, none moved."""
    ours = weights(1, rows=8)
    hub("trainer", ours).publish(version=1)
    theirs = blank(ours)
    theirs["embed.weight"] = torch.full((4096, 8), 7.0)
    theirs["norm.bias"] = theirs["norm.bias"].to(torch.float16)
    theirs["extra"] = torch.zeros(3)
    del theirs["step"]
    before = {name: tensor.clone() for name, tensor in theirs.items()}
    rollout = hub("rollout", theirs)
    with pytest.raises(LayoutMismatch) as caught:
        rollout.replicate(timeout=20)
    for name in ("embed.weight", "norm.bias", "extra", "step", "rollout", "version 1"):
        assert name in str(caught.value)
    assert same(theirs, before)
    assert rollout.version is None


def test_shard_counts_and_layout_names_that_differ(hub: Opener) -> None:
    """A reader cut differently from the version does not pair with it."""
    hub("trainer", weights(1, rows=8)).publish(version=1)
    with pytest.raises(LayoutMismatch, match="shards"):
        hub("rollout", blank(weights(1, rows=8)), shard=0, shards=2).replicate(timeout=20)
    with pytest.raises(LayoutMismatch, match="layout"):
        hub("other", blank(weights(1, rows=8)), layout="tp2").replicate(timeout=20)


@pytest.mark.parametrize(
    "options",
    [
        {"shard": 2, "shards": 2},
        {"shard": -1},
        {"shards": 0},
        {"shard": True},
        {"location": "dc1//h1"},
        {"server": "http://nowhere"},
        {"server": "grpc:/x"},
        {"engine": "warp"},
        {"engine": []},
        {"job": "a\nb"},
        {"lineage": "x" * 300},
    ],
)
def test_bad_arguments_of_open(hub: Opener, options: dict[str, object]) -> None:
    """Malformed arguments are refused before anything starts."""
    with pytest.raises(BadRequest):
        hub("trainer", **options)


@pytest.mark.parametrize("selector", ["newest", "latest--1", "latest+1", 1.5, None, True, b"latest", "-3"])
def test_bad_selectors(hub: Opener, selector: object) -> None:
    """A selector that is none is refused with the forms that are."""
    rollout = hub("rollout", weights(1, rows=8))
    with pytest.raises(TensorHubError, match="version"):
        rollout.replicate(selector, timeout=1)


def test_only_needs_names_that_exist(hub: Opener) -> None:
    """subset_selection_exact: a name that is absent fails, and nothing moves."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    hub("trainer", ours).publish(version=1)
    rollout = hub("rollout", theirs)
    with pytest.raises(BadRequest, match="only"):
        rollout.replicate(1, only=[], timeout=5)
    with pytest.raises(TensorHubError, match="nonsense"):
        rollout.replicate(1, only=["nonsense", "norm.bias"], timeout=20)
    assert same(theirs, blank(ours))


def test_server_gone_or_wrong(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot be reached or started is an error that says what was tried, within the timeout."""
    monkeypatch.setenv("TENSORHUB_RUNTIME_DIR", "/proc/nowhere")
    with pytest.raises(ServerUnavailable, match="/proc/nowhere"):
        tensorhub.open("actor", replica="r", server="local", timeout=5)


def test_closed_hubs_and_errors_that_travel(hub: Opener) -> None:
    """A closed hub says so; errors keep their fields through pickle."""
    one = hub("trainer", weights(1, rows=8))
    one.close()
    one.close()
    with pytest.raises(Closed) as caught:
        one.replicate()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.message, again.where) == (Closed, caught.value.message, caught.value.where)
    assert again.where.replica == "trainer"


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), -1, 1e300, None, "3", True])
def test_timeouts_are_finite_numbers(hub: Opener, timeout: object) -> None:
    """A timeout that is none is refused before anything starts: the hub is as usable as before."""
    trainer = hub("trainer", weights(1, rows=8))
    for call in (
        lambda: trainer.publish(version=1, timeout=timeout),  # type: ignore[arg-type]
        lambda: trainer.replicate(timeout=timeout),  # type: ignore[arg-type]
        lambda: trainer.unpublish(timeout=timeout),  # type: ignore[arg-type]
        lambda: trainer.wait(timeout=timeout),  # type: ignore[arg-type]
        lambda: trainer.versions(timeout=timeout),  # type: ignore[arg-type]
        lambda: list(trainer.watch(timeout=timeout)),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadRequest, match="timeout"):
            call()
    trainer.publish(version=1)
