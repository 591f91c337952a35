"""One step of the machine: its time and cause, what it says, and what it touched and must look at again.

It collects; it decides nothing. A message to a session that is gone is dropped here, and only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub.errors import BadRequest, LeaseLost, TensorHubError, Where
from tensorhub.messages import Event, Notice, Refused, Reply
from tensorhub.server.deadlines import Deadlines
from tensorhub.server.settings import TIMEOUT_NS_MAX, Settings
from tensorhub.server.state import Holding, Member, ModelTable, Replica, Session, Slot, State
from tensorhub.types import ReplicaId, Seat, SessionId, Version

NOBODY = SessionId(b"")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to a session: the answer to its call `id`, or a notice (0)."""

    to: SessionId
    id: int
    message: Reply | Notice


@dataclass(slots=True)
class Turn:
    state: State
    settings: Settings
    now_ns: int
    #: For stories: `3f2a01/17`, or the kind of deadline.
    cause: str
    #: Empty when no session sent anything.
    sender: SessionId = NOBODY
    call: int = 0
    out: list[Outgoing] = field(default_factory=list)
    #: Whose selectors, queues and drains must be looked at again before the step ends; in order of first touch.
    models: dict[ModelTable, None] = field(default_factory=dict)
    slots: dict[Slot, None] = field(default_factory=dict)
    drains: dict[Holding, None] = field(default_factory=dict)

    # ------------------------------------------------------------ saying

    def reply(self, message: Reply) -> None:
        """Answer the request of this step."""
        self.say(self.sender, self.call, message)

    def say(self, to: SessionId, call: int, message: Reply) -> None:
        """Answer a call, now or later. One-way requests (call 0) are not answered."""
        if call != 0 and to in self.state.sessions:
            self.out.append(Outgoing(to, call, message))

    def refuse(self, to: SessionId, call: int, error: TensorHubError) -> None:
        self.say(to, call, Refused(type(error).__name__, error.message, error.where))

    def refuse_sender(self, error: TensorHubError) -> None:
        """Refuse the request of this step, also to a session that is not known."""
        if self.call != 0:
            self.out.append(Outgoing(self.sender, self.call, Refused(type(error).__name__, error.message, error.where)))

    def notify(self, to: SessionId, notice: Notice) -> None:
        if to in self.state.sessions:
            self.out.append(Outgoing(to, 0, notice))

    def event(self, kind: str, model: ModelTable, version: Version | None, seat: Seat | None, detail: str = "") -> None:
        """Tell the model's watchers, and the replica's story."""
        replica = "" if seat is None else seat.replica
        shard = -1 if seat is None else seat.shard
        if seat is not None and (known := model.replicas.get(ReplicaId(replica))) is not None:
            version_text = "" if version is None else f" version {version}"
            known.story.tell(self.now_ns, self.cause, f"shard {shard}: {kind}{version_text}. {detail}".rstrip(". "))
        for session, call in model.watchers:
            self.say(session, call, Event(kind, model.key, version, replica, shard, detail))

    # ------------------------------------------------------------ finding

    @property
    def deadlines(self) -> Deadlines:
        return self.state.deadlines

    def until(self, timeout_ns: int) -> int:
        """The deadline of a wait that starts now."""
        return self.now_ns + min(max(timeout_ns, 0), TIMEOUT_NS_MAX)

    def session(self) -> Session:
        found = self.state.sessions.get(self.sender)
        if found is None:
            raise LeaseLost(
                "the server has forgotten this process: it was silent for longer than its lease of "
                f"{self.settings.lease_ns / 1e9:g} s, or the server restarted; call again, it comes back by itself"
            )
        return found

    def member(self, seat: Seat) -> Member:
        """The sender's seat, or `BadRequest`."""
        found = self.session().members.get(seat)
        if found is None:
            raise BadRequest(f"this session does not hold seat {seat}; join first", where(seat))
        return found


def where(seat: Seat, version: Version | None = None, shards: int | None = None, source: str | None = None) -> Where:
    """The subject of an error about a seat."""
    return Where(
        model=str(seat.model),
        version=None if version is None else str(version),
        replica=seat.replica,
        shard=seat.shard,
        shards=shards,
        source=source,
    )


def at(member: Member, version: Version | None = None, source: str | None = None) -> Where:
    """The subject of an error about an occupied seat."""
    return where(member.seat, version, member.replica.shards, source)


def seat_of(replica: Replica, shard: int) -> Seat:
    return Seat(replica.model.key, replica.id, shard)
