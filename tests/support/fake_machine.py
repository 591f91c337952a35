"""A machine small enough to read at a glance, for tests of what drives machines: sessions, leases, waits, no more."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub import messages as m
from tensorhub.errors import Where
from tensorhub.messages import Reply, Request
from tensorhub.types import Epoch, Seat, SessionId, Version

EPOCH = Epoch(b"e" * 16)
LEASE_NS, BEAT_NS = 10_000_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Outgoing:
    to: SessionId
    id: int
    message: Reply | m.Notice


def refused(error: str, message: str = "refused") -> m.Refused:
    return m.Refused(error, message, Where())


@dataclass(slots=True)
class FakeMachine:
    """`Abort` with reason "break" breaks it; any other tells its seat; `Publish` ends waits, feeds watches."""

    epoch: Epoch = EPOCH
    beat_ns: int = BEAT_NS
    leases: dict[SessionId, int] = field(default_factory=dict)
    waits: dict[tuple[SessionId, int], int] = field(default_factory=dict)
    watches: list[tuple[SessionId, int]] = field(default_factory=list)
    seats: dict[Seat, SessionId] = field(default_factory=dict)
    heard: list[Request] = field(default_factory=list)
    lost: list[SessionId] = field(default_factory=list)
    #: Requests of these classes get no answer, as if it were lost.
    mute: tuple[type, ...] = ()
    #: False: nobody is let in.
    welcomes: bool = True

    def receive(self, now_ns: int, sender: SessionId, call: int, request: Request) -> list[Outgoing]:
        self.heard.append(request)
        if isinstance(request, m.Hello):
            if not self.welcomes:
                return [Outgoing(sender, call, refused("Unauthorized", "no token"))]
            is_known = sender in self.leases
            self.leases[sender] = now_ns + LEASE_NS
            return [Outgoing(sender, call, m.Welcome(self.epoch, LEASE_NS, self.beat_ns, is_known))]
        if sender not in self.leases:
            return [Outgoing(sender, call, refused("LeaseLost"))]
        if isinstance(request, self.mute):
            return []
        match request:
            case m.Beat():
                self.leases[sender] = now_ns + LEASE_NS
                return [Outgoing(sender, call, m.Ok())]
            case m.Join(seat):
                holder = self.seats.setdefault(seat, sender)
                reply = m.Joined(7, 0) if holder == sender else refused("SeatTaken")
                return [Outgoing(sender, call, reply)]
            case m.Wait():
                self.waits[sender, call] = now_ns + request.timeout_ns
                return []
            case m.Watch():
                self.watches.append((sender, call))
                return []
            case m.Unwatch(watch):
                self.watches.remove((sender, watch))
                return []
            case m.Publish():
                event = m.Event("published", request.seat.model, request.version, "r", 0, "")
                found = [Outgoing(to, waiting, m.Found(request.version)) for to, waiting in self.waits]
                self.waits.clear()
                told = [Outgoing(to, watch, event) for to, watch in self.watches]
                return [*found, *told, Outgoing(sender, call, m.Announced(m.LineageMark("main", 0, 0)))]
            case m.Abort(seat, reason=reason):
                if reason == "break":
                    raise RuntimeError("an invariant does not hold")
                return [Outgoing(self.seats[seat], 0, m.Moved(seat, 8, 0, reason)), Outgoing(sender, call, m.Ok())]
            case m.Done():
                return [Outgoing(sender, call, m.Committed(Version("main", 1)))]
            case _:
                return self._simple(sender, call, request)

    def _simple(self, sender: SessionId, call: int, request: Request) -> list[Outgoing]:
        match request:
            case m.Goodbye():
                del self.leases[sender]
                return [Outgoing(sender, call, m.Ok())]
            case m.Progress():
                return []
            case _:
                return [Outgoing(sender, call, m.Listing(()))]

    def disconnected(self, now_ns: int, sender: SessionId) -> list[Outgoing]:
        self.lost.append(sender)
        self.waits = {key: at for key, at in self.waits.items() if key[0] != sender}
        self.watches = [watch for watch in self.watches if watch[0] != sender]
        return []

    def tick(self, now_ns: int) -> list[Outgoing]:
        due = [key for key, at in self.waits.items() if at <= now_ns]
        for key in due:
            del self.waits[key]
        self.leases = {session: at for session, at in self.leases.items() if at > now_ns}
        return [Outgoing(to, call, refused("WaitTimeout")) for to, call in due]

    def next_deadline_ns(self) -> int | None:
        return min([*self.waits.values(), *self.leases.values()], default=None)
