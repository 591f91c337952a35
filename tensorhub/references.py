"""References: where a shard of a version lies in one holder, and what that version is, without a byte of it.

The server keeps and hands out these values; locators and exposures are opaque to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.types import Digest, Generation, Location, Seat, Selector, SessionId, Version


@dataclass(frozen=True, slots=True)
class Locator:
    """How one engine reaches a holder. `data` is the engine's own, opaque to all others."""

    engine: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """Where one shard of a version lies in one holder. Metadata, never bytes of weights."""

    seat: Seat
    session: SessionId
    generation: Generation
    location: Location
    locators: tuple[Locator, ...]
    #: Addresses of progress block, manifest and memory map in the holder (`pipeline/exposure.py`).
    exposure: bytes


@dataclass(frozen=True, slots=True)
class Content:
    """What one shard of a version is, as far as a server needs to know."""

    manifest: Digest
    shard_bytes: int
    chunks: int
    #: False for `digest="off"`: nothing of this version can be verified.
    verified: bool


@dataclass(frozen=True, slots=True)
class LineageMark:
    """Where a lineage stands among those of its model: `order` counts their openings, `first` is its lowest number."""

    name: str
    order: int
    first: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a session holds and brings to a server that may not know it: another life, or one that lost its answer."""

    buffers: str
    version: Version
    generation: Generation
    content: Content
    #: Root digest when sealed or complete, else empty.
    root: Digest
    #: Published in place; else replicated and committed.
    published: bool
    #: Chunks that may be read.
    watermark: int
    locators: tuple[Locator, ...]
    exposure: bytes
    #: Withdrawn from new readers; it may still have old ones.
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Undertaking:
    """A transaction under way, as one of its shards knows it: its version is decided, and nothing else may be."""

    buffers: str
    selector: Selector
    version: Version
    content: Content
    #: Of the filling.
    generation: Generation
    #: Of the call, what is left.
    timeout_ns: int
    #: Nothing is filled: the shard had the version already.
    held: bool
    #: False when only a subset of the tensors is written.
    serves: bool
    #: Generation of the source that it reads from.
    upstream: Generation
    watermark: int
    bytes_done: int
    #: What was read, as a whole; empty until it is.
    root: Digest
    #: How the filling is, or will be, shown; empty when that is not known yet.
    locators: tuple[Locator, ...]
    exposure: bytes
    #: The filling shows its generation.
    begun: bool


@dataclass(frozen=True, slots=True)
class Standing:
    """What a seat remembers of the lives of its server so far. A new life goes on from there."""

    #: Incarnation of its group, and the number of its next, or present, transaction; 0 for a process that knows none.
    group: int = 0
    sequence: int = 0
    #: The last transaction of this group that it knows to be committed, and to what; -1 for none.
    committed_sequence: int = -1
    committed: Version | None = None
    #: The last version that this seat published, and the newest that it knows to have been readable.
    published: Version | None = None
    seen: Version | None = None
    #: Of every version that it names.
    lineages: tuple[LineageMark, ...] = ()
    undertaking: Undertaking | None = None


#: Of a process that has met no server before.
NO_PAST = Standing()
