"""Drives one machine: feeds it calls, clock and losses of connection in one order, and carries its answers out.

It decides which connection speaks for which session, who is let in (by token), how much may queue up, and when the
machine is called; what an answer says is the machine's alone. It knows no transport: sockets, gRPC streams, a Ray
actor and the simulation all open a `Door`. One task, `run`, owns the machine.

A machine that raises has lost its invariants: its later answers could let somebody overwrite what is being read.
So the host logs the story, answers the caller `Refused("Broken")`, lets what is queued go out and ends; the next life
starts empty and sessions tell it again what they hold, which is the path a crash takes anyway.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tensorhub.errors import Broken, Closed, Where
from tensorhub.messages import (
    Answer,
    Beat,
    Call,
    Goodbye,
    Hello,
    List,
    Listing,
    Notice,
    Refused,
    Reply,
    Request,
    Status,
    StatusView,
    Welcome,
)
from tensorhub.types import SessionId

#: Calls accepted and not yet seen by the machine, over all doors; beyond it, doors wait (and so do their peers).
INBOX_MAX = 1024
#: Calls of one peer that were not heard yet, and answers that it did not read, before no more of its calls are taken: a
#: process may ask for all its shards at once, and read afterwards.
UNREAD_MAX = 1024
#: A view counts as so many of them: that of a large cluster takes megabytes.
VIEW_WEIGHT = 16
#: Doors that have neither a session nor carried a beat of one: all processes of a large cluster at once, for as long as
#: a Hello takes; and fewer than the descriptors that a process has everywhere.
STRANGERS_MAX = 512
#: For a new peer to say who it is, however its bytes trickle: a token to be read and a slow network take less.
HELLO_S = 10.0
#: While there are `STRANGERS_MAX`, whoever had this long gives way to who comes: several round trips of any network.
GRACE_S = 1.0
#: Answers that wait for one peer. Replies are one per call, notices few: a peer so far behind does not read.
OUTBOX_MAX = 4096

#: A deadline that is overdue by more says that this process was stopped; a busy one is late by less.
STALL_NS = 500_000_000
#: After it was stopped, to hear what was said meanwhile before it declares anybody dead for its own silence.
LISTEN_S = 0.1

TOKEN_ADVICE = "set TENSORHUB_TOKEN, or TENSORHUB_TOKEN_FILE, to the server's"  # noqa: S105 - names, no secret

_LOG = logging.getLogger("tensorhub.server")


class Outgoing(Protocol):
    """An answer of the machine, as `server/machine.py` gives it."""

    @property
    def to(self) -> SessionId: ...
    @property
    def id(self) -> int: ...
    @property
    def message(self) -> Reply | Notice: ...


class Machine(Protocol):
    """What the host drives. Pure: time comes in, answers come out."""

    def receive(self, now_ns: int, sender: SessionId, call: int, request: Request) -> Sequence[Outgoing]: ...
    def disconnected(self, now_ns: int, sender: SessionId) -> Sequence[Outgoing]: ...
    def tick(self, now_ns: int) -> Sequence[Outgoing]: ...
    def next_deadline_ns(self) -> int | None: ...


class Door:
    """One connection of a peer, whatever carries it. Its transport submits calls and takes answers; then closes it."""

    def __init__(self, host: Host, peer: str) -> None:
        self._host = host
        self.peer = peer
        #: The session that said Hello here. At most one door speaks for a session: the newest.
        self.session: SessionId | None = None
        #: Why it is closed, or None while it is open.
        self.closed: str | None = None
        #: Whether it speaks, or spoke, for a session, or carries its beats; else it is a stranger.
        self.known = False
        self._outbox: deque[Answer] = deque()
        self._filled = asyncio.Event()
        self._room = asyncio.Event()
        #: Calls that wait for room do so in order.
        self._order = asyncio.Lock()
        #: Weights of its calls in the inbox, and of the answers that wait.
        self._unheard = self._unread = 0

    async def submit(self, call: Call) -> None:
        """Hand a call to the machine; waits while too many are queued, or the peer does not read. `Closed` once the
        door or the host is."""
        async with self._order:
            while self._unread + self._unheard >= UNREAD_MAX and self.closed is None:
                self._room.clear()
                await self._room.wait()
            self._unheard += _weight(call.request)
            try:
                await self._host.accept(self, call)
            except BaseException:
                self.heard(call)
                raise

    def heard(self, call: Call) -> None:
        """A call is not in the inbox any more. For the host."""
        self._unheard -= _weight(call.request)
        self._room.set()

    async def take(self) -> list[Answer]:
        """All answers that wait, at least one; empty once the door is closed and all are taken."""
        while not self._outbox and self.closed is None:
            self._filled.clear()
            await self._filled.wait()
        answers = list(self._outbox)
        self._outbox.clear()
        self._unread = 0
        self._room.set()
        return answers

    def put(self, answer: Answer) -> None:
        """Queue an answer; a peer that does not read loses its connection, not its session."""
        if self.closed is not None:
            return
        if len(self._outbox) >= OUTBOX_MAX:
            _LOG.warning("%s does not read: %d answers wait; its connection is dropped", self.peer, OUTBOX_MAX)
            self._outbox.clear()
            self.close("does not read its answers")
            return
        self._outbox.append(answer)
        self._unread += _weight(answer.reply)
        self._filled.set()

    def close(self, reason: str) -> None:
        """Accept and queue nothing more; what is queued may still be taken. Idempotent."""
        if self.closed is None:
            self.closed = reason
            self._filled.set()
            self._room.set()
            self._host.leave(self)


class Host:
    """Owner of a machine. `open` doors, `run` until `stop`; all in one event loop.

    With a token, a Hello that does not show the same is `Unauthorized`; without one, every Hello is welcome.
    """

    def __init__(
        self, machine: Machine, clock_ns: Callable[[], int] = time.monotonic_ns, *, token: bytes = b""
    ) -> None:
        self._machine = machine
        self._clock_ns = clock_ns
        self._token = token
        #: In order of arrival; None says that the door was closed.
        self._inbox: deque[tuple[Door, Call | None]] = deque()
        self._wake = asyncio.Event()
        #: Calls in the inbox, and those whose turn it is to be put there.
        self._calls = 0
        #: Doors that wait for room in the inbox, each with one call, longest first: nobody's flood keeps others out.
        self._turns: deque[asyncio.Future[None]] = deque()
        #: {stranger: when it came}, longest first.
        self._strangers: dict[Door, int] = {}
        self._doors: set[Door] = set()
        #: {session: the door that speaks for it}; each of these doors is open.
        self._bound: dict[SessionId, Door] = {}
        self._stopped: str | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: When the last door closed, or the host began.
        self._quiet_since_ns = clock_ns()

    @property
    def doors(self) -> int:
        """Open connections."""
        return len(self._doors)

    def quiet_s(self) -> float:
        """For how long no door was open."""
        return 0.0 if self._doors else (self._clock_ns() - self._quiet_since_ns) / 1e9

    def open(self, peer: str) -> Door:
        """A door for a new connection; `peer` names it in logs. `Closed` once the host has stopped, or while too many
        came and said nothing."""
        if self._stopped is not None:
            raise Closed(f"the server has stopped: {self._stopped}")
        now_ns = self._clock_ns()
        if len(self._strangers) >= STRANGERS_MAX:
            longest, since_ns = next(iter(self._strangers.items()))
            if now_ns - since_ns < GRACE_S * 1e9:
                raise Closed(f"{STRANGERS_MAX} connections are open that did not say Hello yet; try again")
            _turn_out(longest, f"it did not say Hello, and {STRANGERS_MAX} others are new, too")
        door = Door(self, peer)
        self._doors.add(door)
        self._strangers[door] = now_ns
        self._wake.set()
        return door

    def stop(self, reason: str) -> None:
        """End `run` soon; doors close, their queued answers may still be taken."""
        if self._stopped is None:
            self._stopped = reason
            self._wake.set()

    async def run(self) -> None:
        """Serve until `stop`; raises `Broken` when the machine broke."""
        try:
            while self._stopped is None:
                if max(self._overdue_ns(), self._strangers_overdue_ns()) > STALL_NS:
                    await asyncio.sleep(LISTEN_S)
                self._work()
                self._arm()
                await asyncio.sleep(0)  # doors and peers get their turn between two batches
                await self._wake.wait()
                self._wake.clear()
        finally:
            self._stopped = self._stopped or "its task ended"
            if self._timer is not None:
                self._timer.cancel()
            for door in list(self._doors):
                door.close(f"the server has stopped: {self._stopped}")
            self._give_turns()

    async def accept(self, door: Door, call: Call) -> None:
        """Queue a call of a door, in order; waits for its turn. For `Door.submit`."""
        if self._calls >= INBOX_MAX or self._turns:
            turn = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._give_back()
                raise
        else:
            self._calls += 1
        if self._stopped is not None or door.closed is not None:
            self._give_back()
            raise Closed(f"connection closed: {door.closed or self._stopped}")
        self._inbox.append((door, call))
        self._wake.set()

    def _give_back(self) -> None:
        self._calls -= 1
        self._give_turns()

    def _give_turns(self) -> None:
        """To as many as there is room for; to all once nothing is taken any more."""
        while self._turns and (self._calls < INBOX_MAX or self._stopped is not None):
            turn = self._turns.popleft()
            if not turn.done():
                self._calls += 1
                turn.set_result(None)

    def leave(self, door: Door) -> None:
        """A door was closed. For `Door.close`."""
        self._doors.discard(door)
        self._strangers.pop(door, None)
        self._quiet_since_ns = self._clock_ns()
        self._inbox.append((door, None))  # at most one per door: needs no room
        self._wake.set()

    def _arm(self) -> None:
        """Wake up for the machine's next deadline, or a stranger's. A timer that is early stays: leases move on with
        every beat."""
        deadlines = [self._machine.next_deadline_ns(), self._stranger_deadline_ns()]
        deadline_ns = min((at_ns for at_ns in deadlines if at_ns is not None), default=None)
        if deadline_ns is None:
            return
        loop = asyncio.get_running_loop()
        left_us = max(0, -((self._clock_ns() - deadline_ns) // 1000))
        at_s = loop.time() + left_us / 1e6
        if self._timer is not None:
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._wake.set()

    def _work(self) -> None:
        """All that is queued, in order, then all that is due: a beat that came in time counts."""
        while self._inbox:
            door, call = self._inbox.popleft()
            if call is None:
                self._lost(door)
            else:
                self._calls -= 1
                self._receive(door, call)
                door.heard(call)
        self._give_turns()
        while self._strangers_overdue_ns() >= 0:
            _turn_out(next(iter(self._strangers)), f"it did not say Hello within {HELLO_S:g} s")
        now_ns = self._clock_ns()
        if self._overdue_ns() >= 0:
            self._deliver(self._guarded(None, None, lambda: self._machine.tick(now_ns)))

    def _overdue_ns(self) -> int:
        """How late the machine's next deadline is; negative while there is time."""
        deadline_ns = self._machine.next_deadline_ns()
        return -1 if deadline_ns is None else self._clock_ns() - deadline_ns

    def _stranger_deadline_ns(self) -> int | None:
        return next(iter(self._strangers.values())) + round(HELLO_S * 1e9) if self._strangers else None

    def _strangers_overdue_ns(self) -> int:
        """How late the longest stranger is; negative while there is time."""
        deadline_ns = self._stranger_deadline_ns()
        return -1 if deadline_ns is None else self._clock_ns() - deadline_ns

    def _lost(self, door: Door) -> None:
        session, door.session = door.session, None
        if session is not None and self._bound.get(session) is door:
            del self._bound[session]
            now_ns = self._clock_ns()
            _LOG.debug("%s is gone: %s", door.peer, door.closed)
            self._deliver(self._guarded(None, None, lambda: self._machine.disconnected(now_ns, session)))

    def _receive(self, door: Door, call: Call) -> None:
        request = call.request
        sender = request.session if isinstance(request, Hello | Beat) else door.session
        if sender is None:
            self._refuse(door, call, "BadRequest", "say Hello first")
            return
        if isinstance(request, Hello):
            if not self._admits(door, call, request):
                return
            self._supersede(sender, door)
        now_ns = self._clock_ns()
        outgoing = self._guarded(door, call, lambda: self._machine.receive(now_ns, sender, call.id, request))
        outcome = "waits"
        for answer in outgoing:
            # Beats come on connections of their own: the answer goes where the question came from.
            if answer.to == sender and answer.id == call.id != 0:
                if isinstance(answer.message, Welcome):
                    door.session = sender
                    self._bound[sender] = door
                if isinstance(request, Hello | Beat) and not isinstance(answer.message, Refused):
                    door.known = True
                    self._strangers.pop(door, None)
                outcome = type(answer.message).__name__
                door.put(Answer(answer.id, answer.message))
            else:
                self._deliver((answer,))
        if isinstance(request, Goodbye):
            self._bound.pop(sender, None)
            door.session = None
        _LOG.debug("%s #%d %s -> %s", door.peer, call.id, type(request).__name__, outcome)

    def _admits(self, door: Door, call: Call, hello: Hello) -> bool:
        """Whether this Hello may reach the machine; if not, its caller is told why."""
        if self._token and not hmac.compare_digest(hello.token, self._token):
            shown = "another" if hello.token else "none"
            self._refuse(door, call, "Unauthorized", f"this server wants a token and was shown {shown}; {TOKEN_ADVICE}")
            return False
        if door.session not in (None, hello.session):
            self._refuse(door, call, "BadRequest", "this connection speaks for another session; open a new one")
            return False
        return True

    def _supersede(self, session: SessionId, door: Door) -> None:
        """A session that says Hello elsewhere has lost its old connection before we noticed."""
        older = self._bound.get(session)
        if older is not None and older is not door:
            older.close("its session said Hello on another connection")
            self._lost(older)

    def _refuse(self, door: Door, call: Call, error: str, message: str) -> None:
        _LOG.warning("%s #%d %s refused: %s", door.peer, call.id, type(call.request).__name__, message)
        door.put(Answer(call.id, Refused(error, message, Where())))

    def _deliver(self, outgoing: Sequence[Outgoing]) -> None:
        for answer in outgoing:
            door = self._bound.get(answer.to)
            if door is None:
                _LOG.debug("session %s is not connected: %s dropped", answer.to.hex(), type(answer.message).__name__)
            else:
                door.put(Answer(answer.id, answer.message))

    def _guarded(
        self, door: Door | None, call: Call | None, step: Callable[[], Sequence[Outgoing]]
    ) -> Sequence[Outgoing]:
        """The step's answers; a step that raises ends the host, after its caller was told (see the top)."""
        try:
            return step()
        except Exception as error:
            subject = (
                f"{door.peer} #{call.id} {call.request}" if door and call else "a loss of connection or a deadline"
            )
            _LOG.critical("the machine broke at %s", subject, exc_info=error)
            self.stop("its machine broke")
            story = f"the server broke at {subject}: {error}"
            if door is not None and call is not None:
                door.put(Answer(call.id, Refused("Broken", story[:4096], Where())))
            raise (error if isinstance(error, Broken) else Broken(story)) from error


def _weight(message: Request | Reply | Notice) -> int:
    return VIEW_WEIGHT if isinstance(message, List | Status | Listing | StatusView) else 1


def _turn_out(door: Door, reason: str) -> None:
    """Close a stranger's door, and tell it why."""
    _LOG.warning("%s is cut off: %s", door.peer, reason)
    door.put(Answer(0, Refused("Closed", reason, Where())))
    door.close(reason)
