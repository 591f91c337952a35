"""What must be true of the state after every step, each with the name that `Broken` carries when it is not.

It recomputes from the records what the indexes say; it is slow, used by tests and on demand, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tensorhub.errors import Broken, Where
from tensorhub.server.holdings import height_of, is_drained
from tensorhub.server.offers import promised, uplink_load
from tensorhub.server.placement import centre, host, prefixes, shelf_of, weight_of
from tensorhub.server.settings import DEPTH_MAX, MOVES_MAX, ORIGINS_MAX, OUTCOMES_MAX, READERS_PER_SOURCE_MAX
from tensorhub.server.state import (
    Grace,
    Holding,
    HoldingState,
    ModelTable,
    Part,
    Phase,
    Replica,
    Slot,
    State,
    Transaction,
    VersionRecord,
)

#: A promise and whether it holds.
Finding = tuple[str, bool]


def check(state: State) -> None:
    """Raise `Broken` with the first promise that does not hold and the story of the replica concerned."""
    for promise, holds in _sessions(state):
        if not holds:
            raise _broken(promise)
    for model in state.models.values():
        for promise, holds in _model(state, model):
            if not holds:
                raise _broken(promise, model)
        for record in model.versions.values():
            for promise, holds in _record(state, record):
                if not holds:
                    raise _broken(promise, model, version=str(record.version))
        for replica in model.replicas.values():
            for promise, holds in _replica(state, replica):
                if not holds:
                    raise _broken(promise, model, replica=replica)


def _broken(
    promise: str, model: ModelTable | None = None, *, version: str | None = None, replica: Replica | None = None
) -> Broken:
    place = Where(
        model=None if model is None else str(model.key),
        version=version,
        replica=None if replica is None else replica.id,
    )
    story = "" if replica is None else str(replica.story)
    return Broken(f"broken promise: {promise}" + (f"\n{story}\n" if story else ""), place)


def _sessions(state: State) -> Iterator[Finding]:
    at = state.deadlines.at
    for session in state.sessions.values():
        yield "a session has a lease", ("lease", session.id) in at
        for seat, member in session.members.items():
            yield (
                "a session's seat is in its group",
                state.models[seat.model].replicas[seat.replica].members[seat.shard] is member,
            )
            yield "a seat knows its session", member.session is session
        for call, key in session.waits.items():
            yield "a wait is in its model and has a deadline", (session.id, call) in state.models[key].waits
            yield "a wait has a deadline", ("wait", session.id, call) in at
        for call, key in session.watches.items():
            yield "a watch is in its model", (session.id, call) in state.models[key].watchers
        for seat, lingerer in session.lingers.items():
            read = lingerer.source
            yield "who lingers is its session's", lingerer.session is session and lingerer.seat == seat
            yield "who lingers is known to its source", read.lingering.get(lingerer.generation) is lingerer
            yield "a source of who lingers is held", state.generations.get(read.generation) is read
    leases = sum(key[0] == "lease" for key in at)
    yield "a lease belongs to a session", leases == len(state.sessions)
    for source, readers in state.awaited.items():
        yield "an awaited source is unknown", source not in state.generations and bool(readers)
        for reader in readers:
            yield "a claim awaits its source", state.generations[reader].awaits == source
    counted = sum(record.held for model in state.models.values() for record in model.versions.values())
    yield "every generation is held by a version", counted == len(state.generations)
    for key in state.idle:
        yield "an idle model has no replicas", not state.models[key].replicas


def _model(state: State, model: ModelTable) -> Iterator[Finding]:
    current = {record.version.number: record for record in model.versions.values() if not record.retired}
    yield "current versions are those not retired", current == model.current
    yield (
        "numbers are unique among current versions",
        len(current) == sum(not record.retired for record in model.versions.values()),
    )
    orders = {lineage.order for lineage in model.lineages.values()}
    yield "lineages have places of their own", len(orders) == len(model.lineages)
    yield (
        "a version stands where its lineage does",
        all(record.order == model.lineages[version.lineage].order for version, record in model.versions.items()),
    )
    ordered = [record for _, record in sorted(current.items())]
    yield (
        "numbers rise with lineages",
        all(low.order <= high.order for low, high in pairwise(ordered)),
    )
    yield (
        "the readable list is true",
        model.readable == [record.version.number for record in ordered if record.readable],
    )
    for name, transaction in model.undecided.items():
        replica = model.replicas[name]
        yield "an undecided transaction is its group's", replica.transaction is transaction
        yield "an undecided transaction has no version", transaction.record is None
    in_use = bool(model.replicas or model.waits or model.watchers)
    yield "a model is in use or idle", in_use != (model.key in state.idle)


def _record(state: State, record: VersionRecord) -> Iterator[Finding]:
    slots = record.slots.values()
    yield "a version is held", record.held > 0
    yield "holdings are counted", record.held == sum(len(slot.holdings) for slot in slots)
    yield "covered shards are counted", record.covered == sum(bool(slot.complete) for slot in slots)
    centres: dict[str, dict[int, int]] = {}
    for slot in slots:
        for holding in slot.holdings.values():
            if holding.listed is not None:
                counts = centres.setdefault(centre(holding.member.location), {})
                counts[slot.shard] = counts.get(slot.shard, 0) + 1
    yield "data centres are counted", centres == record.centres
    for seat, part in record.unplaced.items():
        is_alone = seat.shard not in record.slots and part.phase in (Phase.QUEUED, Phase.REROUTING)
        yield "who has no slot waits for it", is_alone and _is_open(part) and state.grace is Grace.OPEN
    for slot in slots:
        yield from _slot(slot)
        for holding in slot.holdings.values():
            yield from _holding(state, holding)


def _slot(slot: Slot) -> Iterator[Finding]:
    offered = [holding for holding in slot.holdings.values() if holding.listed is not None]
    complete = [holding for holding in offered if holding.state is not HoldingState.FILLING]
    yield "complete holdings are indexed", sorted(slot.complete) == sorted(holding.generation for holding in complete)
    yield (
        "replicated holdings are counted",
        slot.replicated == sum(holding.state is HoldingState.COMPLETE for holding in complete),
    )
    shelved = [holding for holding in offered if holding.listed is not None and holding.listed.shelf is not None]
    yield "free holdings are counted", slot.free == len(shelved)
    expected: dict[tuple[str, ...], list[list[tuple[int, int]]]] = {}
    for holding in sorted(shelved, key=lambda each: (uplink_load(each), each.born)):
        for prefix in prefixes(holding.member.location):
            rows = expected.setdefault(prefix, [[], [], [], []])
            rows[shelf_of(holding)].append((uplink_load(holding), holding.born))
    actual = {prefix: [[entry[:2] for entry in row] for row in shelf.rows] for prefix, shelf in slot.shelves.items()}
    yield "shelves are true", actual == expected
    yield (
        "the author is unsealed and held",
        slot.author is None
        or (
            slot.root is None and slot.author.root is None and slot.holdings.get(slot.author.generation) is slot.author
        ),
    )
    for generation in slot.reported:
        yield "a reported root waits for the version's", slot.root is None and generation in slot.holdings
    uplinks: dict[tuple[str, ...], int] = {}
    for holding in slot.holdings.values():
        here = host(holding.member.location)
        if here is not None and holding.load:
            uplinks[here] = uplinks.get(here, 0) + holding.load
    yield "uplinks bear what their holdings do", uplinks == slot.uplinks
    promises: dict[tuple[str, ...], int] = {}
    for holding in slot.holdings.values():
        for here in promised(holding.member.location) if holding.promises else ():
            promises[here] = promises.get(here, 0) + 1
    yield "promises are counted", promises == slot.promises
    for line, queue in slot.lines.items():
        yield "no line is empty", bool(queue)
        for seat, part in queue.items():
            waits = part.phase in (Phase.QUEUED, Phase.REROUTING)
            yield "who queues waits for a source and is owed an answer", waits and part.call is not None
            yield "who queues is in an open transaction", part.member.seat == seat and _is_open(part)
            yield "who queues knows its line", part.line == line


def _is_open(part: Part) -> bool:
    return part.transaction.replica.transaction is part.transaction


def _holding(state: State, holding: Holding) -> Iterator[Finding]:
    slot, member = holding.slot, holding.member
    yield "a holding is known by its generation", state.generations.get(holding.generation) is holding
    yield "a holding is its seat's", member.holdings.get(holding.buffers) is holding
    yield "a holder's seat is occupied", member.replica.members.get(member.seat.shard) is member
    yield "nothing is read beyond the stream", 0 <= holding.watermark <= slot.content.chunks
    yield (
        "a hidden or unproven holding is not offered",
        holding.listed is None or (holding.proven and not holding.hidden),
    )
    yield (
        "an offered root is the version's",
        (
            holding.listed is None
            or not holding.listed.complete
            or None in (slot.root, holding.root)
            or holding.root == slot.root
        ),
    )
    yield from _origins(holding)
    # Those that come from an earlier life read on, whatever this one has granted meanwhile.
    granted = sum(not reader.claimed for reader in holding.readers.values())
    yield "a source has at most so many readers", granted <= READERS_PER_SOURCE_MAX
    filling = holding.state is HoldingState.FILLING
    for generation, reader in holding.readers.items():
        yield "no reader has more than its source", not filling or reader.watermark <= holding.watermark
        yield "a reader knows its source", reader.upstream is holding and reader.generation == generation
        yield "a reader reads the same shard of the same version", reader.slot is slot
        yield "a reader is filling", reader.state is HoldingState.FILLING
        yield "a reader's weight is true", reader.weight == weight_of(reader)
    yield "load is the sum of weights", holding.load == sum(reader.weight for reader in holding.readers.values())
    yield "height is true", holding.height == height_of(holding)
    depth, above = 0, holding.upstream
    while above is not None and depth <= DEPTH_MAX:
        depth, above = depth + 1, above.upstream
    yield "chains are short and have no cycle", depth <= DEPTH_MAX
    for generation, lingerer in holding.lingering.items():
        yield "who lingers is alive", state.sessions.get(lingerer.session.id) is lingerer.session
        yield "who lingers fills nothing", generation not in state.generations
        yield "a source knows who lingers", lingerer.session.lingers.get(lingerer.seat) is lingerer
    for seat, transaction in holding.pins.items():
        yield "a pin is its transaction's", transaction.pins.get(seat.shard) is holding
        yield "a pinned transaction is open", transaction.replica.transaction is transaction
    drains = holding.drain is not None
    yield (
        "a drain has a deadline, hidden content and readers",
        (("drain", holding.generation) in state.deadlines.at) == (drains)
        and (not drains or (holding.hidden and not is_drained(holding))),
    )
    yield "who was asked to leave has a source", not holding.asked or holding.upstream is not None
    yield "moves are bounded", holding.moves <= MOVES_MAX
    yield "promises end", holding.promises == (("promise", holding.generation) in state.deadlines.at)
    yield "who promises reads and does not serve", not (holding.promises and (holding.serves or not holding.upstream))
    yield "doubt ends", holding.is_unsure == (("unsure", holding.generation) in state.deadlines.at)
    yield "quarantine ends", holding.quarantined == (("quarantine", holding.generation) in state.deadlines.at)


def _origins(holding: Holding) -> Iterator[Finding]:
    origins, source = holding.origins, holding.upstream
    yield "origins are bounded", len(origins) <= ORIGINS_MAX
    yield "no more came from sources than is done", sum(origin.nbytes for origin in origins) <= holding.bytes_done
    yield "earlier origins have ended", all(origin.ended_ns is not None for origin in origins[:-1])
    last = origins[-1] if origins else None
    read = last.seat if last is not None and last.ended_ns is None else None
    yield "the origin that goes on is the source", read == (None if source is None else source.member.seat)


def _replica(state: State, replica: Replica) -> Iterator[Finding]:
    yield "a replica has members", bool(replica.members)
    yield "outcomes are bounded", len(replica.outcomes) <= OUTCOMES_MAX
    for shard, member in replica.members.items():
        yield "a member sits in its shard", member.seat.shard == shard and 0 <= shard < replica.shards
        yield "a member's session lives", state.sessions.get(member.session.id) is member.session
    transaction = replica.transaction
    awaited = ("absent", replica.model.key, replica.id) in state.deadlines.at
    yield (
        "a group is waited for while it has decided",
        not awaited or (transaction is not None and transaction.record is not None),
    )
    if transaction is not None:
        yield from _transaction(state, transaction)


def _transaction(state: State, transaction: Transaction) -> Iterator[Finding]:
    replica, record, at = transaction.replica, transaction.record, state.deadlines.at
    key = (transaction.group, transaction.sequence)
    yield "an open transaction is the group's next", key == (replica.group, replica.sequence)
    yield "an open transaction has parts", bool(transaction.parts)
    yield "it is undecided until it has a version", (record is None) == (replica.id in replica.model.undecided)
    timed = ("transaction", replica.model.key, replica.id) in at
    yield "a decided transaction has a deadline", timed == (record is not None)
    for shard, holding in transaction.pins.items():
        yield "a pin keeps the decided version", record is not None and holding.slot is record.slots.get(shard)
    for holding in transaction.hidden.values():
        yield "what it hid is hidden", holding.hidden
    for shard, part in transaction.parts.items():
        yield "a part is its seat's", replica.members.get(shard) is part.member
        yield from _part(state, transaction, part)


def _part(state: State, transaction: Transaction, part: Part) -> Iterator[Finding]:
    seat, phase = part.member.seat, part.phase
    waits = phase in (Phase.WAITING, Phase.DRAINING, Phase.QUEUED, Phase.REROUTING)
    yield "a part waits with a deadline and a call", waits == (("part", seat) in state.deadlines.at)
    yield "a waiting part is owed an answer", part.call is not None or not (waits or phase is Phase.DONE)
    yield "a reading or held part is owed none", part.call is None or waits or phase is Phase.DONE
    yield "only undecided parts wait for a version", (phase is Phase.WAITING) == (transaction.record is None)
    filling = part.filling
    fills = phase in (Phase.READING, Phase.REROUTING) or (phase is Phase.DONE and seat.shard not in transaction.held)
    yield "a filling exists from grant to commit", fills == (filling is not None)
    timed = ("asked", part.generation) in state.deadlines.at
    if filling is not None:
        yield "one version per replica", filling.slot.record is transaction.record
        yield "a filling is a live holding", state.generations.get(part.generation) is filling
        kept = phase is Phase.REROUTING and bool(filling.asked)
        yield "a part that reads no more has no source", phase is Phase.READING or filling.upstream is None or kept
        yield "what is asked is answered in time", timed == (bool(filling.asked) and phase is Phase.READING)
    queued = phase in (Phase.QUEUED, Phase.REROUTING)
    slot = None if transaction.record is None else transaction.record.slots.get(seat.shard)
    line = None if slot is None or part.line is None else slot.lines.get(part.line)
    is_unplaced = transaction.record is not None and transaction.record.unplaced.get(seat) is part
    in_line = (line is not None and line.get(seat) is part) or is_unplaced
    yield "who waits for a source is in its line", queued == in_line
    waits_patiently = queued and filling is not None and part.patient
    yield "patience ends", waits_patiently == (("patience", seat) in state.deadlines.at)
    if phase is Phase.DRAINING:
        old = part.member.holdings.get(transaction.buffers)
        yield "who drains has readers", old is not None and old.hidden and not is_drained(old)
