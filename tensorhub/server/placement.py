"""Chooses the source of one reader among the holders of one shard, and says why. Pure; it changes nothing.

The uplinks of hosts are alike: a second reader on one halves what each gets, while a hop more costs next to nothing. So
a source whose uplink nobody uses, an *idle* one, comes before any other: the graph grows as a chain. Within a host no
uplink is used: a reader takes a source of its own host whatever is idle elsewhere, so that a version crosses to a host
once. Otherwise in this order, within the reader's data centre and only then beyond it: the idle source its group began
with; an idle one, nearest first; none at all, for a while, when one will be idle soon; the least loaded, nearest first,
with the shortest chain below; a slow one. Complete comes before partial among equals, then who was first. Once others
hold the version, publishers come last within a data centre. A full or quarantined holder is on no shelf, so it is never
seen here. No choice makes a cycle or too deep a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import itemgetter

from tensorhub.server.settings import CANDIDATES_MAX, DEPTH_MAX, READERS_PER_SOURCE_MAX
from tensorhub.server.state import Holding, HoldingState, Slot
from tensorhub.types import Generation, Location, ReplicaId

#: Rows of a shelf.
COMPLETE, PARTIAL, PUBLISHER, SLOW = 0, 1, 2, 3
#: Parts of a location that names a host: data centre, rack, host.
HOST_PARTS = 3
#: Parts into which what a reader has left is divided for its weight: coarse, so that loads are often equal.
LOAD_STEPS = 4

#: A place that a location lies in: `("dc1", "r3")`; `()` is everywhere.
Place = tuple[str, ...]
#: What stands in a row: load of the uplink, order of creation, holding.
Entry = tuple[int, int, Holding]


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
    #: Rather waits for a source that will be idle soon than share one.
    patient: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    holding: Holding
    reason: str


def choose(slot: Slot, reader: Reader) -> Choice | None:
    """The best source, or None when none has a place for this reader, or when it is better to wait for one."""
    here = host(reader.location)
    if here is not None:
        found = _search(slot, [here], reader, "on the same host, in")
        if found is not None or (reader.patient and reader.filling is None and here in slot.promises):
            return found
    for places in _scopes(reader.location):
        found = _group_source(slot, places, reader) or _search(
            slot, places, reader, "nearest idle source in", idle=True
        )
        if found is None and reader.patient and _is_one_coming(slot, places, reader):
            return None
        found = found or _search(slot, places, reader, "no source is idle; least loaded in")
        found = found or _last_resort(slot, places, reader)
        if found is not None:
            return found
    pinned = reader.pinned
    if pinned is not None and pinned.hidden and len(pinned.readers) < READERS_PER_SOURCE_MAX and fits(pinned, reader):
        return Choice(pinned, _reason("hidden, but kept for this group", pinned))
    return None


def _group_source(slot: Slot, places: list[Place], reader: Reader) -> Choice | None:
    """The source of the reader's group, if it lies within these places and is idle."""
    for holding in () if reader.prefer is None else of_replica(slot, reader.prefer):
        listed = holding.listed
        is_idle = listed is not None and listed.shelf not in (None, SLOW) and listed.load == 0
        is_within = not places[-1] or places[-1][0] == centre(holding.member.location)
        if is_idle and is_within and fits(holding, reader):
            return Choice(holding, _reason("the group's source", holding))
    return None


def _search(slot: Slot, places: list[Place], reader: Reader, why: str, *, idle: bool = False) -> Choice | None:
    """The best of these places, nearest first; publishers last once others hold the version."""
    demoted = slot.replicated > 0
    for rows in ((COMPLETE, PARTIAL), (PUBLISHER,)) if demoted else ((COMPLETE, PARTIAL, PUBLISHER),):
        for place in places:
            best = _best(slot, place, reader, rows, idle=idle)
            if best is not None:
                return Choice(best, _reason(f"{why} {'/'.join(place) or 'all'}", best))
    return None


def _last_resort(slot: Slot, places: list[Place], reader: Reader) -> Choice | None:
    """A slow source, when nothing else has a place."""
    for place in places:
        best = _best(slot, place, reader, (SLOW,), idle=False)
        if best is not None:
            return Choice(best, _reason(f"slow, but no other has a place in {'/'.join(place) or 'all'}", best))
    return None


def _is_one_coming(slot: Slot, places: list[Place], reader: Reader) -> bool:
    """Whether one of these places will have an idle source soon.

    For a first source: a filling that has been granted and will serve. For another one: an idle filling that is not
    far enough yet. A slow reader waits for the end of the chain, whatever it looks like now.
    """
    if reader.filling is not None:
        if reader.filling.asked and reader.filling.member.slow:
            return True
        # None of these fits, or it had been found: what those lack that it may read from at all is bytes.
        return any(_may_read(entry[2], reader) for entry in _idle_entries(slot, places[-1]))
    is_kept = any(_is_kept(entry[2]) for entry in _idle_entries(slot, places[-1]))
    return is_kept or any(not places[-1] or places[-1][0] == here[0] for here in slot.promises)


def _idle_entries(slot: Slot, place: Place) -> Iterator[Entry]:
    shelf = slot.shelves.get(place)
    for row in () if shelf is None else shelf.rows[:SLOW]:
        yield from takewhile(_is_idle, islice(row, CANDIDATES_MAX))


def _is_kept(holding: Holding) -> bool:
    """It has been left, or is about to be, for the readers of the one that leaves it."""
    return any(reader.asked for reader in holding.readers.values())


def of_replica(slot: Slot, replica: ReplicaId) -> Iterator[Holding]:
    """What a replica holds of this shard."""
    known = slot.record.model.replicas.get(replica)
    member = None if known is None else known.members.get(slot.shard)
    if member is not None:
        yield from (holding for holding in member.holdings.values() if holding.slot is slot)


def fits(holding: Holding, reader: Reader) -> bool:
    """Whether this reader may read from it, leaving load and distance aside."""
    filling = reader.filling
    is_partial = holding.state is HoldingState.FILLING
    if filling is not None and is_partial and holding.watermark < filling.watermark:
        return False
    return _may_read(holding, reader)


def _may_read(holding: Holding, reader: Reader) -> bool:
    """Whether it would fit if only it had enough bytes; it never gets them from this reader."""
    if holding.member.replica.id == reader.replica or holding.generation in reader.suspects:
        return False
    filling = reader.filling
    if filling is not None and holding is filling.upstream and reader.patient:
        return False  # it was asked to leave this one
    depth = _depth(holding, filling)
    return depth is not None and depth + (0 if filling is None else filling.height) <= DEPTH_MAX


def _depth(holding: Holding, filling: Holding | None) -> int | None:
    """Hops of a reader of this holding from the top of its chain; None when the chain passes through `filling`.

    More than DEPTH_MAX are not counted.
    """
    depth = 1
    above = holding.upstream
    while above is not None and depth <= DEPTH_MAX:
        if above is filling:
            return None
        above = above.upstream
        depth += 1
    return depth


def shelf_of(holding: Holding) -> int:
    if holding.doubted or (holding.member.slow and holding.state is not HoldingState.PUBLISHED):
        return SLOW
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


def weight_of(reader: Holding) -> int:
    """Its weight at its source; none when it is slow, as it takes too little, about to leave, may be dead, or lies on
    the same host."""
    here = host(reader.member.location)
    is_near = here is not None and reader.upstream is not None and reader.upstream.member.location.parts == here
    is_light = reader.asked or reader.member.slow or reader.doubted or is_near
    return 0 if is_light else weight(reader.watermark, reader.slot.content.chunks)


def prefixes(location: Location) -> list[Place]:
    """All places a location lies in, most exact first; the last is everywhere."""
    return [location.parts[:depth] for depth in range(len(location.parts), -1, -1)]


def centre(location: Location) -> str:
    """The data centre; unknown locations are local to each other."""
    return centre_of(location.parts)


def centre_of(place: Place) -> str:
    return place[0] if place else ""


def host(location: Location) -> Place | None:
    """The host, where the location says one: processes there reach each other without a network."""
    return location.parts if is_host(location.parts) else None


def is_host(place: Place) -> bool:
    return len(place) >= HOST_PARTS


def nearest(location: Location) -> Place:
    """The smallest place that it shares with others: its host if that is known, else its rack."""
    return host(location) or rack(location.parts)


def rack(place: Place) -> Place:
    """What a host, or a location that ends with less, lies in."""
    return place[:-1] or place


def has_idle(slot: Slot, place: Place) -> bool:
    return next(_idle_entries(slot, place), None) is not None


def _scopes(location: Location) -> list[list[Place]]:
    """The places within the reader's data centre, nearest first, and then what lies beyond it."""
    *within, everywhere = prefixes(location)
    return [within, [everywhere]] if within else [[everywhere]]


def _best(slot: Slot, place: Place, reader: Reader, rows: tuple[int, ...], *, idle: bool) -> Holding | None:
    shelf = slot.shelves.get(place)
    if shelf is None:
        return None
    firsts = [
        ((first[0], _below(first), row == PARTIAL), first[2])
        for row in rows
        if (first := _first(_fitting(shelf.rows[row], reader, idle=idle))) is not None
    ]
    return min(firsts, key=itemgetter(0))[1] if firsts else None


def _first(entries: Iterator[Entry]) -> Entry | None:
    """The least loaded; of several that are shared, the one with the shortest chain below: whoever comes second at a
    source halves the rate of all that are below it."""
    first = next(entries, None)
    if first is None or _is_idle(first):
        return first
    load = first[0]
    return min([first, *takewhile(lambda entry: entry[0] == load, entries)], key=_below)


def _below(entry: Entry) -> int:
    return 0 if _is_idle(entry) else entry[2].height


def _fitting(row: list[Entry], reader: Reader, *, idle: bool) -> Iterator[Entry]:
    entries: Iterator[Entry] = islice(row, CANDIDATES_MAX)
    if idle:
        is_new = reader.filling is None
        entries = (entry for entry in takewhile(_is_idle, entries) if not (is_new and _is_kept(entry[2])))
    return (entry for entry in entries if fits(entry[2], reader))


def _is_idle(entry: Entry) -> bool:
    return entry[0] == 0


def _reason(why: str, holding: Holding) -> str:
    what = "partial" if holding.state is HoldingState.FILLING else "complete"
    return f"{why}: {what}, {len(holding.readers)} readers"
