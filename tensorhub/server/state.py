"""Everything the server knows, as plain mutable records. Each field says its invariant; `invariants.py` checks them.

Nothing here decides. Records point at each other directly; whoever changes one side changes the other in the same step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from tensorhub.messages import Content, Locator, Replicate
from tensorhub.server.deadlines import Deadlines
from tensorhub.server.rates import Pace
from tensorhub.server.story import Story
from tensorhub.types import (
    Digest,
    Epoch,
    Generation,
    Location,
    ModelKey,
    ReplicaId,
    Seat,
    Selector,
    SessionId,
    Version,
)


class HoldingState(Enum):
    """The life of a holding: published in place, or filling and then complete. Any of them may be hidden."""

    PUBLISHED = "published"
    FILLING = "filling"
    COMPLETE = "complete"


class Phase(Enum):
    """The life of one shard's part in a transaction."""

    WAITING = "waiting for a version"
    DRAINING = "draining its own readers"
    QUEUED = "waiting for a source"
    READING = "reading"
    REROUTING = "waiting for another source"
    HELD = "holding the version already"
    DONE = "done"


class Grace(Enum):
    """Whether sessions of an earlier life are waited for; see `grace.py`."""

    NONE = "nobody has come from one"
    OPEN = "they are on their way"
    OVER = "who has not come does not count"


class Kind(IntEnum):
    """Who waits in a line, in the order in which they are served."""

    #: Reads already, or is otherwise unlike the others: each has reasons of its own, and is tried by itself.
    ODD = 0
    #: Asks for its first source.
    NEW = 1
    #: The same, but known to be slow: nobody shall have to read from it.
    SLOW = 2


#: Who waits, and on which host, or in which rack where that is not known (none for odd ones).
Line = tuple[Kind, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class Session:
    id: SessionId
    host: str
    pid: int
    #: False between the loss of the control connection and the next Hello.
    connected: bool = True
    #: It came from another life of the server, and may know more than this one.
    returned: bool = False
    #: Seats it occupies; each `Member.session` is this one.
    members: dict[Seat, Member] = field(default_factory=dict)
    #: {call: model} of open watches; each is in `ModelTable.watchers`.
    watches: dict[int, ModelKey] = field(default_factory=dict)
    #: {call: model} of blocked `Wait` calls; each is in `ModelTable.waits`.
    waits: dict[int, ModelKey] = field(default_factory=dict)
    #: {seat: what it may still read there}; the seat may be lost to another session by now.
    lingers: dict[Seat, Linger] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Linger:
    """A reader that lost its grant by what others did. It may read on until it has said that it stopped."""

    session: Session
    seat: Seat
    #: Of its filling, which is gone.
    generation: Generation
    #: It is in that one's `lingering`.
    source: Holding
    #: (group, sequence) it was granted in: a word of this one or a later one ends it, a belated earlier one does not.
    transaction: tuple[int, int]


@dataclass(slots=True, eq=False)
class Member:
    """An occupied seat."""

    seat: Seat
    session: Session
    replica: Replica
    spot: bool
    location: Location
    #: {buffer set: holding}; at most one content per buffer set.
    holdings: dict[str, Holding] = field(default_factory=dict)
    #: The last version this seat published: its numbers rise within a lineage.
    published: Version | None = None
    #: Why it counts as slow, since a filling of it held others up and until one is as fast as usual; else empty.
    slow: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    """What the indexes say of a holding; None in `Holding.listed` when they do not have it."""

    #: Counts towards readability: published or committed.
    complete: bool
    #: The data centre it counts in.
    centre: str
    #: Which shelf it stands on, at which load; None while it has no free place or is quarantined.
    shelf: int | None
    load: int


@dataclass(slots=True)
class Drain:
    """An `Unpublish` call that waits for the readers of its holding."""

    call: int
    session: SessionId


@dataclass(slots=True, eq=False)
class Origin:
    """A source that a holding was filled from, for people: it may be long gone, so it is a name, not a record."""

    seat: Seat
    began_ns: int
    #: None while it is the reader's `upstream`, and only then.
    ended_ns: int | None = None
    #: Bytes verified from it; never decreases.
    nbytes: int = 0
    route: str = ""


@dataclass(slots=True, eq=False)
class Holding:
    """One buffer set of one seat, holding one shard of one version, or being filled with it."""

    member: Member
    buffers: str
    slot: Slot
    generation: Generation
    state: HoldingState
    #: Order of creation: breaks ties.
    born: int
    locators: tuple[Locator, ...] = ()
    exposure: bytes = b""
    #: Never decreases.
    watermark: int = 0
    bytes_done: int = 0
    #: Its own root digest once sealed, done or claimed; equals `Slot.root` when both are known and it is proven.
    root: Digest | None = None
    #: False for a second publisher until its root equals the first's: offered to nobody.
    proven: bool = True
    #: Withdrawn from new readers.
    hidden: bool = False
    #: Granted in an earlier life of the server, to readers that may not have come back yet: not drained before they
    #: have had a lease's time to do so.
    is_unsure: bool = False
    #: A filling that was granted in an earlier life.
    claimed: bool = False
    #: A filling that may be read from: it has planned, or has said beforehand how it will be shown.
    serves: bool = False
    #: It is known to show its generation: it has said that it has planned, or how far it is.
    begun: bool = False
    #: A filling granted lately that will serve: newcomers wait for it. Counted in `Slot.promises`, with a deadline.
    promises: bool = False
    quarantined: bool = False
    #: Readers that reported it since it last proved progress.
    reports: dict[Seat, None] = field(default_factory=dict)
    #: What a filling reads from; it is in that one's `readers`.
    upstream: Holding | None = None
    pace: Pace = field(default_factory=Pace)
    #: Why it was asked to leave its source, which it has not done yet; empty when it was not. Has a deadline until it
    #: answers, and patience from then on.
    asked: str = ""
    #: A filling that a reader gave up, and that has told nothing since: it may be dead, so it is a last resort, and its
    #: own source is free for those behind it.
    doubted: bool = False
    #: How often it was asked; at most MOVES_MAX.
    moves: int = 0
    #: Whom it was filled from, in order; at most ORIGINS_MAX. The last one is `upstream`, while there is one.
    origins: list[Origin] = field(default_factory=list)
    #: Fillings that read from here.
    readers: dict[Generation, Holding] = field(default_factory=dict)
    #: {generation of a filling that is gone: its reader}: they take no place, but it is not drained while they linger.
    lingering: dict[Generation, Linger] = field(default_factory=dict)
    #: Seats that ever read from it, first ones first; at most SERVED_MAX.
    served: dict[str, None] = field(default_factory=dict)
    #: Seats that decided transactions may still grant from here, even when it is hidden; see `Transaction.pins`.
    pins: dict[Seat, Transaction] = field(default_factory=dict)
    #: Longest chain of fillings below.
    height: int = 0
    #: Sum of the weights of its readers.
    load: int = 0
    #: Its own weight in `upstream.load`.
    weight: int = 0
    #: A claimed source that has not come back yet; it is a key of `State.awaited`, or this is None.
    awaits: Generation | None = None
    #: How it is, or was, read from its source: for people.
    route: str = ""
    drain: Drain | None = None
    listed: Listed | None = None


@dataclass(slots=True)
class Shelf:
    """Holdings with a free place within one location prefix: a row of each kind of `placement.py`; by (load, born)."""

    rows: tuple[list[tuple[int, int, Holding]], ...] = field(default_factory=lambda: ([], [], [], []))


@dataclass(slots=True, eq=False)
class Slot:
    """One shard of one version: what it is and who has it."""

    record: VersionRecord
    shard: int
    content: Content
    #: The version's root digest; None while its first publisher digests.
    root: Digest | None = None
    #: The publisher whose seal decides the root; None once it has, or is gone.
    author: Holding | None = None
    #: Holdings that have named their root while the version's is not known, in that order.
    reported: dict[Generation, Holding] = field(default_factory=dict)
    holdings: dict[Generation, Holding] = field(default_factory=dict)
    #: Offerable complete holdings, oldest first.
    complete: dict[Generation, Holding] = field(default_factory=dict)
    #: Of these, how many are not publishers.
    replicated: int = 0
    #: {location prefix: shelf}; a holding stands in one row of every prefix of its location.
    shelves: dict[tuple[str, ...], Shelf] = field(default_factory=dict)
    #: {host: what its uplink bears, the loads of all its holdings}; zero is absent, as are hosts that are not known.
    uplinks: dict[tuple[str, ...], int] = field(default_factory=dict)
    #: Holdings on the shelves.
    free: int = 0
    #: {data centre, or host: fillings there that will serve soon}; zero counts are absent.
    promises: dict[tuple[str, ...], int] = field(default_factory=dict)
    #: Parts that wait for a source, oldest first. Those of one line are alike: if its first finds nothing, no other of
    #: it does, nor of another line of the same kind and data centre. Empty lines are absent.
    lines: dict[Line, dict[Seat, Part]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class VersionRecord:
    """A version that somebody holds, in whole or in part."""

    model: ModelTable
    version: Version
    order: int
    shards: int
    layout: str
    #: {shard: slot}; kept while any shard is held, so that a content is not forgotten under its siblings.
    slots: dict[int, Slot] = field(default_factory=dict)
    #: Holdings of all slots; the record goes with the last.
    held: int = 0
    #: Shards with an offerable complete holding; readable when equal to `shards`.
    covered: int = 0
    #: {data centre: {shard: offerable sources}}; zero counts are absent.
    centres: dict[str, dict[int, int]] = field(default_factory=dict)
    #: A newer lineage replaced it: no new decisions.
    retired: bool = False
    #: Parts whose shard nobody has brought back yet: each waits for its slot. Empty but in a grace.
    unplaced: dict[Seat, Part] = field(default_factory=dict)

    @property
    def readable(self) -> bool:
        return self.covered == self.shards


@dataclass(slots=True)
class Lineage:
    #: No two of a model have the same.
    order: int
    #: Its lowest number: versions of older lineages from here on are retired.
    first: int
    #: The highest number ever published.
    highest: int
    #: By somebody who knew of no earlier life, or after all had come back: newer than whatever comes back.
    opened_here: bool = False


@dataclass(slots=True)
class Waiting:
    """A blocked `Wait` call."""

    session: SessionId
    call: int
    selector: Selector
    location: Location


@dataclass(slots=True, eq=False)
class ModelTable:
    key: ModelKey
    lineages: dict[str, Lineage] = field(default_factory=dict)
    newest: str | None = None
    #: A version nobody holds is absent, not empty.
    versions: dict[Version, VersionRecord] = field(default_factory=dict)
    #: Versions that are not retired, by number: numbers rise from lineage to lineage.
    current: dict[int, VersionRecord] = field(default_factory=dict)
    #: Numbers of readable, not retired versions, ascending; each is in `current`.
    readable: list[int] = field(default_factory=list)
    replicas: dict[ReplicaId, Replica] = field(default_factory=dict)
    #: Open transactions without a version, oldest first.
    undecided: dict[ReplicaId, Transaction] = field(default_factory=dict)
    waits: dict[tuple[SessionId, int], Waiting] = field(default_factory=dict)
    watchers: dict[tuple[SessionId, int], None] = field(default_factory=dict)
    #: The newest version that anybody who came from an earlier life has seen or published; its lineage is known.
    floor: Version | None = None
    #: A publisher has come back: nothing newer than the floor was published.
    vouched: bool = False
    #: {shard: bytes per second of its last fillings}; at most RATES_MAX each.
    rates: dict[int, deque[int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Part:
    """One shard's share of a transaction."""

    transaction: Transaction
    member: Member
    #: As first asked.
    request: Replicate
    deadline_ns: int
    phase: Phase = Phase.WAITING
    #: The call that is owed an answer, or None.
    call: int | None = None
    filling: Holding | None = None
    #: When it began to drain its own old readers, and how long that took.
    drain_began_ns: int | None = None
    drained_ns: int = 0
    #: Sources that failed this reader, by generation.
    suspects: dict[Generation, None] = field(default_factory=dict)
    #: Sources that it has left once without blame, as they had nothing to serve: the next time they are suspect too.
    excused: set[Generation] = field(default_factory=set)
    #: Why it waits for a source: for people.
    lack: str = ""
    #: The line of its slot that it waits in, or None.
    line: Line | None = None
    #: Rather waits for an idle source than share one; while it waits with a filling it has a deadline.
    patient: bool = True

    @property
    def generation(self) -> Generation:
        """Of the filling to come."""
        return self.request.generation

    @property
    def serves(self) -> bool:
        """False for a subset."""
        return self.request.serves


@dataclass(slots=True, eq=False)
class Transaction:
    """One decision for all shards of a replica. A replica has at most one open."""

    replica: Replica
    group: int
    sequence: int
    selector: Selector
    buffers: str
    parts: dict[int, Part] = field(default_factory=dict)
    record: VersionRecord | None = None
    #: The replica that serves the first shard granted: preferred for the others.
    source: ReplicaId | None = None
    #: {shard: holding} that keeps the version readable for a shard not yet granted.
    pins: dict[int, Holding] = field(default_factory=dict)
    #: {shard: old holding} this transaction hid; shown again if it aborts before the grant.
    hidden: dict[int, Holding] = field(default_factory=dict)
    #: {shard: holding} that has the version already.
    held: dict[int, Holding] = field(default_factory=dict)
    deadline_ns: int = 0
    #: Parts in phase DONE whose root is settled.
    done: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """How a transaction ended."""

    #: The committed version, or None when aborted.
    version: Version | None
    #: {shard: why it failed}; late failures of the same sequence are added.
    failures: dict[int, str]

    def __str__(self) -> str:
        if self.version is not None:
            return f"it committed version {self.version}"
        return "; ".join(f"shard {shard}: {why}" for shard, why in sorted(self.failures.items()))


@dataclass(slots=True, eq=False)
class Replica:
    model: ModelTable
    id: ReplicaId
    shards: int
    layout: str
    #: Group incarnation: never used twice in a server's life.
    group: int
    sequence: int = 0
    members: dict[int, Member] = field(default_factory=dict)
    transaction: Transaction | None = None
    #: {(group, sequence): outcome}, the last OUTCOMES_MAX, oldest first.
    outcomes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    #: Why the group last got a new incarnation.
    moved: str = ""
    story: Story = field(default_factory=Story)


@dataclass(slots=True)
class State:
    epoch: Epoch
    sessions: dict[SessionId, Session] = field(default_factory=dict)
    models: dict[ModelKey, ModelTable] = field(default_factory=dict)
    #: Models without replicas, waits and watchers, longest idle first.
    idle: dict[ModelKey, None] = field(default_factory=dict)
    #: All holdings of all models.
    generations: dict[Generation, Holding] = field(default_factory=dict)
    #: {generation of a source not known yet: fillings that claimed to read from it}.
    awaited: dict[Generation, dict[Generation, None]] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)
    #: While it is open, and only then, it has a deadline.
    grace: Grace = Grace.NONE
    #: Counts group incarnations and holdings.
    groups: int = 0
    born: int = 0
