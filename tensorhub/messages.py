"""What client and server say to each other: the only module in which the two meet.

Requests, replies and notices are frozen values without behaviour. A frame is `Call(id, request)` one way and
`Answer(id, reply)` the other; a notice is an `Answer` with id 0. Every duration is relative and in nanoseconds:
no wall clock is ever compared between machines. Locators and exposures are opaque bytes to the server.
`wire/codec.py` gives each message its bytes; the order of fields is the format.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub.errors import Where
from tensorhub.references import NO_PAST, Claim, Content, LineageMark, Locator, Reference, Standing, Undertaking
from tensorhub.types import (
    UNVERIFIED,
    Digest,
    Epoch,
    Generation,
    Location,
    ModelKey,
    Seat,
    Selector,
    SessionId,
    Version,
)
from tensorhub.views import Event, HoldingView, Listing, SessionView, StatusView, VersionView, WaitView

#: Raised with every change that an older peer cannot read; a server refuses another number by name.
PROTOCOL = 4

# ---------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class Hello:
    """First request of a session. `token` is the authentication slot; `epoch` the server life last seen, or empty."""

    protocol: int
    session: SessionId
    token: bytes = field(repr=False)  # logs and stories show requests
    host: str
    pid: int
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Beat:
    """The session is alive. Travels on a connection of its own, sent by a thread that needs no interpreter."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Join:
    """Take a seat: `SeatTaken` while another live session holds it, `LayoutMismatch` when `shards` differ. Said
    again by whoever holds the seat, it tells all that the seat holds."""

    seat: Seat
    shards: int
    layout: str
    spot: bool
    location: Location
    claims: tuple[Claim, ...] = ()
    standing: Standing = NO_PAST


@dataclass(frozen=True, slots=True)
class Publish:
    """Announce a version in place. Readable by others once every shard of the replica has published it."""

    seat: Seat
    buffers: str
    version: Version
    generation: Generation
    content: Content
    locators: tuple[Locator, ...]
    exposure: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """The publisher has digested everything: this is the version's root digest for this shard."""

    seat: Seat
    generation: Generation
    root: Digest


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Hide the holding of a buffer set, then answer when its last reader is gone, or refuse with `DrainTimeout`.

    With `abandon` it is dropped at once; the answer names the readers that were left to fail untorn.
    """

    seat: Seat
    buffers: str
    #: Asked again, it must not hide what came after.
    generation: Generation
    timeout_ns: int
    abandon: bool = False


@dataclass(frozen=True, slots=True)
class Replicate:
    """Ask, as one shard of a group, for the version that `selector` names.

    `group` is the incarnation of the group as last told, `sequence` counts this seat's transactions within it.
    Answered by `Granted` or `Held`, when a version matches and the seat's own old readers are drained.
    """

    seat: Seat
    buffers: str
    group: int
    sequence: int
    selector: Selector
    timeout_ns: int
    #: The filling to come; names this reader in its source's list of grants.
    generation: Generation
    #: False when only a subset of the tensors will be written: such a filling never serves.
    serves: bool = True
    #: How the filling will be shown if the version turns out to have this manifest: others may then be sent to it with
    #: the grant, before it has begun. Empty: it will say so with `Serve`.
    manifest: Digest = UNVERIFIED
    locators: tuple[Locator, ...] = ()
    exposure: bytes = b""


@dataclass(frozen=True, slots=True)
class Serve:
    """The reader has planned its filling; from now on others may read its verified prefix.

    Not needed where the grant was for the manifest that `Replicate` named.
    """

    seat: Seat
    generation: Generation
    locators: tuple[Locator, ...]
    exposure: bytes
    #: Engine that reads from the source, and why that one: for people.
    route: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a filling is. One-way; keeps the source alive in the server's eyes, too."""

    seat: Seat
    generation: Generation
    watermark: int
    bytes_done: int
    #: As in `Serve`, once it has changed; else empty.
    route: str = ""
    #: Time since the last report, or since reading from this source began, by the reader's own clock; 0: not measured.
    period_ns: int = 0


@dataclass(frozen=True, slots=True)
class Reroute:
    """The source named by generation failed this reader; asks for another. Answered by `Granted` or refused."""

    seat: Seat
    generation: Generation
    source: Generation
    reason: str
    watermark: int
    bytes_done: int
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class Done:
    """Every byte of this shard is verified and installed. Answered by `Committed` once all shards are; idempotent."""

    seat: Seat
    group: int
    sequence: int
    generation: Generation
    root: Digest
    bytes_done: int


@dataclass(frozen=True, slots=True)
class Abort:
    """This shard cannot finish: the sequence number is aborted for the whole group.

    It also says that this shard reads no more; until then the source of a shard that was aborted by others is not
    drained. So it is said of a transaction that is over, too, then without a reason.
    """

    seat: Seat
    group: int
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Answer `Found` when a version matches, or refuse with `WaitTimeout`."""

    model: ModelKey
    selector: Selector
    location: Location
    timeout_ns: int


@dataclass(frozen=True, slots=True)
class List:
    """All versions of a model, or of all models of all jobs."""

    model: ModelKey | None


@dataclass(frozen=True, slots=True)
class Status:
    """Everything the server knows of a model, or of all: for people and for `tensorhub status`."""

    model: ModelKey | None


@dataclass(frozen=True, slots=True)
class Watch:
    """Answer with an `Event` for each change of a model until the session ends or calls `Unwatch`."""

    model: ModelKey


@dataclass(frozen=True, slots=True)
class Unwatch:
    """End the watch that was opened by call `call`."""

    call: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Give up a seat and everything it holds, at once."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class Goodbye:
    """End the session and give up every seat."""


Request = (
    Hello
    | Beat
    | Join
    | Publish
    | Seal
    | Unpublish
    | Replicate
    | Serve
    | Progress
    | Reroute
    | Done
    | Abort
    | Wait
    | List
    | Status
    | Watch
    | Unwatch
    | Leave
    | Goodbye
)

# ---------------------------------------------------------------- replies


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's life, and how long it trusts a silent session."""

    epoch: Epoch
    lease_ns: int
    beat_ns: int
    #: This life has not forgotten the session since it first said Hello: every grant still counts.
    known: bool


@dataclass(frozen=True, slots=True)
class Ok:
    """Done as asked, with nothing to add."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The seat is taken. `group` is the group's incarnation, `sequence` the next transaction's number for this seat."""

    group: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Announced:
    """The version is published by this shard."""

    lineage: LineageMark


@dataclass(frozen=True, slots=True)
class Unpublished:
    """Hidden and drained; with `abandon`, `readers` names who was still reading. `served` names who ever read it."""

    readers: tuple[str, ...]
    served: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Granted:
    """Read `version` from `source`. `root` is empty while the publisher still digests."""

    version: Version
    content: Content
    root: Digest
    source: Reference
    #: Why this source: for people.
    reason: str
    lineage: LineageMark
    #: How long the grant waited for this seat's own old readers.
    drained_ns: int = 0
    #: False while the source is not known to show the generation yet: it was itself granted a moment ago.
    begun: bool = True


@dataclass(frozen=True, slots=True)
class Held:
    """This seat holds `version` already, and so does, or will, its whole group. `Done` follows as after a pull."""

    version: Version
    lineage: LineageMark


@dataclass(frozen=True, slots=True)
class Committed:
    """All shards of the replica hold `version`: it may be shown and used."""

    version: Version


@dataclass(frozen=True, slots=True)
class Found:
    """The version a `Wait` matched."""

    version: Version


@dataclass(frozen=True, slots=True)
class Refused:
    """The request failed. `error` is a name from `errors.BY_NAME`."""

    error: str
    message: str
    where: Where


# ---------------------------------------------------------------- notices (id 0)


@dataclass(frozen=True, slots=True)
class Moved:
    """The group of a seat goes on elsewhere: it has a new incarnation, as a shard restarted, died or left; or one that
    came back knows of later transactions."""

    seat: Seat
    group: int
    #: The number of the next transaction.
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The source of a filling is gone; the reader should reroute now instead of noticing by itself."""

    seat: Seat
    generation: Generation
    source: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class TransactionAborted:
    """A sibling failed: stop pulling, `Done` would be refused; say `Abort` when the last read has ended. Whoever had
    not asked yet: the number is used up."""

    seat: Seat
    group: int
    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Conflicted:
    """What this seat published as `version` differs from what others published: it is offered to nobody."""

    seat: Seat
    generation: Generation
    version: Version
    reason: str


Notice = Moved | SourceLost | TransactionAborted | Conflicted

Reply = (
    Welcome
    | Ok
    | Joined
    | Announced
    | Unpublished
    | Granted
    | Held
    | Committed
    | Found
    | Listing
    | StatusView
    | Event
    | Refused
)


@dataclass(frozen=True, slots=True)
class Call:
    """Client to server. `id` is unique in the session and never 0, except for one-way requests."""

    id: int
    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """Server to client. `id` 0 is a notice."""

    id: int
    reply: Reply | Notice


# fmt: off
__all__ = [
    "Abort", "Announced", "Answer", "Beat", "Call", "Claim", "Committed", "Conflicted", "Content", "Done", "Event",
    "Found", "Goodbye", "Granted", "Held", "Hello", "HoldingView", "Join", "Joined", "Leave", "LineageMark", "List",
    "Listing", "Locator", "Moved", "Notice", "Ok", "PROTOCOL", "Progress", "Publish", "Reference", "Refused",
    "Replicate", "Reply", "Request", "Reroute", "Seal", "Serve", "SessionView", "SourceLost", "Standing", "Status",
    "StatusView", "TransactionAborted", "Undertaking", "Unpublish", "Unpublished", "Unwatch", "VersionView", "Wait",
    "WaitView", "Watch", "Welcome",
]
# fmt: on
