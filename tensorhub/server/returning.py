"""What sessions bring back: numbers of their groups, holdings, and transactions that an earlier life has decided.

A life begins empty, and learns all of this from `Join`; it never asks. What contradicts others is told so, and not
taken. What may not be decided while some are still on their way, `grace.py` says.
"""

from __future__ import annotations

from tensorhub.errors import BadRequest, GroupAborted, GroupMismatch, TensorHubError
from tensorhub.messages import (
    Claim,
    Conflicted,
    Content,
    Join,
    LineageMark,
    Moved,
    Replicate,
    Standing,
    TransactionAborted,
)
from tensorhub.messages import Undertaking as Told
from tensorhub.server import groups
from tensorhub.server.grace import doubt, raise_floor, until_all_are_back
from tensorhub.server.grants import check_buffers, check_generation, check_opaque
from tensorhub.server.holdings import detach, drop, link, make, slot_for, unpin
from tensorhub.server.offers import refresh
from tensorhub.server.publishing import check_well_formed
from tensorhub.server.settings import BUFFER_SETS_MAX, GROUP_MAX, LINEAGES_MAX, PLACES_MAX
from tensorhub.server.state import (
    Holding,
    HoldingState,
    Member,
    ModelTable,
    Outcome,
    Part,
    Phase,
    Replica,
    Transaction,
)
from tensorhub.server.turn import Turn, at
from tensorhub.server.versions import enter, recall
from tensorhub.types import (
    NO_GENERATION,
    Digest,
    Generation,
    Version,
    check_name,
    check_version,
    parse_selector,
)

# ---------------------------------------------------------------- a seat is taken


def come_back(turn: Turn, member: Member, request: Join, *, is_first: bool) -> None:
    """The seat is taken by a session that may know more than this life. `is_first`: no other of its group is here."""
    told = request.standing
    if member.session.returned:
        _remember(turn, member, told)
        _number(turn, member, told, is_first=is_first)
    for claim in request.claims:
        _take_back(turn, member, claim)
    if member.session.returned and told.undertaking is not None:
        _go_on(turn, member, told, told.undertaking)
    turn.models[member.replica.model] = None


def reconcile(turn: Turn, member: Member, request: Join) -> None:
    """What a seat does not claim it does not hold: a publish whose answer was lost, an abandon that never arrived. What
    it claims it holds: a commit of which an earlier life has told it.

    Fillings are their transaction's; what drains is claimed as hidden, or its answer is still awaited; and what was
    forgotten for a grant that has not come yet is claimed by who has not heard of that: it will be overwritten.
    """
    claimed = {claim.generation for claim in request.claims}
    for holding in list(member.holdings.values()):
        is_shown = holding.state is not HoldingState.FILLING and holding.drain is None
        if is_shown and holding.generation not in claimed and holding.buffers not in _in_transaction(member):
            drop(turn, holding, "its holder does not hold it any more")
    for claim in request.claims:
        is_new = claim.generation not in turn.state.generations and claim.buffers not in member.holdings
        if is_new and not _is_given_up(member, claim.buffers):
            _take_back(turn, member, claim)


def _is_given_up(member: Member, buffers: str) -> bool:
    """Whether this buffer set of the seat is for a version that has been decided: it holds nothing else any more."""
    transaction = member.replica.transaction
    if transaction is None or transaction.record is None or member.seat.shard not in transaction.parts:
        return False
    return transaction.buffers == buffers


def _in_transaction(member: Member) -> tuple[str, ...]:
    """Buffer sets whose state the seat may not have heard of yet."""
    transaction = member.replica.transaction
    return () if transaction is None else (transaction.buffers,)


# ---------------------------------------------------------------- what was

#: Lineages that one seat speaks of: those of what it holds, has seen, has published and is being given.
MARKS_MAX = BUFFER_SETS_MAX + 3


def _remember(turn: Turn, member: Member, told: Standing) -> None:
    """Lineages in their order, and versions below which `latest` must not fall."""
    model = member.replica.model
    try:
        for mark in told.lineages[:MARKS_MAX]:
            _check_mark(model, mark)
            recall(turn, model, mark)
        for version in (told.seen, told.published):
            if version is not None and version.lineage in model.lineages:
                check_version(version.number)
                enter(turn, model, version)
                raise_floor(model, version)
    except TensorHubError:
        return  # nonsense is not remembered
    published = told.published
    if published is not None and published.lineage in model.lineages:
        member.published, model.vouched = published, True


def _check_mark(model: ModelTable, mark: LineageMark) -> None:
    check_name("lineage", mark.name)
    check_version(mark.first)
    if not 0 <= mark.order <= PLACES_MAX or (mark.name not in model.lineages and len(model.lineages) >= LINEAGES_MAX):
        raise BadRequest(f"a model has at most {LINEAGES_MAX} lineages")


def _number(turn: Turn, member: Member, told: Standing, *, is_first: bool) -> None:
    """Bring together where the group is, and where this seat knows it to be.

    Incarnations count up through all lives. A seat that is behind its group learns it by the answer; what it has under
    way is over then.
    """
    replica, state = member.replica, turn.state
    if not 0 < told.group <= GROUP_MAX or not 0 <= told.sequence <= GROUP_MAX:
        return  # a process that knows of no earlier life, or nonsense
    state.groups = max(state.groups, told.group)
    if is_first:
        replica.group, replica.sequence = told.group, told.sequence
    elif told.group > replica.group:
        why = f"shard {member.seat.shard} came back and knows of a later incarnation"
        if replica.transaction is not None:
            groups.abort(turn, replica.transaction, {member.seat.shard: GroupAborted(why, at(member))})
        _move(turn, member, told.group, told.sequence, why)
    if told.group == replica.group:
        _recall_commit(turn, replica, told)
        if told.sequence > replica.sequence:
            why = f"shard {member.seat.shard} came back and knows it to be over"
            if replica.transaction is not None:
                groups.abort(turn, replica.transaction, {member.seat.shard: GroupAborted(why, at(member))})
            _move(turn, member, told.group, told.sequence, why)


def _move(turn: Turn, member: Member, group: int, sequence: int, why: str) -> None:
    replica = member.replica
    replica.group, replica.sequence, replica.moved = group, sequence, why
    for sibling in replica.members.values():
        if sibling is not member:
            turn.notify(sibling.session.id, Moved(sibling.seat, group, sequence, why))


def _recall_commit(turn: Turn, replica: Replica, told: Standing) -> None:
    """A shard has heard of a commit: then all shards were done, whatever they have heard themselves."""
    key, version, transaction = (told.group, told.committed_sequence), told.committed, replica.transaction
    if version is None or told.committed_sequence < 0:
        return
    if transaction is None or (transaction.group, transaction.sequence) != key:
        if key not in replica.outcomes and told.committed_sequence < told.sequence:
            groups.record(replica, *key, Outcome(version, {}))
        return
    if transaction.record is None or transaction.record.version != version:
        return  # aborted by its number
    for part in transaction.parts.values():
        filling = part.filling
        if filling is not None:
            filling.watermark = filling.slot.content.chunks
            detach(turn, filling)
            _report_root(turn, filling)
    groups.commit(turn, transaction)


def _report_root(turn: Turn, filling: Holding) -> None:
    """What it has read decides, or is held against, the version's root, as when it says so itself."""
    slot = filling.slot
    if filling.root is not None and slot.root is None:
        slot.reported[filling.generation] = filling
        turn.slots[slot] = None


# ---------------------------------------------------------------- holdings


def _take_back(turn: Turn, member: Member, claim: Claim) -> None:
    """A holding that this life does not know."""
    version = claim.version
    try:
        check_name("lineage", version.lineage)
        check_version(version.number)
        check_generation(turn, member, claim.generation)
        check_buffers(member, claim.buffers)
        check_opaque(member, claim.locators, claim.exposure)
        _check_claim(member, claim)
    except TensorHubError as error:
        turn.notify(member.session.id, Conflicted(member.seat, claim.generation, version, error.message))
        return
    enter(turn, member.replica.model, version)
    slot = slot_for(member, version, claim.content)
    is_first = not slot.holdings and slot.root is None
    state = HoldingState.PUBLISHED if claim.published else HoldingState.COMPLETE
    holding = make(turn, member, claim.buffers, slot, claim.generation, state=state)
    holding.locators, holding.exposure = claim.locators, claim.exposure
    chunks = slot.content.chunks
    holding.watermark = max(holding.watermark, min(claim.watermark, chunks)) if claim.published else chunks
    holding.bytes_done = holding.watermark * slot.content.shard_bytes // max(1, chunks)
    if claim.published and member.published is None:
        member.published = version
    _take_root(holding, claim.root, is_first=is_first)
    holding.hidden = claim.hidden
    doubt(turn, holding)
    refresh(turn, holding)
    transaction = member.replica.transaction
    if transaction is not None and transaction.record is not None and transaction.buffers == claim.buffers:
        groups.cover(turn, transaction, member)


def _check_claim(member: Member, claim: Claim) -> None:
    if claim.buffers in member.holdings:
        raise BadRequest(f"buffer set {claim.buffers!r} is claimed twice", at(member, claim.version))
    if claim.watermark < 0:
        raise BadRequest(f"a watermark of {claim.watermark} chunks is claimed", at(member, claim.version))
    _check_content(member, claim.version, claim.content, claim.root)


def _check_content(member: Member, version: Version, content: Content, root: Digest) -> None:
    """Refuse what differs from what others hold as this version."""
    model, replica = member.replica.model, member.replica
    check_well_formed(member, version, content)
    if version.lineage not in model.lineages and len(model.lineages) >= LINEAGES_MAX:
        raise BadRequest(f"model {model.key} has {LINEAGES_MAX} lineages already", at(member, version))
    record = model.versions.get(version)
    if record is not None and (record.shards, record.layout) != (replica.shards, replica.layout):
        raise BadRequest(f"version {version} is held by others in another layout", at(member, version))
    slot = None if record is None else record.slots.get(member.seat.shard)
    if slot is not None and (slot.content != content or (slot.root and root and slot.root != root)):
        raise BadRequest(f"version {version} is held by others with other bytes", at(member, version))


def _take_root(holding: Holding, root: Digest, *, is_first: bool) -> None:
    slot = holding.slot
    if not slot.content.verified:
        holding.root = slot.root
    elif root:
        holding.root = root
        if slot.root is None and slot.author is None:
            slot.root = root
        elif slot.root is None:
            holding.proven = False
            slot.reported[holding.generation] = holding
    elif is_first:
        slot.author = holding
    else:
        holding.proven = False


# ---------------------------------------------------------------- transactions


def _go_on(turn: Turn, member: Member, standing: Standing, told: Told) -> None:
    """The seat's transaction goes on where it is, decided as it was; or it hears that it is over."""
    replica, number = member.replica, (standing.group, standing.sequence)
    try:
        _check_told(turn, member, told)
        outcome = replica.outcomes.get(number)
        if outcome is not None and outcome.version == told.version:
            _complete(turn, member, told)  # the seat only does not know it yet
        elif number == (replica.group, replica.sequence):
            _resume(turn, member, told)
        # Else its number is over, which the answer says.
    except TensorHubError as error:
        turn.notify(member.session.id, TransactionAborted(member.seat, *number, error.message))


def _check_told(turn: Turn, member: Member, told: Told) -> None:
    check_name("lineage", told.version.lineage)
    check_version(told.version.number)
    parse_selector(told.selector)
    check_opaque(member, told.locators, told.exposure)
    if told.watermark < 0 or told.bytes_done < 0:
        raise BadRequest(
            f"{told.watermark} chunks, {told.bytes_done} bytes are said to be done", at(member, told.version)
        )
    if told.held:
        return
    check_generation(turn, member, told.generation)
    check_buffers(member, told.buffers)
    if told.buffers in member.holdings:
        raise BadRequest(f"buffer set {told.buffers!r} is both filled and held", at(member, told.version))
    _check_content(member, told.version, told.content, told.root if told.serves else Digest(b""))


def _complete(turn: Turn, member: Member, told: Told) -> None:
    if told.held or not told.serves:
        return
    claim = Claim(
        told.buffers,
        told.version,
        told.generation,
        told.content,
        told.root,
        False,
        told.watermark,
        told.locators,
        told.exposure,
    )
    _take_back(turn, member, claim)


def _resume(turn: Turn, member: Member, told: Told) -> None:
    replica, shard = member.replica, member.seat.shard
    transaction = replica.transaction
    _check_same(member, transaction, told)
    holding = _held(member, told) if told.held else _refill(turn, member, told)
    if transaction is None:
        transaction = replica.transaction = Transaction(
            replica, replica.group, replica.sequence, told.selector, told.buffers
        )
    is_new = transaction.record is None
    replica.model.undecided.pop(replica.id, None)
    transaction.record = holding.slot.record
    request = Replicate(
        member.seat,
        told.buffers,
        replica.group,
        replica.sequence,
        told.selector,
        told.timeout_ns,
        told.generation,
        told.serves,
    )
    part = Part(transaction, member, request, turn.until(told.timeout_ns))
    part.phase, part.filling = (Phase.HELD, None) if told.held else (Phase.READING, holding)
    transaction.parts[shard] = part
    waiting = [each for each in transaction.parts.values() if each.phase is Phase.WAITING]
    if is_new:
        turn.deadlines.set(("absent", replica.model.key, replica.id), until_all_are_back(turn))
        groups.cover_all(turn, transaction)
    unpin(turn, transaction, shard)
    if told.held:
        transaction.held[shard] = holding
    groups.extend(turn, transaction)
    turn.event("resumed", replica.model, told.version, member.seat, f"transaction {replica.group}/{replica.sequence}")
    for each in waiting:
        if replica.transaction is transaction:
            groups.admit(turn, each)


def _check_same(member: Member, transaction: Transaction | None, told: Told) -> None:
    """What siblings have asked in this life, or brought from another, must be the same."""
    if transaction is None:
        return
    asked = (transaction.selector, transaction.buffers)
    if asked != (told.selector, told.buffers):
        raise GroupMismatch(
            f"shard {member.seat.shard} came back with {told.selector} into {told.buffers!r}, others of its group ask "
            f"for {transaction.selector} into {transaction.buffers!r}",
            at(member, told.version),
        )
    if transaction.record is not None and transaction.record.version != told.version:
        raise GroupMismatch(
            f"shard {member.seat.shard} came back with version {told.version}, its group has decided "
            f"{transaction.record.version} meanwhile",
            at(member, told.version),
        )


def _held(member: Member, told: Told) -> Holding:
    """What it said to hold already, of which the same Join has brought the claim."""
    holding = member.holdings.get(told.buffers)
    if holding is None or holding.slot.record.version != told.version:
        raise BadRequest(f"this shard does not hold version {told.version} any more", at(member, told.version))
    return holding


def _refill(turn: Turn, member: Member, told: Told) -> Holding:
    """The filling, where it is, reading from where it read."""
    enter(turn, member.replica.model, told.version)
    slot = slot_for(member, told.version, told.content)
    filling = make(turn, member, told.buffers, slot, told.generation, state=HoldingState.FILLING)
    filling.claimed = True
    filling.locators, filling.exposure = told.locators, told.exposure
    filling.serves, filling.begun = told.serves and bool(told.exposure), told.begun
    # Readers that came back before it may have told of more: what they have, it has.
    filling.watermark = max(filling.watermark, min(told.watermark, slot.content.chunks))
    # Who gave it this much nobody knows any more; it is not put down to the next source.
    filling.bytes_done = told.bytes_done
    filling.root = told.root or None
    _link(turn, filling, told.upstream)
    doubt(turn, filling)
    refresh(turn, filling)
    return filling


def _link(turn: Turn, reader: Holding, upstream: Generation) -> None:
    """Read on from the claimed source, now or when it comes back."""
    source = turn.state.generations.get(upstream)
    if source is not None:
        link(turn, reader, source)
    elif upstream not in (NO_GENERATION, b""):
        reader.awaits = upstream
        turn.state.awaited.setdefault(upstream, {})[reader.generation] = None
