"""What the server shows to people: rows of tables, events. Frozen values without behaviour; replies carry them.

Everything here is an observation of one instant; nothing decides anything by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.types import Epoch, Location, ModelKey, Seat, SessionId, Version


@dataclass(frozen=True, slots=True)
class VersionView:
    """One row of `tensorhub versions`."""

    model: ModelKey
    version: Version
    #: "readable", "incomplete" (shards missing), "hidden" (withdrawn everywhere), "retired" (a newer lineage)
    state: str
    shards: int
    nbytes: int
    complete: tuple[str, ...]
    partial: tuple[str, ...]
    readers: int
    verified: bool


@dataclass(frozen=True, slots=True)
class PulledView:
    """A source that a holding was filled from. It may hold other things by now, or be gone."""

    source: Seat
    #: Bytes verified from it.
    nbytes: int
    #: Engine, and why that one; empty when the reader has not said.
    route: str
    #: Since it was given this source.
    age_ns: int
    #: From then until it read no more from it, or until now.
    took_ns: int


@dataclass(frozen=True, slots=True)
class HoldingView:
    """One row of `tensorhub status`: a buffer set of one seat."""

    seat: Seat
    shards: int
    buffers: str
    version: Version
    #: "publishing" (digests outstanding), "published", "filling", "complete", "draining"
    state: str
    watermark: int
    chunks: int
    nbytes: int
    upstream: str
    readers: tuple[str, ...]
    spot: bool
    location: Location
    #: Engine that a filling was last read over, and why that one; empty for a publisher's.
    route: str
    #: Whom it was filled from, in order; the last may be `upstream`. Empty for a publisher's, and for what was complete
    #: before this life of the server. Where there were many, those that gave least are missing.
    pulled: tuple[PulledView, ...]


@dataclass(frozen=True, slots=True)
class SessionView:
    """A process the server knows."""

    session: SessionId
    host: str
    pid: int
    seats: tuple[Seat, ...]
    lease_left_ns: int


@dataclass(frozen=True, slots=True)
class WaitView:
    """A request that waits, and for what."""

    who: str
    what: str
    left_ns: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Newest first."""

    versions: tuple[VersionView, ...]


@dataclass(frozen=True, slots=True)
class StatusView:
    """The server's whole view at one instant."""

    epoch: Epoch
    sessions: tuple[SessionView, ...]
    versions: tuple[VersionView, ...]
    holdings: tuple[HoldingView, ...]
    waiting: tuple[WaitView, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed.

    kind: "published", "sealed", "readable", "hidden", "unpublished", "granted", "rerouted", "committed", "aborted",
    "slow", "joined", "left", "expired", "conflict", "retired".
    """

    kind: str
    model: ModelKey
    version: Version | None
    replica: str
    shard: int
    detail: str
