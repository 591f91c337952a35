"""What is offered: the indexes of a version's sources, and the promises of more to come.

Every change of a holding ends with `refresh`, which makes them true again. It never decides who reads what
(`placement.py`); it marks what others must look at again.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from tensorhub.server.placement import Place, centre, host, prefixes, shelf_of
from tensorhub.server.settings import COMPLETE_SOURCES, READERS_PER_SOURCE_MAX
from tensorhub.server.state import Holding, HoldingState, Listed, Shelf, VersionRecord
from tensorhub.server.turn import Turn
from tensorhub.types import Location


def hide(turn: Turn, holding: Holding) -> None:
    """Offer it to no new reader."""
    holding.hidden = True
    refresh(turn, holding)


def show(turn: Turn, holding: Holding) -> None:
    """Undo `hide`: nothing was written."""
    holding.hidden = False
    refresh(turn, holding)


# ---------------------------------------------------------------- promises


def promise(turn: Turn, filling: Holding) -> None:
    """It will serve once it has planned: until then, but not for long, others wait for it rather than share a source.

    A filling that reads from another data centre plans over a link of long delays, and has longer.
    """
    member, slot = filling.member, filling.slot
    if (
        filling.promises
        or filling.serves
        or member.slow
        or filling.upstream is None
        or turn.settings.sources == COMPLETE_SOURCES
    ):
        return
    is_near = centre(member.location) == centre(filling.upstream.member.location)
    patience_ns = turn.settings.patience_ns if is_near else turn.settings.far_patience_ns
    if patience_ns == 0:
        return
    filling.promises = True
    for here in promised(member.location):
        slot.promises[here] = slot.promises.get(here, 0) + 1
    turn.deadlines.set(("promise", filling.generation), turn.now_ns + patience_ns)


def end_promise(turn: Turn, filling: Holding) -> None:
    """It serves, is gone, or was waited for long enough."""
    if not filling.promises:
        return
    slot = filling.slot
    filling.promises = False
    turn.deadlines.cancel(("promise", filling.generation))
    for here in promised(filling.member.location):
        slot.promises[here] -= 1
        if slot.promises[here] == 0:
            del slot.promises[here]
    turn.slots[slot] = None


def promised(location: Location) -> list[Place]:
    """Where a promise counts: in the data centre, and on the host, if that is known."""
    here = host(location)
    return [(centre(location),), *([] if here is None else [here])]


# ---------------------------------------------------------------- indexes


def refresh(turn: Turn, holding: Holding) -> None:
    """Make the indexes say what the holding is now. Cheap when nothing changed."""
    if holding.serves or holding.upstream is None:
        end_promise(turn, holding)
    now = _listing(turn, holding)
    before = holding.listed
    if now == before:
        return
    slot = holding.slot
    readable, local = slot.record.readable, _local_shards(holding)
    if before is not None:
        _unlist(holding, before)
    holding.listed = now
    if now is not None:
        _list(holding, now)
    if _local_shards(holding) != local:
        turn.models[slot.record.model] = None
    if slot.record.readable != readable:
        _readable_changed(turn, slot.record, holding)
    if now is not None and now.shelf is not None and slot.lines:
        turn.slots[slot] = None


def _local_shards(holding: Holding) -> int:
    """Shards of the version that have a source in the holder's data centre."""
    return len(holding.slot.record.centres.get(centre(holding.member.location), ()))


def _listing(turn: Turn, holding: Holding) -> Listed | None:
    if holding.hidden or not holding.proven or turn.state.generations.get(holding.generation) is not holding:
        return None
    filling = holding.state is HoldingState.FILLING
    moving = holding.upstream is not None or holding.watermark == holding.slot.content.chunks
    if filling and not (holding.serves and moving and turn.settings.sources != COMPLETE_SOURCES):
        return None
    has_place = len(holding.readers) < READERS_PER_SOURCE_MAX and not holding.quarantined
    here = centre(holding.member.location)
    return Listed(not filling, here, shelf_of(holding) if has_place else None, uplink_load(holding))


def uplink_load(holding: Holding) -> int:
    """What the uplink of its host bears for this shard; its own load where the host is not known."""
    here = host(holding.member.location)
    return holding.load if here is None else holding.slot.uplinks.get(here, 0)


def bear(turn: Turn, source: Holding, more: int) -> None:
    """The source bears so much more of readers, or less; so do all on its host, as their uplink is one."""
    slot, here = source.slot, host(source.member.location)
    source.load += more
    if here is None or not more:
        return
    load = slot.uplinks.pop(here, 0) + more
    if load:
        slot.uplinks[here] = load
    shelf = slot.shelves.get(here)
    for neighbour in [] if shelf is None else [entry[2] for row in shelf.rows for entry in row]:
        refresh(turn, neighbour)


def _list(holding: Holding, listed: Listed) -> None:
    slot, record = holding.slot, holding.slot.record
    if listed.complete:
        slot.complete[holding.generation] = holding
        slot.replicated += holding.state is HoldingState.COMPLETE
        record.covered += len(slot.complete) == 1
    counts = record.centres.setdefault(listed.centre, {})
    counts[slot.shard] = counts.get(slot.shard, 0) + 1
    if listed.shelf is not None:
        slot.free += 1
        for prefix in prefixes(holding.member.location):
            row = slot.shelves.setdefault(prefix, Shelf()).rows[listed.shelf]
            insort(row, (listed.load, holding.born, holding))


def _unlist(holding: Holding, listed: Listed) -> None:
    slot, record = holding.slot, holding.slot.record
    if listed.complete:
        del slot.complete[holding.generation]
        slot.replicated -= holding.state is HoldingState.COMPLETE
        record.covered -= len(slot.complete) == 0
    counts = record.centres[listed.centre]
    counts[slot.shard] -= 1
    if counts[slot.shard] == 0:
        del counts[slot.shard]
        if not counts:
            del record.centres[listed.centre]
    if listed.shelf is not None:
        slot.free -= 1
        for prefix in prefixes(holding.member.location):
            shelf = slot.shelves[prefix]
            row = shelf.rows[listed.shelf]
            del row[bisect_left(row, (listed.load, holding.born))]
            if not any(shelf.rows):
                del slot.shelves[prefix]


def _readable_changed(turn: Turn, record: VersionRecord, cause: Holding) -> None:
    if not record.retired:
        index_readable(record)
    turn.models[record.model] = None
    kind = "readable" if record.readable else "hidden"
    turn.event(kind, record.model, record.version, cause.member.seat)


def index_readable(record: VersionRecord) -> None:
    """Put the record in or out of its model's list of readable versions."""
    row, number = record.model.readable, record.version.number
    place = bisect_left(row, number)
    listed = place < len(row) and row[place] == number
    wanted = record.readable and not record.retired
    if wanted and not listed:
        row.insert(place, number)
    elif listed and not wanted:
        del row[place]
