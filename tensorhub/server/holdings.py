"""Every change of a holding: made, read from, filled further, kept for others, dropped.

It never decides who reads what or which version wins; it marks what others must look at again. What is offered because
of a change, `offers.py` keeps.
"""

from __future__ import annotations

from tensorhub.errors import Closed
from tensorhub.messages import Content, SourceLost, Unpublished
from tensorhub.server import origins, pace
from tensorhub.server.offers import bear, refresh
from tensorhub.server.placement import of_replica, weight_of
from tensorhub.server.settings import DEPTH_MAX, SERVED_MAX
from tensorhub.server.state import (
    Holding,
    HoldingState,
    Kind,
    Linger,
    Member,
    Session,
    Slot,
    Transaction,
    VersionRecord,
)
from tensorhub.server.turn import Turn, at, seat_of
from tensorhub.types import UNVERIFIED, Generation, Seat, Version

# ---------------------------------------------------------------- life


def slot_for(member: Member, version: Version, content: Content) -> Slot:
    """The slot of a shard of a version, made when absent; the caller has checked that the content agrees."""
    model = member.replica.model
    record = model.versions.get(version)
    if record is None:
        order = model.lineages[version.lineage].order
        record = VersionRecord(model, version, order, member.replica.shards, member.replica.layout)
        model.versions[version] = record
        newer = (lineage.first for lineage in model.lineages.values() if lineage.order > order)
        record.retired = any(first <= version.number for first in newer)
        if not record.retired:
            model.current[version.number] = record
    slot = record.slots.get(member.seat.shard)
    if slot is None:
        root = None if content.verified else UNVERIFIED
        slot = record.slots[member.seat.shard] = Slot(record, member.seat.shard, content, root)
    return slot


def make(
    turn: Turn, member: Member, buffers: str, slot: Slot, generation: Generation, *, state: HoldingState
) -> Holding:
    """A new holding, not offered yet: `refresh` offers it."""
    turn.state.born += 1
    holding = Holding(member, buffers, slot, generation, state, turn.state.born)
    member.holdings[buffers] = holding
    slot.holdings[generation] = holding
    slot.record.held += 1
    turn.state.generations[generation] = holding
    if slot.record.unplaced:
        turn.slots[slot] = None
    for waiting in turn.state.awaited.pop(generation, {}):
        reader = turn.state.generations[waiting]
        reader.awaits = None
        link(turn, reader, holding)
    return holding


def link(turn: Turn, reader: Holding, source: Holding) -> None:
    """Believe a claim that this filling reads from that holding, unless it makes no sense."""
    above: Holding | None = source
    hops = 0
    while above is not None and hops + reader.height < DEPTH_MAX:
        if above is reader:
            return
        hops, above = hops + 1, above.upstream
    if above is None and source.slot is reader.slot:
        attach(turn, reader, source)
        raise_to(turn, source, reader.watermark)


def drop(turn: Turn, holding: Holding, reason: str) -> tuple[str, ...]:
    """Forget a holding at once. Its readers are told and named."""
    slot, member = holding.slot, holding.member
    detach(turn, holding)
    readers = names(holding)
    for reader in list(holding.readers.values()):
        _unlink(turn, reader, holding)
        refresh(turn, reader)
        seat = reader.member.seat
        notice = SourceLost(seat, reader.generation, holding.generation, reason)
        turn.notify(reader.member.session.id, notice)
    for lingerer in holding.lingering.values():
        del lingerer.session.lingers[lingerer.seat]
    holding.lingering.clear()
    del member.holdings[holding.buffers]
    del slot.holdings[holding.generation]
    slot.reported.pop(holding.generation, None)
    del turn.state.generations[holding.generation]
    refresh(turn, holding)
    for transaction in list(holding.pins.values()):
        unpin(turn, transaction, slot.shard)
        pin(transaction, slot.shard)
    turn.deadlines.cancel(("quarantine", holding.generation))
    turn.deadlines.cancel(("unsure", holding.generation))
    end_drain(turn, holding, readers)
    if slot.author is holding:
        slot.author = None
    turn.slots[slot] = None
    turn.drains.pop(holding, None)
    slot.record.held -= 1
    if slot.record.held == 0:
        turn.models[slot.record.model] = None
        _forget(slot.record)
    return readers


def _forget_awaited(turn: Turn, holding: Holding) -> None:
    if holding.awaits is not None:
        waiting = turn.state.awaited[holding.awaits]
        del waiting[holding.generation]
        if not waiting:
            del turn.state.awaited[holding.awaits]
        holding.awaits = None


def _forget(record: VersionRecord) -> None:
    model = record.model
    del model.versions[record.version]
    if model.current.get(record.version.number) is record:
        del model.current[record.version.number]


def end_drain(turn: Turn, holding: Holding, readers: tuple[str, ...]) -> None:
    """Answer the `Unpublish` that waits for this holding, if any: it is gone."""
    drain, holding.drain = holding.drain, None
    if drain is not None:
        turn.deadlines.cancel(("drain", holding.generation))
        if holding.member.seat in holding.member.session.members:
            turn.say(drain.session, drain.call, Unpublished(readers, tuple(holding.served)))
        else:
            turn.refuse(drain.session, drain.call, Closed("the seat was given up while it drained", at(holding.member)))


# ---------------------------------------------------------------- readers


def attach(turn: Turn, reader: Holding, source: Holding) -> None:
    """The reader reads from the source from now on."""
    reader.upstream = source
    origins.begin(reader, source, turn.now_ns)
    pace.restart(reader, turn.now_ns)
    source.readers[reader.generation] = reader
    if len(source.served) < SERVED_MAX:
        source.served[str(reader.member.seat)] = None
    reader.weight = weight_of(reader)
    bear(turn, source, reader.weight)
    _rise(source)
    refresh(turn, source)
    refresh(turn, reader)


def detach(turn: Turn, reader: Holding) -> None:
    """The reader reads from nobody, and awaits nobody; its source has a place again, and may be drained."""
    _forget_awaited(turn, reader)
    source = reader.upstream
    if source is None:
        return
    _unlink(turn, reader, source)
    turn.drains[source] = None
    turn.slots[source.slot] = None
    refresh(turn, source)
    refresh(turn, reader)


def _unlink(turn: Turn, reader: Holding, source: Holding) -> None:
    reader.upstream, reader.asked = None, ""
    turn.deadlines.cancel(("asked", reader.generation))
    origins.end(reader, turn.now_ns)
    del source.readers[reader.generation]
    bear(turn, source, -reader.weight)
    reader.weight = 0
    _rise(source)


def _rise(holding: Holding | None) -> None:
    """Recompute heights upwards, as far as they change. None counts above DEPTH_MAX, where nobody is placed below
    anyhow: so this ends even where claims, or a mistake of ours, have made a chain that is longer, or a cycle."""
    while holding is not None:
        height = height_of(holding)
        if height == holding.height:
            return
        holding.height = height
        holding = holding.upstream


def height_of(holding: Holding) -> int:
    """By the heights of those who read from it."""
    below = max((reader.height + 1 for reader in holding.readers.values()), default=0)
    return min(below, DEPTH_MAX)


def advance(turn: Turn, holding: Holding, watermark: int, bytes_done: int) -> None:
    """A report of progress: never backwards; it also clears the name of the source."""
    origins.count(holding, bytes_done)
    watermark = min(watermark, holding.slot.content.chunks)
    if watermark <= holding.watermark:
        return
    source = holding.upstream
    if source is not None:
        source.reports.clear()
        source.quarantined = False
        turn.deadlines.cancel(("quarantine", source.generation))
    raise_to(turn, holding, watermark)


def raise_to(turn: Turn, holding: Holding, watermark: int) -> None:
    """It holds so many chunks. So does what it reads from, though that one has not told yet: chains stay sorted."""
    filling: Holding | None = holding
    while filling is not None and filling.watermark < watermark:
        filling.watermark, filling.begun = watermark, True
        source = filling.upstream
        if source is not None:
            reweigh(turn, filling)
        refresh(turn, filling)
        filling = source
    if (Kind.ODD, ()) in holding.slot.lines:
        turn.slots[holding.slot] = None


def reweigh(turn: Turn, reader: Holding) -> None:
    """What its source has to bear of it has changed."""
    source = reader.upstream
    if source is not None:
        now = weight_of(reader)
        bear(turn, source, now - reader.weight)
        reader.weight = now
        refresh(turn, source)


def names(holding: Holding) -> tuple[str, ...]:
    """Who reads from it, who may not have stopped yet, and whose read is still to come."""
    seats = {reader.member.seat for reader in holding.readers.values()}
    seats.update(lingerer.seat for lingerer in holding.lingering.values())
    unknown = ("readers of an earlier life of this server",) if holding.is_unsure else ()
    return (*sorted(str(seat) for seat in seats.union(holding.pins)), *unknown)


def is_drained(holding: Holding) -> bool:
    return not (holding.readers or holding.lingering or holding.pins or holding.is_unsure)


# ---------------------------------------------------------------- lingering


def linger(turn: Turn, reader: Holding, transaction: tuple[int, int]) -> None:
    """The reader's grant is about to be taken away, not by its own word: its source is not drained without that.

    It keeps no place and adds no load: who has been told to stop takes no bandwidth for long, and one that is paused
    must not keep its siblings, who ask again at once, from a source for as long as its lease.
    """
    source, member = reader.upstream, reader.member
    if source is None:
        return
    stopped(turn, member.session, member.seat)  # it was given another source since, so it has left that one
    lingerer = Linger(member.session, member.seat, reader.generation, source, transaction)
    member.session.lingers[member.seat] = source.lingering[reader.generation] = lingerer


def stopped(turn: Turn, session: Session, seat: Seat, by: tuple[int, int] | None = None) -> bool:
    """The reader of this seat says that it reads nothing any more of transactions up to this one (None: of any)."""
    lingerer = session.lingers.get(seat)
    if lingerer is None or (by is not None and by < lingerer.transaction):
        return False
    del session.lingers[seat], lingerer.source.lingering[lingerer.generation]
    turn.drains[lingerer.source] = None
    return True


# ---------------------------------------------------------------- pins


def pin(transaction: Transaction, shard: int) -> None:
    """Keep one holding of the decided version for a shard that is still to be granted, if there is any."""
    slot = _slot_of(transaction, shard)
    if slot is None:
        return
    replica = transaction.replica
    preferred = () if transaction.source is None else of_replica(slot, transaction.source)
    known = (holding for holding in preferred if holding.generation in slot.complete)
    others = (holding for holding in slot.complete.values() if holding.member.replica is not replica)
    chosen = next(known, None) or next(others, None)
    if chosen is not None:
        chosen.pins[seat_of(replica, shard)] = transaction
        transaction.pins[shard] = chosen


def unpin(turn: Turn, transaction: Transaction, shard: int) -> None:
    """The shard has its grant, or needs none any more."""
    holding = transaction.pins.pop(shard, None)
    if holding is not None:
        del holding.pins[seat_of(transaction.replica, shard)]
        turn.drains[holding] = None


def _slot_of(transaction: Transaction, shard: int) -> Slot | None:
    return None if transaction.record is None else transaction.record.slots.get(shard)
