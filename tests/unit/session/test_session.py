"""A session answers, comes back after losses, asks again only what is safe, and knows when it is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import get_args

import pytest

from tensorhub import messages as m
from tensorhub.client.pending import ASKED_AGAIN, WATCH_EVENTS_MAX, Pending, Watching, error_of
from tensorhub.client.session import BACKOFF_LAST_S, Session
from tensorhub.errors import (
    BadRequest,
    Broken,
    Closed,
    OutcomeUnknown,
    SeatTaken,
    ServerUnavailable,
    Unauthorized,
    WaitTimeout,
    Where,
)
from tensorhub.messages import Answer, Call
from tensorhub.ports import Connection, Heart
from tensorhub.types import (
    UNVERIFIED,
    Digest,
    Epoch,
    Generation,
    Latest,
    Location,
    ModelKey,
    ReplicaId,
    Seat,
    SessionId,
    Version,
)
from tests.support.direct_link import DirectServer, direct_server
from tests.support.fake_machine import LEASE_NS, FakeMachine
from tests.support.virtual_time import run_virtual

A, B = SessionId(b"a" * 16), SessionId(b"b" * 16)
MODEL = ModelKey("job", "actor")
SEAT = Seat(MODEL, ReplicaId("r"), 0)
GENERATION = Generation(b"g" * 16)
JOIN = m.Join(SEAT, 1, "", False, Location())
WAIT = m.Wait(MODEL, Latest(), Location(), 60_000_000_000)
DONE = m.Done(SEAT, 7, 0, GENERATION, UNVERIFIED, 1)
PROGRESS = m.Progress(SEAT, GENERATION, 1, 1)
UNPUBLISH = m.Unpublish(SEAT, "a", GENERATION, 1_000_000_000)
CONTENT = m.Content(Digest(b"d" * 16), 1, 1, True)
PUBLISH = m.Publish(SEAT, "a", Version("main", 1), GENERATION, CONTENT, (), b"")
Case = Callable[[DirectServer, Session], Awaitable[None]]


class Lives:
    """Machines of successive server lives, each with an epoch of its own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> FakeMachine:
        self.count += 1
        return FakeMachine(Epoch(bytes([self.count]) * 16))


def opened(case: Case) -> None:
    """Run a case with an open session, and require that closing leaves no task behind."""

    async def main() -> None:
        async with direct_server(Lives()) as server:
            session = Session(server, A, host="host", pid=1)
            await session.open(5.0)
            await case(server, session)
            await session.close(1.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.sleep(0.01)
        assert all(task.done() for task in left), left

    run_virtual(main())


def test_calls_are_answered_and_refusals_raise_by_name() -> None:
    """A reply is returned; a refusal is raised as the class it names, with its place."""

    async def case(server: DirectServer, session: Session) -> None:
        assert session.epoch == Epoch(b"\x01" * 16)
        assert session.lease_s == LEASE_NS / 1e9
        assert await session.call(m.List(None), 1.0) == m.Listing(())
        other = Session(server, B, host="host", pid=2)
        await other.open(1.0)
        await session.call(JOIN, 1.0)
        with pytest.raises(SeatTaken):
            await other.call(JOIN, 1.0)
        await other.close(1.0)

    opened(case)


def test_many_calls_wait_at_once() -> None:
    """Calls do not wait for each other: a blocked one is answered when its time comes, others at once."""

    async def case(server: DirectServer, session: Session) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(session.call(WAIT, 100.0))
            for _ in range(3):
                assert await session.call(m.List(None), 1.0) == m.Listing(())
            assert not waiting.done()
            await session.call(PUBLISH, 1.0)
        assert waiting.result() == m.Found(PUBLISH.version)

    opened(case)


def test_deadline_of_a_call_and_late_answers() -> None:
    """A call ends at its deadline, by name; the answer that comes later is dropped and counted."""

    async def case(server: DirectServer, session: Session) -> None:
        with pytest.raises(ServerUnavailable, match=r"waited 2 s for direct; it is connected and does not answer"):
            await session.call(WAIT, 2.0)
        await session.call(PUBLISH, 1.0)
        assert session.late_answers == 1
        with pytest.raises(WaitTimeout):
            await session.call(WAIT, 61.0)

    opened(case)


def test_cancelled_call_leaves_nothing() -> None:
    """Cancelling a call forgets it; its answer is a late one."""

    async def case(server: DirectServer, session: Session) -> None:
        waiting = asyncio.create_task(session.call(WAIT, 100.0))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await session.call(PUBLISH, 1.0)
        assert session.late_answers == 1
        assert session._pending == {}

    opened(case)


def test_call_without_bytes_is_refused_alone() -> None:
    """A request that cannot be encoded fails its caller; the session goes on."""

    class Strict:
        """A connection that refuses one request as a codec would."""

        def __init__(self, inner: Connection) -> None:
            self._inner = inner

        async def send(self, call: Call) -> None:
            if isinstance(call.request, m.Abort):
                raise BadRequest("no bytes")
            await self._inner.send(call)

        async def receive(self) -> Answer:
            return await self._inner.receive()

        async def close(self) -> None:
            await self._inner.close()

    async def case(server: DirectServer, session: Session) -> None:
        session._connection = Strict(session._connection)
        with pytest.raises(BadRequest, match="no bytes"):
            await session.call(m.Abort(SEAT, 1, 1, "\ud800"), 1.0)
        assert await session.call(m.List(None), 1.0) == m.Listing(())

    opened(case)


def test_safe_calls_are_asked_again_after_a_loss() -> None:
    """A blocked wait survives a lost connection, and the server's share of its time does not start anew."""

    async def case(server: DirectServer, session: Session) -> None:
        waiting = asyncio.create_task(session.call(WAIT, 100.0))
        await asyncio.sleep(20.0)
        server.cut()
        await asyncio.sleep(2.0)
        asked = [request for request in server.machine.heard if isinstance(request, m.Wait)]
        assert len(asked) == 2
        assert asked[1].timeout_ns == pytest.approx(40e9, abs=1e9)
        await session.call(PUBLISH, 1.0)
        assert await waiting == m.Found(PUBLISH.version)

    opened(case)


def test_unsafe_calls_are_not_asked_again() -> None:
    """What would mean something else the second time fails by name when its connection is lost."""

    async def case(server: DirectServer, session: Session) -> None:
        server.machine.mute = (m.Goodbye,)
        calling = asyncio.create_task(session.call(m.Goodbye(), 100.0))
        await asyncio.sleep(0.1)
        server.cut()
        with pytest.raises(ServerUnavailable, match="Goodbye has no answer: the connection was lost"):
            await calling
        await session.call(m.List(None), 5.0)
        assert sum(isinstance(request, m.Goodbye) for request in server.machine.heard) == 1

    opened(case)


def test_unsafe_calls_made_without_a_connection_are_made_once_there_is_one() -> None:
    """A call that no server can have seen waits for the connection, whatever it asks."""

    async def case(server: DirectServer, session: Session) -> None:
        server.reachable = False
        server.cut()
        await asyncio.sleep(0.1)
        calling = asyncio.create_task(session.call(UNPUBLISH, 100.0))
        await asyncio.sleep(3.0)
        server.reachable = True
        assert await calling == m.Listing(())

    opened(case)


def test_lost_commit_is_asked_again_then_unknown() -> None:
    """The reply of `Done` is asked for after each loss; at the deadline its outcome is unknown, not failed."""

    async def case(server: DirectServer, session: Session) -> None:
        server.machine.mute = (m.Done,)
        calling = asyncio.create_task(session.call(DONE, 30.0))
        for _ in range(2):
            await asyncio.sleep(5.0)
            server.cut()
        with pytest.raises(OutcomeUnknown, match="ask again"):
            await calling
        assert sum(isinstance(request, m.Done) for request in server.machine.heard) == 3
        server.machine.mute = ()
        assert await session.call(DONE, 1.0) == m.Committed(Version("main", 1))

    opened(case)


def test_commit_that_no_server_saw_is_not_unknown() -> None:
    """A `Done` that was never sent cannot have committed: the server was unavailable, that is all."""

    async def case(server: DirectServer, session: Session) -> None:
        server.reachable = False
        server.cut()
        await asyncio.sleep(0.1)
        with pytest.raises(ServerUnavailable, match="nobody listens"):
            await session.call(DONE, 5.0)

    opened(case)


def test_seats_are_taken_again_in_a_new_life() -> None:
    """server_restart_midtransfer: a new epoch hears each seat's Join with its claims before any repeated call."""

    async def case(server: DirectServer, session: Session) -> None:
        heard: list[object] = []
        claims = m.Claim("a", PUBLISH.version, GENERATION, CONTENT, UNVERIFIED, True, 1, (), b"")
        join = m.Join(SEAT, 1, "", False, Location(), (claims,))
        await session.call(JOIN, 1.0)
        session.subscribe(SEAT, heard.append, lambda: join)
        waiting = asyncio.create_task(session.call(WAIT, 100.0))
        await asyncio.sleep(0.1)
        await server.restart()
        await asyncio.sleep(2.0)
        assert session.epoch == Epoch(b"\x02" * 16)
        kinds = [type(request) for request in server.machine.heard if not isinstance(request, m.Beat)]
        assert kinds == [m.Hello, m.Join, m.Wait]
        assert server.machine.heard[0].epoch == Epoch(b"\x01" * 16)
        assert join in server.machine.heard
        assert heard == [m.Joined(7, 0)]
        await session.call(PUBLISH, 1.0)
        assert await waiting == m.Found(PUBLISH.version)

    opened(case)


def test_refused_seat_is_told_to_its_owner() -> None:
    """A seat that somebody else took meanwhile: its owner hears the refusal, the session lives."""

    async def case(server: DirectServer, session: Session) -> None:
        heard: list[object] = []
        session.subscribe(SEAT, heard.append, lambda: JOIN)
        server.machine.seats[SEAT] = B
        server.cut()
        assert await session.call(m.List(None), 5.0) == m.Listing(())
        assert [reply.error for reply in heard] == ["SeatTaken"]

    opened(case)


def test_notices_reach_their_seat_until_unsubscribed() -> None:
    """A notice goes to the seat it names, to nobody else, and to nobody after `unsubscribe`."""

    async def case(server: DirectServer, session: Session) -> None:
        heard: list[object] = []
        await session.call(JOIN, 1.0)
        session.subscribe(SEAT, heard.append, lambda: JOIN)
        await session.call(m.Abort(SEAT, 1, 1, "first"), 1.0)
        session.unsubscribe(SEAT)
        session.unsubscribe(SEAT)
        await session.call(m.Abort(SEAT, 1, 1, "second"), 1.0)
        assert heard == [m.Moved(SEAT, 8, 0, "first")]

    opened(case)


def test_callback_that_raises_ends_the_session_by_name() -> None:
    """A broken owner of a seat is not swallowed: callers get `Broken` instead of waiting for a dead task."""

    async def case(server: DirectServer, session: Session) -> None:
        await session.call(JOIN, 1.0)
        session.subscribe(SEAT, lambda notice: {}["missing"], lambda: JOIN)
        with pytest.raises(Broken, match="missing"):
            await session.call(m.Abort(SEAT, 1, 1, "why"), 5.0)
        with pytest.raises(Broken, match="missing"):
            await session.call(m.List(None), 5.0)

    opened(case)


def test_watch_goes_on_after_a_loss() -> None:
    """Events arrive until the iterator is closed, across reconnects; closing it ends the watch at the server."""

    async def case(server: DirectServer, session: Session) -> None:
        events = session.watch(MODEL)
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(0.1)
        await session.call(PUBLISH, 1.0)
        assert (await first).kind == "published"
        server.cut()
        await asyncio.sleep(2.0)
        await session.call(PUBLISH, 1.0)
        assert (await anext(events)).kind == "published"
        await events.aclose()
        await session.call(m.List(None), 1.0)
        assert server.machine.watches == []

    opened(case)


def test_events_nobody_looks_at_are_bounded() -> None:
    """A watcher that does not look loses the oldest events, and the number lost is known."""
    watching = Watching(1, MODEL)
    for number in range(WATCH_EVENTS_MAX + 3):
        watching.put(m.Event("published", MODEL, Version("main", number), "r", 0, ""))
    assert len(watching.events) == WATCH_EVENTS_MAX
    assert watching.missed == 3
    assert watching.events[-1].version.number == WATCH_EVENTS_MAX + 2


def test_posts_are_sent_or_counted() -> None:
    """One-way requests reach the server without answer; without a connection they are dropped and counted."""

    async def case(server: DirectServer, session: Session) -> None:
        await session.post(PROGRESS)
        await session.call(m.List(None), 1.0)
        assert PROGRESS in server.machine.heard
        server.reachable = False
        server.cut()
        await asyncio.sleep(0.1)
        await session.post(PROGRESS)
        assert session.posts_dropped == 1

    opened(case)


def test_fence_counts_from_the_last_acknowledged_beat() -> None:
    """A session whose beats are answered is never fenced; one lease after the last such beat was sent, it is."""

    async def case(server: DirectServer, session: Session) -> None:
        for _ in range(5):
            await asyncio.sleep(LEASE_NS / 1e9)
            assert not session.fenced()
        server.reachable = False
        server.cut()
        await asyncio.sleep(LEASE_NS / 1e9 - 1.1)
        assert not session.fenced()
        await asyncio.sleep(1.1)
        assert session.fenced()
        assert session.lapses == 0
        server.reachable = True
        await asyncio.sleep(BACKOFF_LAST_S + 0.1)
        assert not session.fenced()
        assert session.lapses == 1, "the server had forgotten it"

    opened(case)


def test_server_that_stops_answering_is_left() -> None:
    """source_stopped, for a server: unanswered beats end the connection, and the session looks for another."""

    async def case(server: DirectServer, session: Session) -> None:
        server.machine.mute = (m.Beat,)
        await asyncio.sleep(6.0)
        assert sum(isinstance(request, m.Hello) for request in server.machine.heard) >= 2
        server.machine.mute = ()
        await asyncio.sleep(6.0)
        hellos = sum(isinstance(request, m.Hello) for request in server.machine.heard)
        await asyncio.sleep(20.0)
        assert sum(isinstance(request, m.Hello) for request in server.machine.heard) == hellos

    opened(case)


def test_forgotten_session_introduces_itself_again() -> None:
    """A server that forgot the session refuses its beat: it says Hello and takes its seats again."""

    async def case(server: DirectServer, session: Session) -> None:
        session.subscribe(SEAT, lambda notice: None, lambda: JOIN)
        del server.machine.leases[A]
        await asyncio.sleep(4.0)
        assert A in server.machine.leases
        assert JOIN in server.machine.heard

    opened(case)


def test_open_keeps_trying_until_its_deadline() -> None:
    """A server that comes up late is found; one that never does is `ServerUnavailable` at the deadline."""

    async def main() -> None:
        async with direct_server(Lives()) as server:
            server.reachable = False
            session = Session(server, A, host="host", pid=1)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ServerUnavailable, match="nobody listens"):
                await session.open(5.0)
            assert asyncio.get_running_loop().time() - began <= 5.0
            with pytest.raises(Closed, match="not open"):
                await session.call(m.List(None), 1.0)
            opening = asyncio.create_task(session.open(5.0))
            await asyncio.sleep(2.0)
            server.reachable = True
            await opening
            with pytest.raises(Closed, match="open already"):
                await session.open(1.0)
            await session.close(1.0)

    run_virtual(main())


def test_refused_hello_is_retried_only_by_who_was_welcome_once() -> None:
    """`open` without a token fails at once. A session that loses its welcome says why and waits for a better server."""

    async def main() -> None:
        async with direct_server(Lives()) as server:
            session = Session(server, A, host="host", pid=1)
            await session.open(1.0)
            waiting = asyncio.create_task(session.call(WAIT, 50.0))
            await asyncio.sleep(0.1)
            server.machine.welcomes = False
            server.cut()
            with pytest.raises(Unauthorized, match="no token"):
                await Session(server, B, host="h", pid=2).open(9.0)
            with pytest.raises(ServerUnavailable, match="no token"):
                await session.call(m.List(None), 5.0)
            assert not waiting.done()
            server.machine.welcomes = True
            assert await session.call(m.List(None), 5.0) == m.Listing(())
            waiting.cancel()
            await session.close(1.0)

    run_virtual(main())


def test_close_says_goodbye_and_fails_what_waits() -> None:
    """Closing gives up every seat at once and ends waiting calls by name; twice is fine; later use is `Closed`."""

    async def case(server: DirectServer, session: Session) -> None:
        waiting = asyncio.create_task(session.call(WAIT, 100.0))
        await asyncio.sleep(0.1)
        await session.close(1.0)
        with pytest.raises(Closed, match="session is closed"):
            await waiting
        assert A not in server.machine.leases
        with pytest.raises(Closed):
            await session.call(m.List(None), 1.0)
        with pytest.raises(Closed):
            await session.post(PROGRESS)

    opened(case)


def test_close_without_server_takes_no_longer_than_its_timeout() -> None:
    """A dead server does not keep a process from leaving."""

    async def case(server: DirectServer, session: Session) -> None:
        server.machine.mute = (m.Goodbye,)
        began = asyncio.get_running_loop().time()
        await session.close(2.0)
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.1)

    opened(case)


@pytest.mark.parametrize("request_class", get_args(m.Request), ids=lambda cls: cls.__name__)
def test_every_request_is_either_safe_to_repeat_or_not(request_class: type) -> None:
    """The list of what is asked again is a decision on every request; a new one must be decided, too."""
    never = (m.Hello, m.Beat, m.Progress, m.Watch, m.Unwatch, m.Goodbye)
    assert (request_class in ASKED_AGAIN) != (request_class in never)


def test_unknown_refusal_is_broken() -> None:
    """A refusal by a name that this client does not know is not mistaken for one it does."""
    assert type(error_of(m.Refused("SeatTaken", "x", Where(shard=3)))) is SeatTaken
    assert error_of(m.Refused("SeatTaken", "x", Where(shard=3))).where.shard == 3
    assert type(error_of(m.Refused("FromTheFuture", "x", Where()))) is Broken


def test_first_outcome_of_a_call_counts() -> None:
    """A second answer to one call changes nothing."""

    async def main() -> None:
        pending = Pending(1, WAIT, 0.0, asyncio.get_running_loop().create_future())
        pending.end(m.Ok())
        pending.end(m.Listing(()))
        assert await pending.answered == m.Ok()

    run_virtual(main())


def test_silent_server_is_unavailable() -> None:
    """Something that takes connections and never answers does not hold `open` past its deadline."""

    class Silent:
        address = "silent"

        async def connect(self, timeout_s: float) -> Connection:
            return self

        async def beat(self, session: bytes, interval_ns: int) -> Heart:
            raise AssertionError("never welcome")

        async def send(self, call: Call) -> None:
            pass

        async def receive(self) -> Answer:
            await asyncio.sleep(1e6)
            raise AssertionError("nobody waits so long")

        async def close(self) -> None:
            pass

    async def main() -> None:
        with pytest.raises(ServerUnavailable, match="silent for 3 s"):
            await Session(Silent(), A, host="host", pid=1).open(3.0)

    run_virtual(main())
