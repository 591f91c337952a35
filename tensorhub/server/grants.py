"""How one shard of a decided transaction gets its source: drains its own readers, waits for a free source, reads.

It chooses nothing (`placement.py`) and ends nothing: when no source can ever come it returns the error, and the caller
aborts the transaction.
"""

from __future__ import annotations

from dataclasses import replace

from tensorhub.errors import BadRequest, TensorHubError, VersionUnavailable, Where
from tensorhub.messages import Granted, Held, LineageMark, Locator, Reference
from tensorhub.server.holdings import attach, detach, drop, is_drained, make, pin, unpin
from tensorhub.server.offers import hide, promise
from tensorhub.server.placement import Choice, Place, Reader, centre_of, choose, nearest
from tensorhub.server.settings import BUFFER_SETS_MAX, LOCATION_DEPTH_MAX, LOCATORS_MAX, OPAQUE_BYTES_MAX
from tensorhub.server.state import (
    Grace,
    Holding,
    HoldingState,
    Kind,
    Line,
    Member,
    ModelTable,
    Part,
    Phase,
    Slot,
    Transaction,
    VersionRecord,
)
from tensorhub.server.turn import Turn, at
from tensorhub.types import ID_BYTES, NO_GENERATION, UNVERIFIED, Generation, Location, ReplicaId, check_name


def in_order(model: ModelTable) -> list[Transaction]:
    """Undecided transactions as they shall choose their sources when a version comes for all of them.

    As in the lines of those who wait: first the data centres that have the newest version, rack by rack, host by host;
    slow ones last of all.
    """
    centres = model.current[model.readable[-1]].centres if model.readable else {}

    def order(transaction: Transaction) -> tuple[bool, bool, Place]:
        members = transaction.replica.members.values()
        place = nearest(next(iter(members)).location)
        return any(member.slow for member in members), centre_of(place) not in centres, place

    return sorted(model.undecided.values(), key=order)


def admit(turn: Turn, part: Part) -> TensorHubError | None:
    """The part's version is decided: it holds it, or drains what it will overwrite, or looks for a source."""
    transaction, seat = part.transaction, part.member.seat
    record = transaction.record
    old = part.member.holdings.get(transaction.buffers)
    if old is not None and old.slot.record is record and old.listed is not None and old.listed.complete:
        part.phase = Phase.HELD
        turn.deadlines.cancel(("part", seat))
        unpin(turn, transaction, seat.shard)
        transaction.held[seat.shard] = old
        _answer(turn, part, held(old))
        return None
    if seat.shard not in transaction.pins:
        pin(transaction, seat.shard)
    if old is not None:
        part.phase = Phase.DRAINING
        if not old.hidden:
            transaction.hidden[seat.shard] = old
            hide(turn, old)
        if not is_drained(old):
            part.drain_began_ns = turn.now_ns
            return None
        overwrite(turn, part, old)
    return place(turn, part)


def overwrite(turn: Turn, part: Part, old: Holding) -> None:
    """The old content has no readers any more: forget it, before the grant that lets its bytes be written."""
    if part.drain_began_ns is not None:
        part.drained_ns = turn.now_ns - part.drain_began_ns
    part.transaction.hidden.pop(part.member.seat.shard, None)
    drop(turn, old, "overwritten")


def place(turn: Turn, part: Part) -> TensorHubError | None:
    """Grant a source, or queue for one; the error when none can come."""
    if part.filling is None and part.generation in turn.state.generations:
        leave_queue(turn, part)
        return _in_use(part.generation, part.member)  # somebody took it while this part waited
    slot = slot_of(part)
    reader = reader_of(part)
    choice = None if slot is None else choose(slot, reader)
    if slot is not None and choice is not None:
        _grant(turn, part, slot, choice)
        return None
    part.phase = Phase.QUEUED if part.filling is None else Phase.REROUTING
    keeps_source = part.filling is not None and part.filling.upstream is not None
    is_early = turn.state.grace is Grace.OPEN  # who else has it may be still on the way
    if slot is not None and (keeps_source or is_early or may_appear(slot, part)):
        _queue(turn, part, slot)
        return None
    if slot is None and is_early and part.transaction.record is not None:
        part.lack = "nobody who holds this shard has come back yet"
        part.transaction.record.unplaced[part.member.seat] = part
        return None
    leave_queue(turn, part)
    return _lost(part)


def _queue(turn: Turn, part: Part, slot: Slot) -> None:
    """Wait in line. Patience of who asks for a first source ends with the promises that it waits for."""
    seat, count = part.member.seat, len(slot.complete)
    if part.filling is not None and part.filling.asked:
        part.lack = part.filling.asked
    else:
        part.lack = f"none of {len(slot.holdings)} holders has a place for this reader; {count} of them are complete"
    if part.line is None:
        part.line = _line_of(part, slot)
        slot.lines.setdefault(part.line, {})[seat] = part
        if part.filling is not None and part.patient:
            is_slow = part.filling.asked and part.member.slow
            patience_ns = turn.settings.slow_patience_ns if is_slow else turn.settings.patience_ns
            turn.deadlines.set(("patience", seat), turn.now_ns + patience_ns)


def _line_of(part: Part, slot: Slot) -> Line:
    member = part.member
    if part.filling is not None or any(holding.slot is slot for holding in member.holdings.values()):
        return Kind.ODD, ()
    return Kind.SLOW if member.slow else Kind.NEW, nearest(member.location)


def leave_queue(turn: Turn, part: Part) -> None:
    """It waits for no source any more; the next time it is patient again."""
    slot, line, record = slot_of(part), part.line, part.transaction.record
    part.patient = True
    if record is not None:
        record.unplaced.pop(part.member.seat, None)
    turn.deadlines.cancel(("patience", part.member.seat))
    if slot is not None and line is not None:
        part.line = None
        del slot.lines[line][part.member.seat]
        if not slot.lines[line]:
            del slot.lines[line]


def lose_patience(turn: Turn, part: Part) -> TensorHubError | None:
    """It waited long enough for an idle source: any will do, also the one that it was asked to leave."""
    part.patient = False
    filling, slot = part.filling, slot_of(part)
    if filling is not None and slot is not None and filling.upstream is not None:
        choice = choose(slot, reader_of(part)) or Choice(filling.upstream, "no other has a place")
        _grant(turn, part, slot, choice)
        return None
    return place(turn, part)


def reader_of(part: Part) -> Reader:
    transaction = part.transaction
    return Reader(
        replica=transaction.replica.id,
        location=part.member.location,
        filling=part.filling,
        suspects=part.suspects,
        prefer=transaction.source if any(each.filling for each in transaction.parts.values()) else None,
        pinned=transaction.pins.get(part.member.seat.shard),
        patient=part.patient,
    )


def first_source(transaction: Transaction) -> ReplicaId | None:
    """The replica that placement gives the first shard that needs a source; the others follow it if they can."""
    for shard, part in transaction.parts.items():
        slot = slot_of(part)
        if shard not in transaction.held and slot is not None:
            choice = choose(slot, reader_of(part))
            return None if choice is None else choice.holding.member.replica.id
    return None


def slot_of(part: Part) -> Slot | None:
    record = part.transaction.record
    return None if record is None else record.slots.get(part.member.seat.shard)


def _grant(turn: Turn, part: Part, slot: Slot, choice: Choice) -> None:
    transaction, member, source = part.transaction, part.member, choice.holding
    leave_queue(turn, part)
    turn.deadlines.cancel(("part", member.seat))
    kind = "granted"
    if part.filling is None:
        part.filling = make(turn, member, transaction.buffers, slot, part.generation, state=HoldingState.FILLING)
    else:
        kind = "rerouted"
    if transaction.source is None:
        transaction.source = source.member.replica.id
    _offer(part, part.filling)
    reason = f"{choice.reason}; {part.filling.asked}" if part.filling.asked else choice.reason
    detach(turn, part.filling)
    attach(turn, part.filling, source)
    if part.serves:
        promise(turn, part.filling)
    part.phase, part.lack = Phase.READING, ""
    unpin(turn, transaction, member.seat.shard)
    _answer(turn, part, replace(granted(slot, source, reason), drained_ns=part.drained_ns))
    part.drained_ns = 0
    turn.event(kind, slot.record.model, slot.record.version, member.seat, f"{source.member.seat}: {reason}")


def part_of(holding: Holding) -> Part | None:
    """The part that this filling belongs to; a claimed one has none."""
    transaction = holding.member.replica.transaction
    part = None if transaction is None else transaction.parts.get(holding.member.seat.shard)
    return part if part is not None and part.filling is holding else None


def _offer(part: Part, filling: Holding) -> None:
    """It has said how it will be shown: the next reader may be sent to it at once, and waits there for it to begin.

    So a chain of any length is made in one step; each link would else wait for the one before to plan and to call.
    """
    request = part.request
    if request.manifest == filling.slot.content.manifest and request.serves and not filling.serves:
        filling.locators, filling.exposure = request.locators, request.exposure
        filling.serves = True


def granted(slot: Slot, source: Holding, reason: str) -> Granted:
    root = slot.root if slot.root is not None else UNVERIFIED
    begun = source.begun or source.state is not HoldingState.FILLING
    mark = mark_of(slot.record)
    return Granted(slot.record.version, slot.content, root, reference(source), reason, mark, begun=begun)


def held(holding: Holding) -> Held:
    return Held(holding.slot.record.version, mark_of(holding.slot.record))


def mark_of(record: VersionRecord) -> LineageMark:
    """Where the version's lineage stands: whoever hears it may have to tell another life of the server."""
    lineage = record.model.lineages[record.version.lineage]
    return LineageMark(record.version.lineage, lineage.order, lineage.first)


def reference(holding: Holding) -> Reference:
    member = holding.member
    return Reference(
        member.seat, member.session.id, holding.generation, member.location, holding.locators, holding.exposure
    )


def _answer(turn: Turn, part: Part, message: Granted | Held) -> None:
    call, part.call = part.call, None
    if call is not None:
        turn.say(part.member.session.id, call, message)


# ---------------------------------------------------------------- hope


def may_appear(slot: Slot, part: Part) -> bool:
    """Whether a source for this part may still come: a complete copy, its pin, or a chain that leads to one.

    Scans only when the last complete copy is hidden or gone; then each holding once.
    """
    if part.member.seat.shard in part.transaction.pins:
        return True
    if any(_suits(holding, part) for holding in slot.complete.values()):
        return True
    fed: dict[Generation, bool] = {}
    return any(
        holding.state is HoldingState.FILLING and _suits(holding, part) and _is_fed(holding, part.filling, fed)
        for holding in slot.holdings.values()
    )


def _suits(holding: Holding, part: Part) -> bool:
    return holding.member.replica is not part.transaction.replica and holding.generation not in part.suspects


def _is_fed(holding: Holding, filling: Holding | None, fed: dict[Generation, bool]) -> bool:
    """Whether a chain of sources leads from this holding to everything, without passing through `filling`.

    `fed` remembers it of every holding on the way.
    """
    chain: list[Generation] = []
    above: Holding | None = holding
    verdict = False
    while above is not None and above is not filling:
        if above.generation in fed:
            verdict = fed[above.generation]
            break
        if above.state is not HoldingState.FILLING or above.watermark == above.slot.content.chunks:
            verdict = True
            break
        chain.append(above.generation)
        above = above.upstream
    fed.update(dict.fromkeys(chain, verdict))
    return verdict


def _lost(part: Part) -> VersionUnavailable:
    record, member = part.transaction.record, part.member
    version = None if record is None else record.version
    tried = len(part.suspects)
    failed = f"; {tried} source(s) failed this reader" if tried else ""
    return VersionUnavailable(
        f"shard {member.seat.shard} of version {version} has no other source left{failed}", at(member, version)
    )


# ---------------------------------------------------------------- checks


def check_generation(turn: Turn, member: Member, generation: Generation) -> None:
    """A generation names one filling in the life of all processes."""
    if len(generation) != ID_BYTES or generation == NO_GENERATION:
        raise BadRequest(f"a generation is {ID_BYTES} random bytes, not {generation.hex() or 'nothing'}", at(member))
    if generation in turn.state.generations:
        raise _in_use(generation, member)


def _in_use(generation: Generation, member: Member) -> BadRequest:
    return BadRequest(f"generation {generation.hex()} is in use; draw a new one for each filling", at(member))


def check_buffers(member: Member, buffers: str) -> None:
    check_name("buffer set", buffers)
    if buffers not in member.holdings and len(member.holdings) >= BUFFER_SETS_MAX:
        raise BadRequest(f"a shard has at most {BUFFER_SETS_MAX} buffer sets", at(member))


def check_opaque(member: Member, locators: tuple[Locator, ...], exposure: bytes) -> None:
    """Locators and exposures are the holder's own affair, but not their size."""
    for locator in locators[:LOCATORS_MAX]:
        check_name("engine", locator.engine)
    longest = max([len(exposure), *(len(locator.data) for locator in locators)])
    if len(locators) > LOCATORS_MAX or longest > OPAQUE_BYTES_MAX:
        raise BadRequest(
            f"a reference has at most {LOCATORS_MAX} locators of {OPAQUE_BYTES_MAX} bytes, "
            f"not {len(locators)} of up to {longest}",
            at(member),
        )


def check_location(location: Location, place: Where) -> None:
    """Each level is an index entry per holding, kept as long as the seat."""
    if len(location.parts) > LOCATION_DEPTH_MAX:
        raise BadRequest(f"location {str(location)[:80]} is deeper than {LOCATION_DEPTH_MAX} levels", place)
    for part in location.parts:
        check_name("location", part)
