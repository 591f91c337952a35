"""One process's session with a server: calls and their answers, notices, the lease, and coming back after a loss.

It decides when to reconnect, what to ask again and when this process must consider itself forgotten. It never decides
what an answer means. Pure asyncio on the running loop's clock: no thread, executor or socket, so that it runs the
same on virtual time; sockets and heartbeat threads are the link's.

One task owns the connection from `open` to `close`: it receives, watches the heart, and after a loss connects again,
says Hello, takes every subscribed seat again with its claims, and only then repeats the calls that wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

from tensorhub import messages as m
from tensorhub.client.pending import ASKED_AGAIN, Pending, Subscription, Watching, error_of
from tensorhub.errors import (
    BadRequest,
    Broken,
    Closed,
    LeaseLost,
    NoServer,
    SeatTaken,
    ServerUnavailable,
    TensorHubError,
    Unauthorized,
    Unavailable,
    UsageError,
    Where,
)
from tensorhub.messages import PROTOCOL, Answer, Call, Event, Join, Joined, Notice, Refused, Reply, Request, Welcome
from tensorhub.ports import Connection, Heart, Link
from tensorhub.types import Epoch, ModelKey, Seat, SessionId

#: Pause before a reconnect: doubles from first to last, times a random half to one, so that a herd spreads out.
BACKOFF_FIRST_S = 0.05
BACKOFF_LAST_S = 1.0
#: One attempt to connect and be welcome.
ATTEMPT_S = 10.0

_NO_EPOCH = Epoch(b"")


class Session:
    """A process's one session. Safe for any number of concurrent calls in its event loop."""

    def __init__(self, link: Link, session_id: SessionId, *, host: str, pid: int, token: bytes = b"") -> None:
        self.id = session_id
        #: The server's life, once welcome.
        self.epoch: Epoch | None = None
        #: How long the server trusts this session after a beat.
        self.lease_s = 0.0
        #: Answers to calls that had been given up, and one-way requests that found no connection.
        self.late_answers = 0
        self.posts_dropped = 0
        #: How often the server has forgotten us: a grant from before is none any more.
        self.lapses = 0
        self._link = link
        self._host, self._pid, self._token = host, pid, token
        self._jitter = random.Random(session_id)  # noqa: S311 - spreads load; the same in every replay
        self._last_id = 0
        #: {call id: ...}; an id is in at most one of the two.
        self._pending: dict[int, Pending] = {}
        self._watching: dict[int, Watching] = {}
        self._seats: dict[Seat, Subscription] = {}
        #: Set while calls may be sent; None while connecting.
        self._connection: Connection | None = None
        self._owner: asyncio.Task[None] | None = None
        self._heart: Heart | None = None
        #: Loop time at which the last acknowledged beat, or Hello, was sent.
        self._acknowledged_ns = 0
        self._beat_s = 0.0
        #: Why calls are refused at once, or None while the session lives.
        self._ended: TensorHubError | None = Closed("the session is not open")
        #: What the last attempt to reach the server met.
        self._trouble = "no connection yet"

    async def open(self, timeout_s: float) -> None:
        """Connect and be welcome, trying again until `timeout_s` is over; then `ServerUnavailable` or the refusal."""
        if self._owner is not None:
            raise Closed("the session is open already")
        deadline_s = self._now_s() + timeout_s
        for pause_s in self._pauses():
            try:
                connection = await self._establish(max(0.0, deadline_s - self._now_s()))
                break
            except NoServer:
                raise  # asked again, it would say the same
            except Unavailable:
                if self._now_s() + pause_s >= deadline_s:
                    raise
                await asyncio.sleep(pause_s)
        self._ended = None
        self._connection = connection  # nothing waits: callers may ask at once
        self._owner = asyncio.create_task(self._own(connection), name=f"session {self.id.hex()[:8]}")

    async def own_host(self) -> str:
        """This host's number on the way to the server: see `ports.Link`."""
        return await self._link.own_host()

    async def call(self, request: Request, timeout_s: float) -> Reply:
        """The server's reply, or its refusal as the error it names.

        After `timeout_s`: `OutcomeUnknown` for a `Done` that was sent, else `ServerUnavailable`. A connection lost
        meanwhile is waited for; then the call is made again if that is safe (`pending.ASKED_AGAIN`).
        """
        if self._ended is not None:
            raise _again(self._ended)
        pending = Pending(self._next_id(), request, self._now_s(), asyncio.get_running_loop().create_future())
        self._pending[pending.call_id] = pending
        try:
            async with asyncio.timeout(timeout_s):
                if self._connection is not None:
                    await self._ask(self._connection, pending)
                outcome = await pending.answered
        except TimeoutError:
            raise pending.given_up(f"waited {timeout_s:g} s for {self._link.address}; {self._state()}") from None
        finally:
            self._pending.pop(pending.call_id, None)
        if isinstance(outcome, TensorHubError):
            raise outcome
        if isinstance(outcome, Refused):
            raise error_of(outcome)
        return outcome

    async def post(self, request: Request) -> None:
        """Send one way. Without a connection it is dropped and counted: what is worth repeating is a call."""
        if self._ended is not None:
            raise _again(self._ended)
        if self._connection is None:
            self.posts_dropped += 1
            return
        await self._send(self._connection, Call(0, request))

    def subscribe(
        self, seat: Seat, on_notice: Callable[[Notice | Joined | Refused], None], rejoin: Callable[[], Join]
    ) -> None:
        """Hear of a seat. After every reconnect `rejoin()` is said, and `on_notice` gets its answer, too.

        `SeatTaken` when this process has the seat already: the server cannot tell one from the other.
        """
        if seat in self._seats:
            raise SeatTaken(
                "this process holds that seat already; use its hub, or close it first",
                Where(model=str(seat.model), replica=seat.replica, shard=seat.shard),
            )
        self._seats[seat] = Subscription(on_notice, rejoin)

    def unsubscribe(self, seat: Seat) -> None:
        """Hear no more of a seat; unknown ones are fine."""
        self._seats.pop(seat, None)

    async def watch(self, model: ModelKey) -> AsyncGenerator[Event, None]:
        """Events of a model from now on, until the iterator is closed. Those during a loss of connection are missed."""
        if self._ended is not None:
            raise _again(self._ended)
        watching = Watching(self._next_id(), model)
        self._watching[watching.call_id] = watching
        try:
            if self._connection is not None:
                await self._send(self._connection, Call(watching.call_id, m.Watch(model)))
            while True:
                while watching.events:
                    yield watching.events.popleft()
                if watching.error is not None:
                    raise _again(watching.error)
                watching.changed.clear()
                await watching.changed.wait()
        finally:
            del self._watching[watching.call_id]
            if self._connection is not None and watching.error is None:
                await self._send(self._connection, Call(0, m.Unwatch(watching.call_id)))

    def fenced(self) -> bool:
        """Whether the lease may have run out, counted from when the last acknowledged beat was *sent*."""
        self._note_beats()
        return self._now_ns() - self._acknowledged_ns >= self.lease_s * 1e9

    async def close(self, timeout_s: float) -> None:
        """Say goodbye if somebody listens, and end everything. Idempotent; never raises for a server that is gone."""
        if self._owner is None:
            return
        try:
            if self._ended is None and self._connection is not None:
                await self.call(m.Goodbye(), timeout_s)
        except TensorHubError as error:
            self._trouble = str(error)  # the connection's end and the lease say the same
        finally:
            self._end(Closed("the session is closed"))
            owner, self._owner = self._owner, None
            owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)

    # ------------------------------------------------------------ the owning task

    async def _own(self, connection: Connection | None) -> None:
        """Serve, reconnect, and so on, until cancelled or refused for good."""
        try:
            while connection is not None:
                await self._serve(connection)
                connection = await self._reconnect()
        except Exception as error:  # noqa: BLE001 - callers must not wait for a task that is dead
            self._end(Broken(f"the session's task broke: {error!r}"))
        finally:
            self._stop_heart()

    async def _serve(self, connection: Connection) -> None:
        """Everything while one connection lasts."""
        resume = () if self._connection is not None else (self._resume(connection),)
        try:
            await _until_one_fails(self._receive(connection), self._watch_heart(), *resume)
        except ServerUnavailable as lost:
            self._trouble = str(lost)
        finally:
            self._connection = None
            await connection.close()
        for pending in list(self._pending.values()):
            if pending.sent and not isinstance(pending.request, ASKED_AGAIN):
                pending.end(pending.given_up(f"the connection was lost: {self._trouble}"))

    async def _receive(self, connection: Connection) -> None:
        while True:
            self._dispatch(await connection.receive())

    async def _watch_heart(self) -> None:
        """A heart that ended means that the server is gone, stopped, or does not know us any more: start over."""
        assert self._heart is not None
        while (why := self._heart.failed()) is None:
            await asyncio.sleep(self._beat_s)
        raise ServerUnavailable(f"the heartbeat ended: {why}")

    async def _resume(self, connection: Connection) -> None:
        """Open the connection to callers, then ask what waits: by the same ids, so that a server that still knows the
        first asking takes the second for the same."""
        watches, calls = list(self._watching.values()), list(self._pending.values())
        self._connection = connection  # from here on, new calls ask for themselves
        for watching in watches:
            await self._send(connection, Call(watching.call_id, m.Watch(watching.model)))
        for pending in calls:
            if not pending.answered.done():
                await self._ask(connection, pending)

    async def _reconnect(self) -> Connection | None:
        """The next connection, however long it takes; None when the server refuses this session for good.

        A token or certificate that was good before is not given up: whoever runs the server may have started it with
        the wrong one, and a long training must outlive that. Calls say so until their deadlines.
        """
        for pause_s in self._pauses():
            await asyncio.sleep(pause_s)
            try:
                return await self._establish(ATTEMPT_S)
            except (Unauthorized, Unavailable) as error:
                self._trouble = str(error)
            except UsageError as error:
                self._end(error)
                return None
        return None

    # ------------------------------------------------------------ becoming welcome

    async def _establish(self, timeout_s: float) -> Connection:
        """A connection on which the server has welcomed us and our seats, with a heart that beats."""
        deadline_s = self._now_s() + timeout_s
        connection = await self._link.connect(timeout_s)
        try:
            async with asyncio.timeout_at(deadline_s):
                welcome = await self._greet(connection)
                await self._take_seats(connection)
                self._stop_heart()
                self._heart = await self._link.beat(self.id, welcome.beat_ns)
        except TimeoutError:
            await connection.close()
            raise ServerUnavailable(f"{self._link.address} connected, then was silent for {timeout_s:g} s") from None
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _greet(self, connection: Connection) -> Welcome:
        hello = m.Hello(PROTOCOL, self.id, self._token, self._host, self._pid, self.epoch or _NO_EPOCH)
        sent_ns = self._now_ns()
        call_id = self._next_id()
        await connection.send(Call(call_id, hello))
        welcome = await self._answer_to(connection, call_id)
        if isinstance(welcome, Refused):
            raise error_of(welcome)
        if not isinstance(welcome, Welcome):
            raise ServerUnavailable(f"{self._link.address} answers a Hello by {type(welcome).__name__}")
        self._note_beats()
        if welcome.epoch == self.epoch and not welcome.known:
            # Another life has forgotten nothing, as it never knew: it hears of us now, with all that is under way.
            self.lapses += 1
        self._acknowledged_ns = max(self._acknowledged_ns, sent_ns)
        self.epoch, self.lease_s, self._beat_s = welcome.epoch, welcome.lease_ns / 1e9, welcome.beat_ns / 1e9
        return welcome

    async def _take_seats(self, connection: Connection) -> None:
        """Say every Join again, with its claims. A server that still knows the seat answers just the same."""
        for subscription in list(self._seats.values()):
            call_id = self._next_id()
            await connection.send(Call(call_id, subscription.rejoin()))
            reply = await self._answer_to(connection, call_id)
            if not isinstance(reply, Joined | Refused):
                raise ServerUnavailable(f"{self._link.address} answers a Join by {type(reply).__name__}")
            subscription.on_notice(reply)

    async def _answer_to(self, connection: Connection, call_id: int) -> Reply | Notice:
        while True:
            answer = await connection.receive()
            if answer.id == call_id:
                return answer.reply
            self._dispatch(answer)

    # ------------------------------------------------------------ small steps

    def _dispatch(self, answer: Answer) -> None:
        reply = answer.reply
        if isinstance(reply, Notice):
            subscription = self._seats.get(reply.seat)
            if subscription is not None:
                subscription.on_notice(reply)
        elif answer.id == 0:
            raise ServerUnavailable(f"{self._link.address} ends the connection: {reply}")
        elif (watching := self._watching.get(answer.id)) is not None:
            watching.put(reply)
        elif (pending := self._pending.get(answer.id)) is not None:
            if isinstance(reply, Refused) and reply.error == LeaseLost.__name__:
                if not isinstance(pending.request, ASKED_AGAIN):
                    pending.end(reply)
                raise ServerUnavailable(f"{self._link.address} has forgotten this process")  # it will hear of it again
            pending.end(reply)
        else:
            self.late_answers += 1

    async def _ask(self, connection: Connection, pending: Pending) -> None:
        call = Call(pending.call_id, pending.request_at(self._now_s()))
        pending.sent = True
        try:
            await self._send(connection, call)
        except BadRequest as error:
            pending.end(error)  # it has no bytes: nothing was sent

    async def _send(self, connection: Connection, call: Call) -> None:
        """A connection that takes no more is closed: its receiver notices, and the owner starts over."""
        try:
            await connection.send(call)
        except ServerUnavailable as error:
            self._trouble = str(error)
            await connection.close()

    def _end(self, error: TensorHubError) -> None:
        self._ended = self._ended or error
        for pending in self._pending.values():
            unknown = isinstance(pending.request, m.Done) and pending.sent
            pending.end(pending.given_up(str(error)) if unknown else _again(error))
        for watching in self._watching.values():
            watching.end(error)

    def _note_beats(self) -> None:
        if self._heart is not None:
            self._acknowledged_ns = max(self._acknowledged_ns, self._heart.acknowledged_ns())

    def _stop_heart(self) -> None:
        if self._heart is not None:
            self._note_beats()
            self._heart.stop()
            self._heart = None

    def _pauses(self) -> Iterator[float]:
        """Endless pauses between attempts, each longer than the one before, up to the last."""
        longest_s = BACKOFF_FIRST_S
        while True:
            yield longest_s * self._jitter.uniform(0.5, 1.0)
            longest_s = min(2 * longest_s, BACKOFF_LAST_S)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _state(self) -> str:
        return "it is connected and does not answer" if self._connection is not None else f"last: {self._trouble}"

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _now_ns(self) -> int:
        return round(self._now_s() * 1e9)


async def _until_one_fails(*work: Coroutine[object, object, None]) -> None:
    """Run all at once until one raises; end the others, then raise that error.

    Not a TaskGroup: in Python 3.11 it loses a cancellation that meets an error of its tasks, and wraps the error.
    """
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    raise min(errors, key=lambda error: isinstance(error, ServerUnavailable))  # our own fault says more than a loss


def _again(error: TensorHubError) -> TensorHubError:
    """A fresh copy: one error raised to many callers would collect all their tracebacks."""
    return type(error)(error.message, error.where)
