"""The fastest engine that both have and that reaches the source is chosen, and the reason says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tensorhub.errors import BadRequest, EngineUnavailable
from tensorhub.messages import Locator
from tensorhub.transport import router
from tensorhub.transport.processes import Identity
from tensorhub.transport.router import Kind, choose, engine_names, open_engines


@pytest.fixture
def engines():
    opened = open_engines()
    yield opened
    for engine in opened:
        asyncio.run(engine.close())


def offers(engines) -> list[Locator]:
    return [Locator(engine.name, engine.locate()) for engine in engines]


def test_auto_opens_every_engine_fastest_first(engines):
    """'auto' is all that run here, in order of speed."""
    assert [engine.name for engine in engines] == ["memory", "local", "tcp"]


def test_the_same_process_is_reached_by_memory(engines):
    """Within a process bytes are copied, not read through the kernel."""
    choice = choose(engines, offers(engines), "auto")
    assert (choice.engine, choice.peer, choice.reason) == (engines[0], engines[0].locate(), "memory")


def test_a_named_engine_wins_over_a_faster_one(engines):
    """A preference is an order, and 'auto' in it stands for the rest."""
    assert choose(engines, offers(engines), ["local", "auto"]).engine.name == "local"
    assert engine_names(["local", "auto"]) == ("local", "memory", "cuda_ipc", "mooncake", "tcp")


def test_another_process_is_reached_by_local_and_the_reason_says_why(engines):
    """What was passed over is in the reason: for people."""
    elsewhere = Locator("memory", bytes([0x92, 0xC4, 1, 7, 1]))
    choice = choose(engines, [elsewhere, offers(engines)[1]], ["memory", "local"])
    assert choice.reason == "local (memory: the source is in another process)"


def test_nobody_reaches_says_why_for_each(engines):
    """EngineUnavailable lists every engine: not offered, other host, not open."""
    other_host = replace(Identity.own(), boot="another boot")
    with pytest.raises(EngineUnavailable, match=r"memory: not offered.*; local: the source is on another host"):
        choose(engines, [Locator("local", other_host.pack())], "auto")
    with pytest.raises(EngineUnavailable, match=r"local: not open here"):
        choose(engines[:1], offers(engines), "local")
    other_container = replace(Identity.own(), namespace=1)
    with pytest.raises(EngineUnavailable, match="another pid namespace"):
        choose(engines, [Locator("local", other_container.pack()), Locator("tcp", b"x")], "auto")
    with pytest.raises(EngineUnavailable, match=r"memory: .*malformed.*; local: .*malformed"):
        choose(engines, [Locator("memory", b"\xc1"), Locator("local", b"\xc1")], "auto")


@pytest.mark.parametrize("preference", ["carrier-pigeon", ["memory", "rdma"]])
def test_unknown_engines_are_refused_by_name(preference):
    """A typo is an error that lists the known names."""
    with pytest.raises(BadRequest, match="'auto', or one or more of 'memory', 'cuda_ipc', 'local'"):
        open_engines(preference)


def test_no_engine_at_all_is_refused():
    """An empty preference would fail at the first pull; it fails at once."""
    with pytest.raises(BadRequest, match="no way to move bytes"):
        open_engines([])


def test_an_engine_that_does_not_start_is_fatal_if_named_and_visible_if_not(monkeypatch, caplog):
    """register_failure_is_fatal: no half-alive engine; 'auto' goes on without it and says so."""

    def refuse(host):
        raise EngineUnavailable("no pidfd on this kernel")

    known = {"memory": router._ENGINES["memory"], "local": Kind(refuse)}
    monkeypatch.setattr(router, "_ENGINES", known)
    with pytest.raises(EngineUnavailable, match="cannot start engine local: no pidfd"):
        open_engines(["memory", "local"])
    assert [engine.name for engine in open_engines("auto")] == ["memory"]
    assert "no pidfd on this kernel" in caplog.text
    monkeypatch.setitem(router._ENGINES, "memory", Kind(refuse))
    with pytest.raises(EngineUnavailable, match=r"no engine starts here: memory: .*; local: "):
        open_engines("auto")


def test_auto_leaves_out_what_makes_no_sense_here_and_a_name_overrules_it(monkeypatch):
    """An engine that needs hardware is not opened by 'auto' without it; whoever names it gets it."""
    kind = replace(router._ENGINES["local"], left_out=lambda: "no such device")
    monkeypatch.setitem(router._ENGINES, "local", kind)
    assert "local" not in [engine.name for engine in open_engines("auto")]
    assert [engine.name for engine in open_engines(["local", "auto"])][:2] == ["local", "memory"]


def test_an_engine_that_failed_is_passed_over_and_named(engines):
    """The next engine is taken, and its reason says what failed before it; when all have, the error says so."""
    failed = {"memory": "a read brought wrong bytes"}
    choice = choose(engines, offers(engines), ["memory", "local"], failed)
    assert (choice.engine.name, choice.reason) == ("local", "local (memory failed: a read brought wrong bytes)")
    with pytest.raises(EngineUnavailable, match="memory failed: a; local failed: b"):
        choose(engines, offers(engines), ["memory", "local"], {"memory": "a", "local": "b"})
