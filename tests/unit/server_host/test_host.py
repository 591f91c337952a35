"""The host orders what reaches the machine, routes what leaves it, and bounds what queues; on virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.errors import Broken, Closed
from tensorhub.messages import Answer, Call
from tensorhub.server import host as host_module
from tensorhub.server.host import Door, Host
from tensorhub.types import Digest, Epoch, Generation, Latest, Location, ModelKey, ReplicaId, Seat, SessionId, Version
from tests.support.fake_machine import BEAT_NS, LEASE_NS, FakeMachine
from tests.support.virtual_time import run_virtual

A, B = SessionId(b"a" * 16), SessionId(b"b" * 16)
MODEL = ModelKey("job", "actor")
SEAT = Seat(MODEL, ReplicaId("r"), 0)
WELCOME = m.Welcome(Epoch(b"e" * 16), LEASE_NS, BEAT_NS, False)
JOIN = m.Join(SEAT, 1, "", False, Location())
PUBLISH = m.Publish(SEAT, "a", Version("main", 1), Generation(b""), m.Content(Digest(b""), 0, 0, True), (), b"")
BREAK = m.Abort(SEAT, 1, 1, "break")


def hello(session: SessionId) -> m.Hello:
    return m.Hello(m.PROTOCOL, session, b"", "host", 1, Epoch(b""))


def serving(case: Callable[[Host, FakeMachine], Awaitable[None]], token: bytes = b"") -> None:
    """Run a case beside a running host."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        machine = FakeMachine()
        host = Host(machine, lambda: round(loop.time() * 1e9), token=token)
        running = asyncio.create_task(host.run())
        await case(host, machine)
        host.stop("done")
        await running

    run_virtual(main())


async def say(door: Door, call_id: int, request: m.Request) -> list[Answer]:
    await door.submit(Call(call_id, request))
    return await door.take()


def test_hello_binds_a_connection_and_calls_are_answered_there() -> None:
    """After Hello, a connection speaks for its session; each answer goes to the session it is for."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door, other = host.open("one"), host.open("two")
        assert await say(door, 1, hello(A)) == [Answer(1, WELCOME)]
        assert await say(other, 1, hello(B)) == [Answer(1, WELCOME)]
        assert await say(door, 2, m.List(None)) == [Answer(2, m.Listing(()))]
        assert await say(other, 9, m.List(None)) == [Answer(9, m.Listing(()))]

    serving(case)


def test_calls_before_hello_are_refused() -> None:
    """A connection that did not say Hello speaks for nobody; the machine does not hear it."""

    async def case(host: Host, machine: FakeMachine) -> None:
        (answer,) = await say(host.open("one"), 1, m.List(None))
        assert answer.id == 1
        assert answer.reply.error == "BadRequest"
        assert machine.heard == []

    serving(case)


def test_beats_come_on_their_own_connection_and_are_answered_there() -> None:
    """A Beat needs no Hello on its connection; its answer never goes to the session's other connection."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door, beating = host.open("one"), host.open("two")
        await say(door, 1, hello(A))
        assert await say(beating, 5, m.Beat(A)) == [Answer(5, m.Ok())]
        (answer,) = await say(beating, 5, m.Beat(B))
        assert answer.reply.error == "LeaseLost"
        assert await say(door, 2, m.List(None)) == [Answer(2, m.Listing(()))]

    serving(case)


def test_loss_of_the_connection_is_told_once_and_beats_are_no_loss() -> None:
    """The machine hears of the loss of a session's connection once; closing a beat's connection is nothing."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door, beating = host.open("one"), host.open("two")
        await say(door, 1, hello(A))
        await say(beating, 5, m.Beat(A))
        beating.close("gone")
        door.close("gone")
        door.close("again")
        third = host.open("three")
        await say(third, 1, hello(B))
        assert machine.lost == [A]

    serving(case)


def test_newest_hello_speaks_for_a_session() -> None:
    """A session that reconnects before we noticed its loss: old connection closed, loss told first, answers go new."""

    async def case(host: Host, machine: FakeMachine) -> None:
        old, new = host.open("one"), host.open("two")
        await say(old, 1, hello(A))
        await say(new, 2, hello(A))
        assert machine.lost == [A]
        assert await old.take() == []
        with pytest.raises(Closed):
            await old.submit(Call(3, m.List(None)))
        assert await say(new, 3, m.List(None)) == [Answer(3, m.Listing(()))]
        assert machine.lost == [A]

    serving(case)


def test_a_connection_speaks_for_one_session_only() -> None:
    """A second Hello of another session on a bound connection is refused; nobody's binding changes."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door = host.open("one")
        await say(door, 1, hello(A))
        (answer,) = await say(door, 2, hello(B))
        assert answer.reply.error == "BadRequest"
        assert B not in machine.leases

    serving(case)


def test_deadlines_of_the_machine_are_kept() -> None:
    """A wait that nothing ends is answered by the machine's own deadline, without any further call."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door = host.open("one")
        await say(door, 1, hello(A))
        began = asyncio.get_running_loop().time()
        (answer,) = await say(door, 2, m.Wait(MODEL, Latest(), Location(), 3_000_000_000))
        assert answer.reply.error == "WaitTimeout"
        assert asyncio.get_running_loop().time() - began == pytest.approx(3.0)

    serving(case)


def test_answers_of_a_step_reach_other_sessions() -> None:
    """A call of one session lets the machine tell another; to a session that is not connected nothing is kept."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door, other = host.open("one"), host.open("two")
        await say(door, 1, hello(A))
        await say(other, 1, hello(B))
        await say(door, 2, JOIN)
        await other.submit(Call(2, m.Abort(SEAT, 1, 1, "why")))
        assert await other.take() == [Answer(2, m.Ok())]
        assert await door.take() == [Answer(0, m.Moved(SEAT, 8, 0, "why"))]
        door.close("gone")
        assert await say(other, 3, m.Abort(SEAT, 1, 1, "why")) == [Answer(3, m.Ok())]

    serving(case)


def test_a_peer_that_does_not_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What others' doings tell one peer is bounded: it loses its connection, the machine is told, others are served."""
    monkeypatch.setattr(host_module, "OUTBOX_MAX", 8)

    async def case(host: Host, machine: FakeMachine) -> None:
        slow, good = host.open("slow"), host.open("good")
        await say(slow, 1, hello(A))
        await say(good, 1, hello(B))
        await slow.submit(Call(2, m.Watch(MODEL)))
        for call_id in range(2, 2 + 9):
            assert await say(good, call_id, PUBLISH) == [Answer(call_id, m.Announced(m.LineageMark("main", 0, 0)))]
        with pytest.raises(Closed, match="does not read"):
            await slow.submit(Call(99, m.List(None)))
        assert await slow.take() == []
        assert await say(good, 2, m.List(None)) == [Answer(2, m.Listing(()))]
        assert machine.lost == [A]

    with caplog.at_level(logging.WARNING, "tensorhub.server"):
        serving(case)
    assert "slow does not read" in caplog.text


def test_calls_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls than the inbox takes are not lost, not reordered, and not held in memory: their senders wait."""
    monkeypatch.setattr(host_module, "INBOX_MAX", 4)

    async def case(host: Host, machine: FakeMachine) -> None:
        door = host.open("one")
        await say(door, 1, hello(A))
        async with asyncio.TaskGroup() as tasks:
            for call_id in range(2, 50):
                tasks.create_task(door.submit(Call(call_id, m.Beat(A))))
        await asyncio.sleep(0.001)
        assert [answer.id for answer in await door.take()] == list(range(2, 50))

    serving(case)


def test_broken_machine_ends_the_host_with_its_story(caplog: pytest.LogCaptureFixture) -> None:
    """A machine that raises is not asked again: caller told by name, story logged, doors closed, `run` raises."""

    async def main() -> None:
        machine = FakeMachine()
        host = Host(machine, lambda: round(asyncio.get_running_loop().time() * 1e9))
        running = asyncio.create_task(host.run())
        door, other = host.open("one"), host.open("two")
        await say(door, 1, hello(A))
        (answer,) = await say(door, 2, BREAK)
        assert (answer.id, answer.reply.error) == (2, "Broken")
        assert "an invariant does not hold" in answer.reply.message
        with pytest.raises(Broken, match="an invariant does not hold"):
            await running
        assert await other.take() == []
        with pytest.raises(Closed, match="broke"):
            await door.submit(Call(3, m.List(None)))
        with pytest.raises(Closed, match="broke"):
            host.open("three")

    with caplog.at_level(logging.CRITICAL, "tensorhub.server"):
        run_virtual(main())
    assert "reason='break'" in caplog.text


def test_goodbye_is_answered_and_its_connection_is_no_loss() -> None:
    """After Goodbye the connection speaks for nobody: its end is not told as a loss."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door = host.open("one")
        await say(door, 1, hello(A))
        assert await say(door, 2, m.Goodbye()) == [Answer(2, m.Ok())]
        door.close("gone")
        await say(host.open("two"), 1, hello(B))
        assert machine.lost == []

    serving(case)


def test_quiet_time_counts_from_the_last_door() -> None:
    """A host is quiet only while no connection is open, heartbeats included."""

    async def case(host: Host, machine: FakeMachine) -> None:
        await asyncio.sleep(2)
        assert host.quiet_s() == pytest.approx(2)
        door = host.open("one")
        await asyncio.sleep(2)
        assert host.quiet_s() == 0
        door.close("gone")
        await asyncio.sleep(3)
        assert host.quiet_s() == pytest.approx(3)

    serving(case)


def test_stopped_server_listens_before_it_declares_anybody_dead() -> None:
    """After this process was stopped past a lease, a beat on its way counts before the lease ends."""
    stopped_ns = 0

    async def main() -> None:
        nonlocal stopped_ns
        machine = FakeMachine()
        host = Host(machine, lambda: round(asyncio.get_running_loop().time() * 1e9) + stopped_ns)
        running = asyncio.create_task(host.run())
        door, beating = host.open("one"), host.open("two")
        await say(door, 1, hello(A))
        stopped_ns = 2 * LEASE_NS
        await door.submit(Call(2, m.List(None)))
        await asyncio.sleep(host_module.LISTEN_S / 2)
        assert await say(beating, 5, m.Beat(A)) == [Answer(5, m.Ok())]
        assert A in machine.leases
        host.stop("done")
        await running

    run_virtual(main())


@pytest.mark.parametrize("shown", [b"", b"secre", b"secret ", b"other!"])
def test_hello_without_the_token_is_unauthorized(shown: bytes) -> None:
    """A server with a token lets nobody in who does not show it; the machine does not hear of them."""

    async def case(host: Host, machine: FakeMachine) -> None:
        door = host.open("one")
        (answer,) = await say(door, 1, replace(hello(A), token=shown))
        assert answer.reply.error == "Unauthorized"
        assert "TENSORHUB_TOKEN" in answer.reply.message
        (answer,) = await say(door, 2, m.List(None))
        assert answer.reply.error == "BadRequest"
        assert machine.heard == []

    serving(case, b"secret")


def test_hello_with_the_token_is_welcome() -> None:
    """The same bytes open the door, also again on another connection; requests shown in logs do not show them."""

    async def case(host: Host, machine: FakeMachine) -> None:
        shown = replace(hello(A), token=b"secret")
        for name, is_known in (("one", False), ("two", True)):
            (answer,) = await say(host.open(name), 1, shown)
            assert answer.reply == replace(WELCOME, known=is_known)
        assert "secret" not in repr(shown)

    serving(case, b"secret")


def test_any_token_is_welcome_where_none_is_wanted() -> None:
    """A server without a token does not care what it is shown."""

    async def case(host: Host, machine: FakeMachine) -> None:
        assert await say(host.open("one"), 1, replace(hello(A), token=b"whatever")) == [Answer(1, WELCOME)]

    serving(case)
