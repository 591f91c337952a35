"""What a server owes to peers that owe it nothing: bounds in number, time and memory, with reasons; others are served.

On virtual time, over doors alone and over plain frames; `test_hostile_grpc.py` does it over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tensorhub import messages as m
from tensorhub.errors import BadRequest, Closed
from tensorhub.messages import Answer, Call
from tensorhub.server.host import GRACE_S, HELLO_S, INBOX_MAX, STRANGERS_MAX, UNREAD_MAX, VIEW_WEIGHT, Door, Host
from tensorhub.server.machine import Machine
from tensorhub.server.streams import STRANGER_FRAME_BYTES_MAX, submit
from tensorhub.types import Epoch, Generation, Location, ModelKey, ReplicaId, Seat, SessionId
from tensorhub.wire.codec import encode_call
from tests.support.fake_machine import FakeMachine
from tests.support.virtual_time import run_virtual

TOKEN = b"the secret"
_SEAT = Seat(ModelKey("job", "actor"), ReplicaId("r"), 0)


def session_of(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def hello(number: int, token: bytes = b"") -> Call:
    return Call(1, m.Hello(m.PROTOCOL, session_of(number), token, "host", 1, Epoch(b"")))


def serving(case: Callable[[Host], Awaitable[None]], machine: object = None, token: bytes = b"") -> None:
    """Run a case beside a running host."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        host = Host(machine or FakeMachine(), lambda: round(loop.time() * 1e9), token=token)
        running = asyncio.create_task(host.run())
        await case(host)
        host.stop("done")
        await running

    run_virtual(main())


async def let_in(host: Host, number: int, token: bytes = b"") -> Door:
    door = host.open(f"peer {number}")
    await door.submit(hello(number, token))
    (answer,) = await door.take()
    assert isinstance(answer.reply, m.Welcome)
    return door


async def is_served(door: Door, call: int = 77) -> bool:
    await door.submit(Call(call, m.List(None)))
    return await door.take() == [Answer(call, m.Listing(()))]


def test_who_never_says_hello_is_told_and_cut_off() -> None:
    """A connection that says nothing, one that talks without Hello, and one with the wrong token have `HELLO_S` in all;
    a session and its heartbeat stay."""

    async def case(host: Host) -> None:
        good = await let_in(host, 1, TOKEN)
        beating, silent, chatty, guessing = (host.open(name) for name in ("beat", "silent", "chatty", "guessing"))
        await beating.submit(Call(1, m.Beat(session_of(1))))
        assert await beating.take() == [Answer(1, m.Ok())]
        for _ in range(10):
            await chatty.submit(Call(1, m.List(None)))
            await guessing.submit(hello(1, b"a guess"))
            assert [await door.take() for door in (chatty, guessing)]
            await asyncio.sleep(HELLO_S / 10 - 0.01)
            await beating.submit(Call(1, m.Beat(session_of(1))))
            await beating.take()
        await asyncio.sleep(0.2)
        for door in (silent, chatty, guessing):
            (told,) = await door.take()
            assert "did not say Hello within" in told.reply.message
            assert await door.take() == []
        assert beating.closed is None
        assert await is_served(good)

    serving(case, token=TOKEN)


def test_strangers_are_bounded_and_give_way_to_who_comes() -> None:
    """While as many strangers as may be are new, more are refused; once they had time, the oldest gives way: thousands
    that say nothing keep nobody out."""

    async def case(host: Host) -> None:
        good = await let_in(host, 1)
        strangers = [host.open("stranger") for _ in range(STRANGERS_MAX)]
        with pytest.raises(Closed, match="did not say Hello yet"):
            host.open("one more")
        await asyncio.sleep(GRACE_S)
        late = await let_in(host, 2)
        assert strangers[0].closed is not None
        assert strangers[1].closed is None
        assert await is_served(late)
        assert await is_served(good)
        for _ in range(4000):
            host.open("flood") if host.doors < STRANGERS_MAX else None
        assert host.doors <= STRANGERS_MAX + 2

    serving(case)


def test_a_beat_for_nobody_makes_no_acquaintance() -> None:
    """Only a beat of a session that lives makes a connection known."""

    async def case(host: Host) -> None:
        door = host.open("guess")
        await door.submit(Call(1, m.Beat(session_of(9))))
        assert isinstance((await door.take())[0].reply, m.Refused)
        await asyncio.sleep(HELLO_S + 0.1)
        assert door.closed is not None

    serving(case)


def test_a_stranger_sends_little() -> None:
    """Before Hello a frame takes no more than a Hello needs; after it, as much as any."""

    async def case(host: Host) -> None:
        large = encode_call(Call(3, m.Abort(_SEAT, 1, 1, "x" * STRANGER_FRAME_BYTES_MAX)))
        stranger, friend = host.open("stranger"), await let_in(host, 1)
        with pytest.raises(BadRequest, match="before Hello"):
            await submit(large, stranger)
        await friend.submit(Call(2, m.Join(_SEAT, 1, "", False, Location())))
        await friend.take()
        await submit(large, friend)
        assert any(isinstance(answer.reply, m.Ok) for answer in await friend.take())

    serving(case)


def test_a_flood_of_one_session_keeps_no_other_out() -> None:
    """However fast some peers call, every other gets its turn after as many calls as may wait, and one of each peer."""

    async def case(host: Host) -> None:
        flooding = [await let_in(host, number) for number in range(1, 4)]
        honest = await let_in(host, 99)

        async def flood(door: Door) -> None:
            for call in range(1, 1000 * INBOX_MAX):
                await door.submit(Call(0, m.Progress(_SEAT, Generation(b""), call, 0)))

        floods = [asyncio.create_task(flood(door)) for door in flooding]
        await asyncio.sleep(0)
        for call in range(1, 6):
            assert await is_served(honest, call)
        assert not any(task.done() for task in floods)
        for task in floods:
            task.cancel()
        await asyncio.gather(*floods, return_exceptions=True)
        assert await is_served(honest)

    serving(case)


def test_a_peer_that_does_not_read_is_not_heard() -> None:
    """Calls of a peer whose answers pile up wait; nothing more is kept for it, and once it reads it is heard again."""

    async def case(host: Host) -> None:
        deaf, good = await let_in(host, 1), await let_in(host, 2)

        async def ask() -> None:
            for call in range(1, 4 * UNREAD_MAX):
                await deaf.submit(Call(call, m.Beat(session_of(1))))

        asking = asyncio.create_task(ask())
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not asking.done()
        assert await is_served(good)
        read: list[Answer] = []
        while len(read) < 4 * UNREAD_MAX - 1:
            batch = await deaf.take()
            assert len(batch) <= UNREAD_MAX
            read += batch
        await asking

    serving(case)


def test_views_that_nobody_reads_are_few() -> None:
    """A view takes megabytes: of a peer that reads none, as good as no second one is made."""

    async def case(host: Host) -> None:
        deaf, good = await let_in(host, 1), await let_in(host, 2)
        asking = [
            asyncio.create_task(deaf.submit(Call(call, m.Status(None))))
            for call in range(1, 2 * UNREAD_MAX // VIEW_WEIGHT)
        ]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert sum(task.done() for task in asking) == UNREAD_MAX // VIEW_WEIGHT
        assert await is_served(good)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    serving(case)


def test_nobody_takes_a_session_over_without_the_token() -> None:
    """A Hello for another's session without the token is refused, and its connection is not touched."""

    async def case(host: Host) -> None:
        owner, thief = await let_in(host, 1, TOKEN), host.open("thief")
        for token in (b"", b"wrong", TOKEN[:-1]):
            await thief.submit(hello(1, token))
            (answer,) = await thief.take()
            assert answer.reply.error == "Unauthorized"
        assert owner.closed is None
        assert await is_served(owner)

    serving(case, token=TOKEN)


def test_waiting_calls_end_with_the_host() -> None:
    """Whoever waits for a turn when the host stops is told so, at once."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        host = Host(FakeMachine(), lambda: round(loop.time() * 1e9))
        waiting = [host.open("late") for _ in range(3)]
        doors = [host.open("early") for _ in range(INBOX_MAX // UNREAD_MAX)]
        for door in doors:
            for call in range(UNREAD_MAX):
                await door.submit(Call(call + 1, m.Beat(session_of(1))))
        late = [asyncio.create_task(door.submit(Call(1, m.List(None)))) for door in waiting]
        await asyncio.sleep(0)
        late[0].cancel()
        host.stop("done")
        await host.run()
        outcomes = await asyncio.gather(*late, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, Closed, Closed]

    run_virtual(main())


@pytest.mark.slow
def test_thousands_of_sessions_through_one_host() -> None:
    """A real machine behind a host takes thousands of sessions, answers each, and forgets all that are gone."""

    async def case(host: Host) -> None:
        doors = [await let_in(host, number) for number in range(1, 3000)]
        assert await is_served(doors[0])
        assert await is_served(doors[-1])
        for door in doors:
            door.close("gone")
        await asyncio.sleep(60)
        assert host.doors == 0
        assert not machine.state.sessions

    machine = Machine(Epoch(bytes(16)))
    serving(case, machine)
