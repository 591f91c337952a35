"""Chooses the source of one reader among the holders of one shard, and says why. Pure; it changes nothing.

In this order: the source its group began with; nearest; least loaded, by readers weighted with what they have left;
complete before partial at equal load; who was first. Once others hold the version, publishers come last within a data
centre. A full or quarantined holder is on no shelf, so it is never seen here. No choice makes a cycle or a deep chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from tensorhub.server.settings import CANDIDATES_MAX, DEPTH_MAX, READERS_PER_SOURCE_MAX
from tensorhub.server.state import Holding, HoldingState, Slot
from tensorhub.types import Generation, Location, ReplicaId

#: Rows of a shelf.
COMPLETE, PARTIAL, PUBLISHER = 0, 1, 2
#: Parts into which what a reader has left is divided for its weight: coarse, so that loads are often equal.
LOAD_STEPS = 4


@dataclass(frozen=True, slots=True)
class Reader:
    """Who asks."""

    replica: ReplicaId
    location: Location
    #: Its filling when it asks for another source, None for the first.
    filling: Holding | None = None
    #: Sources that failed it.
    suspects: Mapping[Generation, None] = field(default_factory=dict)
    #: The replica its group's first shard reads from.
    prefer: ReplicaId | None = None
    #: The holding that is kept for it, even hidden.
    pinned: Holding | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    holding: Holding
    reason: str


def choose(slot: Slot, reader: Reader) -> Choice | None:
    """The best source, or None when none has a free place for this reader."""
    if reader.prefer is not None:
        for holding in of_replica(slot, reader.prefer):
            if holding.listed is not None and holding.listed.shelf is not None and fits(holding, reader):
                return Choice(holding, _reason("the group's source", holding))
    demoted = slot.replicated > 0
    for levels in _levels(reader.location):
        for level in levels:
            best = _best(slot, level, reader, (COMPLETE, PARTIAL) if demoted else (COMPLETE, PARTIAL, PUBLISHER))
            if best is not None:
                return Choice(best, _reason(f"nearest and least loaded in {'/'.join(level) or 'all'}", best))
        for level in levels if demoted else ():
            best = _best(slot, level, reader, (PUBLISHER,))
            if best is not None:
                return Choice(best, _reason(f"publisher, as no other has a place in {'/'.join(level) or 'all'}", best))
    pinned = reader.pinned
    if pinned is not None and pinned.hidden and len(pinned.readers) < READERS_PER_SOURCE_MAX and fits(pinned, reader):
        return Choice(pinned, _reason("hidden, but kept for this group", pinned))
    return None


def of_replica(slot: Slot, replica: ReplicaId) -> Iterator[Holding]:
    """What a replica holds of this shard."""
    known = slot.record.model.replicas.get(replica)
    member = None if known is None else known.members.get(slot.shard)
    if member is not None:
        yield from (holding for holding in member.holdings.values() if holding.slot is slot)


def fits(holding: Holding, reader: Reader) -> bool:
    """Whether this reader may read from it, leaving load and distance aside."""
    if holding.member.replica.id == reader.replica or holding.generation in reader.suspects:
        return False
    filling = reader.filling
    partial = holding.state is HoldingState.FILLING
    if filling is not None and partial and holding.watermark <= filling.watermark:
        return False
    depth = 1
    above = holding.upstream
    while above is not None and depth <= DEPTH_MAX:
        if above is filling:
            return False
        above = above.upstream
        depth += 1
    return depth + (0 if filling is None else filling.height) <= DEPTH_MAX


def shelf_of(holding: Holding) -> int:
    match holding.state:
        case HoldingState.PUBLISHED:
            return PUBLISHER
        case HoldingState.COMPLETE:
            return COMPLETE
        case HoldingState.FILLING:
            return PARTIAL


def weight(watermark: int, chunks: int) -> int:
    """What a reader adds to its source's load: 1 to LOAD_STEPS, by what it has left."""
    return max(1, -(-(chunks - watermark) * LOAD_STEPS // chunks)) if chunks else 1


def prefixes(location: Location) -> list[tuple[str, ...]]:
    """All places a location lies in, most exact first; the last is everywhere."""
    return [location.parts[:depth] for depth in range(len(location.parts), -1, -1)]


def _levels(location: Location) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The places to look at within the reader's data centre, and then beyond it."""
    places = prefixes(location)
    return places[:-1], places[-1:]


def _best(slot: Slot, level: tuple[str, ...], reader: Reader, rows: tuple[int, ...]) -> Holding | None:
    shelf = slot.shelves.get(level)
    if shelf is None:
        return None
    firsts = [
        (load, row == PARTIAL, born, holding)
        for row in rows
        for load, born, holding in islice(_fitting(shelf.rows[row], reader), 1)
    ]
    return min(firsts, key=lambda first: first[:3])[3] if firsts else None


def _fitting(row: list[tuple[int, int, Holding]], reader: Reader) -> Iterator[tuple[int, int, Holding]]:
    return (entry for entry in islice(row, CANDIDATES_MAX) if fits(entry[2], reader))


def _reason(why: str, holding: Holding) -> str:
    what = "partial" if holding.state is HoldingState.FILLING else "complete"
    return f"{why}: {what}, {len(holding.readers)} readers"
