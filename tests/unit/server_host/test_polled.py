"""Doors for peers that poll: who is away too long is closed, mistakes close one door, nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tensorhub import messages as m
from tensorhub.errors import Closed
from tensorhub.messages import Answer, Call
from tensorhub.server import polled as polled_module
from tensorhub.server.host import Host
from tensorhub.server.polled import ABSENT_S, POLL_S, PolledDoors
from tensorhub.types import Epoch, SessionId
from tensorhub.wire.codec import decode_answer, encode_call
from tests.support.fake_machine import BEAT_NS, EPOCH, LEASE_NS, FakeMachine
from tests.support.virtual_time import run_virtual

HELLO = encode_call(Call(1, m.Hello(m.PROTOCOL, SessionId(b"s" * 16), b"", "host", 1, Epoch(b""))))
OTHER_HELLO = encode_call(Call(1, m.Hello(m.PROTOCOL, SessionId(b"t" * 16), b"", "host", 1, Epoch(b""))))
ASK = encode_call(Call(2, m.List(None)))


def polled(case: Callable[[PolledDoors, Host], Awaitable[None]]) -> None:
    """Run a case on virtual time, with a host that runs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        host = Host(FakeMachine(), lambda: round(loop.time() * 1e9))
        running = asyncio.create_task(host.run())
        await case(PolledDoors(host), host)
        host.stop("done")
        await running

    run_virtual(main())


def test_answers_come_in_order_by_polls() -> None:
    """Frames handed in are answered, each once, by whatever poll comes next."""

    async def case(doors: PolledDoors, host: Host) -> None:
        door = doors.open("peer")
        assert await doors.submit(door, [HELLO, ASK]) is None
        answers: list[Answer] = []
        while len(answers) < 2:
            frames, closed = await doors.take(door)
            assert closed is None
            answers += [decode_answer(frame) for frame in frames]
        assert answers == [Answer(1, m.Welcome(EPOCH, LEASE_NS, BEAT_NS, False)), Answer(2, m.Listing(()))]

    polled(case)


def test_a_poll_without_answers_returns() -> None:
    """No poll waits longer than its limit; the door stays open, and its peer polls again."""

    async def case(doors: PolledDoors, host: Host) -> None:
        door = doors.open("peer")
        await doors.submit(door, [HELLO])
        assert len((await doors.take(door))[0]) == 1
        began_s = asyncio.get_running_loop().time()
        for _ in range(5):
            assert await doors.take(door) == ([], None)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(5 * POLL_S)
        assert host.doors == 1

    polled(case)


def test_a_peer_that_stops_polling_loses_its_door() -> None:
    """reader_killed: a door is closed when nobody polls it, whether a poll came before or not; calls do not count."""

    async def case(doors: PolledDoors, host: Host) -> None:
        silent, talking = doors.open("silent"), doors.open("talking")
        await doors.submit(silent, [HELLO])
        await doors.submit(talking, [OTHER_HELLO])
        for _ in range(2):  # the Welcome, then a whole poll without answers
            await doors.take(silent)
        await asyncio.sleep(ABSENT_S - POLL_S - 0.1)
        await doors.submit(talking, [ASK])
        assert host.doors == 2
        await asyncio.sleep(0.2)
        assert host.doors == 1
        assert "does not know this connection" in str(await doors.submit(talking, [ASK]))
        await asyncio.sleep(POLL_S)
        assert host.doors == 0

    polled(case)


def test_unknown_doors_are_told_so() -> None:
    """server_recreated_same_name: the id of an earlier life opens nothing in this one."""

    async def case(doors: PolledDoors, host: Host) -> None:
        frames, closed = await doors.take("0" * 32)
        assert frames == []
        assert "began anew" in str(closed)
        assert closed == await doors.submit("0" * 32, [ASK])
        doors.close("0" * 32)

    polled(case)


def test_a_peer_that_speaks_badly_is_told_and_cut_off() -> None:
    """Garbage ends one door, with the reason to its peer; another one is served."""

    async def case(doors: PolledDoors, host: Host) -> None:
        good, bad = doors.open("good"), doors.open("bad")
        assert await doors.submit(bad, [b"\xff\xff"]) is not None
        frames, _ = await doors.take(bad)
        assert [decode_answer(frame).reply.error for frame in frames] == ["BadRequest"]
        assert (await doors.take(bad))[1] is not None
        assert await doors.submit(good, [HELLO, ASK]) is None
        assert host.doors == 1

    polled(case)


def test_end_of_the_server_ends_a_waiting_poll() -> None:
    """A poll that waits when the server stops says why; no new door is opened."""

    async def case(doors: PolledDoors, host: Host) -> None:
        door = doors.open("peer")
        polling = asyncio.create_task(doors.take(door))
        await asyncio.sleep(0.1)
        host.stop("its test is over")
        frames, closed = await polling
        assert frames == []
        assert "its test is over" in str(closed)
        with pytest.raises(Closed):
            doors.open("late")

    polled(case)


def test_doors_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit no door is opened; one that closes makes room."""
    monkeypatch.setattr(polled_module, "CONNECTIONS_MAX", 1)

    async def case(doors: PolledDoors, host: Host) -> None:
        first = doors.open("first")
        with pytest.raises(Closed):
            doors.open("second")
        doors.close(first)
        doors.open("third")

    polled(case)
