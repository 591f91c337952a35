"""The group transaction: one decision for all shards of a replica, from the first request to commit or abort.

It decides the version, never the source (`grants.py`). Every way a transaction can end is in `commit` and `abort`; both
answer every call that is owed an answer, record the outcome and open the next sequence number.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorhub.errors import (
    BadRequest,
    Busy,
    GroupAborted,
    GroupMismatch,
    LayoutMismatch,
    SourceFailed,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.messages import Abort, Committed, Done, Held, Ok, Replicate, TransactionAborted
from tensorhub.server import grants, origins, stragglers
from tensorhub.server.grace import may_decide_for
from tensorhub.server.holdings import detach, drop, linger, pin, stopped, unpin
from tensorhub.server.offers import hide, refresh, show
from tensorhub.server.settings import OUTCOMES_MAX, REASON_TEXT_MAX
from tensorhub.server.state import (
    Holding,
    HoldingState,
    Member,
    Outcome,
    Part,
    Phase,
    Replica,
    Transaction,
    VersionRecord,
)
from tensorhub.server.turn import Turn, at
from tensorhub.server.versions import select
from tensorhub.types import Latest, parse_selector

# ---------------------------------------------------------------- asking


def replicate(turn: Turn, request: Replicate) -> None:
    """A shard asks. The first of its group opens the transaction; the others must ask for the same."""
    member = turn.member(request.seat)
    replica = member.replica
    _check_open(member, request.group, request.sequence)
    transaction = replica.transaction
    part = None if transaction is None else transaction.parts.get(request.seat.shard)
    if part is not None:
        _ask_again(turn, part, request)
        return
    _check_request(turn, member, request)
    stopped(turn, member.session, request.seat, (request.group, request.sequence))
    if transaction is None:
        transaction = replica.transaction = Transaction(
            replica, request.group, request.sequence, request.selector, request.buffers
        )
        replica.model.undecided[replica.id] = transaction
    elif (transaction.selector, transaction.buffers) != (request.selector, request.buffers):
        error = GroupMismatch(
            f"shard {request.seat.shard} asks for {request.selector} into {request.buffers!r}, others of its group for "
            f"{transaction.selector} into {transaction.buffers!r}; all shards must ask for the same",
            at(member),
        )
        abort(turn, transaction, {request.seat.shard: error}, (request.seat.shard,))
        raise error
    part = Part(transaction, member, request, turn.until(request.timeout_ns), call=turn.call)
    transaction.parts[request.seat.shard] = part
    turn.deadlines.set(("part", request.seat), part.deadline_ns)
    if transaction.record is None:
        try_decide(turn, transaction)
    else:
        extend(turn, transaction)
        admit(turn, part)


def _check_open(member: Member, group: int, sequence: int) -> None:
    """`GroupAborted` for a transaction that is over, `BadRequest` for one that cannot be yet."""
    replica = member.replica
    outcome = replica.outcomes.get((group, sequence))
    if outcome is not None or group != replica.group or sequence < replica.sequence:
        why = str(outcome) if outcome is not None else f"the group is at {replica.group}/{replica.sequence} now"
        if group != replica.group and replica.moved:
            why += f"; the group moved: {replica.moved}"
        raise GroupAborted(f"transaction {group}/{sequence} is over: {why}", at(member))
    if sequence > replica.sequence:
        raise BadRequest(
            f"transaction {group}/{sequence} is ahead of its group at {replica.sequence}; join again for the number",
            at(member),
        )


def _ask_again(turn: Turn, part: Part, request: Replicate) -> None:
    """The same request once more (its answer was lost, or it was duplicated): the latest call gets the answer.

    A hub pulls one version at a time, so another filling under this number means that the first was given up, and that
    we have not heard of it: `GroupAborted`, upon which the shard says so, and replicates again.
    """
    if part.generation != request.generation:
        raise GroupAborted(
            "an earlier replicate of this shard was given up, and its end is not known here yet; replicate again",
            at(part.member),
        )
    transaction, record = part.transaction, part.transaction.record
    if part.phase is Phase.HELD and record is not None:
        turn.reply(Held(record.version, grants.mark_of(record)))
    elif part.phase is Phase.READING and part.filling is not None and part.filling.upstream is not None:
        turn.reply(grants.granted(part.filling.slot, part.filling.upstream, "asked again"))
    elif part.phase is Phase.READING:
        # Its grant was lost, and then the source of that grant: it cannot report what it never heard of.
        take_over(turn, part)
        part.deadline_ns = turn.until(request.timeout_ns)
        turn.deadlines.set(("part", request.seat), part.deadline_ns)
        extend(turn, transaction)
        fail_if(turn, part, grants.place(turn, part))
    elif part.call is not None and part.phase in (Phase.WAITING, Phase.DRAINING, Phase.QUEUED, Phase.REROUTING):
        take_over(turn, part)
    elif part.call != turn.call:
        raise Busy(f"shard {part.member.seat.shard} of {transaction.sequence} is {part.phase.value}", at(part.member))


def take_over(turn: Turn, part: Part) -> None:
    """The call of this step gets the answer that is owed; an older call is told so."""
    if part.call is not None and part.call != turn.call:
        turn.refuse(part.member.session.id, part.call, Busy("asked again by a later call", at(part.member)))
    part.call = turn.call


def _check_request(turn: Turn, member: Member, request: Replicate) -> None:
    parse_selector(request.selector)
    grants.check_generation(turn, member, request.generation)
    grants.check_buffers(member, request.buffers)
    grants.check_opaque(member, request.locators, request.exposure)
    holding = member.holdings.get(request.buffers)
    if holding is not None and holding.drain is not None:
        raise Busy(f"buffer set {request.buffers!r} is being unpublished; wait for it", at(member))


# ---------------------------------------------------------------- deciding


def try_decide(turn: Turn, transaction: Transaction) -> None:
    """Decide if a version matches; abort if none ever can."""
    first = next(iter(transaction.parts.values()))
    replica = transaction.replica
    if not may_decide_for(turn, replica, transaction.selector):
        return
    try:
        record = select(replica.model, transaction.selector, first.member.location)
    except VersionUnavailable as error:
        error.at(at(first.member))
        abort(turn, transaction, {first.member.seat.shard: error})
        return
    if record is None:
        return
    if (record.shards, record.layout) != (replica.shards, replica.layout):
        mismatch = LayoutMismatch(
            f"version {record.version} is cut into {record.shards} shards of layout {record.layout!r}, this replica "
            f"into {replica.shards} of {replica.layout!r}; different layouts do not mix",
            at(first.member, record.version),
        )
        abort(turn, transaction, dict.fromkeys(transaction.parts, mismatch))
        return
    _decide(turn, transaction, record)


def _decide(turn: Turn, transaction: Transaction, record: VersionRecord) -> None:
    """Fix the version; in the same step hide what its members will overwrite, and keep sources for those yet to ask.

    Hiding all at once keeps drains free of cycles: whoever waits for readers waits for decisions older than its own.
    """
    replica = transaction.replica
    transaction.record = record
    del replica.model.undecided[replica.id]
    cover_all(turn, transaction)
    extend(turn, transaction)
    for part in list(transaction.parts.values()):
        if replica.transaction is transaction:
            admit(turn, part)


def cover_all(turn: Turn, transaction: Transaction) -> None:
    """What the decision means for what the shards hold, and whom it keeps for those yet to ask."""
    replica = transaction.replica
    for _, member in sorted(replica.members.items()):
        cover(turn, transaction, member)
    transaction.source = grants.first_source(transaction)
    for shard in range(replica.shards):
        if shard not in transaction.held:
            pin(transaction, shard)


def cover(turn: Turn, transaction: Transaction, member: Member) -> None:
    """A shard of a decided transaction holds the version already, or it is about to overwrite what it holds."""
    shard, holding = member.seat.shard, member.holdings.get(transaction.buffers)
    part = transaction.parts.get(shard)
    if holding is None or (part is not None and part.filling is holding):
        return
    if holding.slot.record is transaction.record and holding.listed is not None and holding.listed.complete:
        transaction.held[shard] = holding
    elif not holding.hidden:
        transaction.hidden[shard] = holding
        hide(turn, holding)


def admit(turn: Turn, part: Part) -> None:
    fail_if(turn, part, grants.admit(turn, part))


def fail_if(turn: Turn, part: Part, error: TensorHubError | None) -> None:
    """Abort the part's transaction when it cannot go on."""
    if error is not None:
        abort(turn, part.transaction, {part.member.seat.shard: error})


def extend(turn: Turn, transaction: Transaction) -> None:
    latest = max(part.deadline_ns for part in transaction.parts.values())
    transaction.deadline_ns = max(transaction.deadline_ns, latest + turn.settings.commit_margin_ns)
    replica = transaction.replica
    turn.deadlines.set(("transaction", replica.model.key, replica.id), transaction.deadline_ns)


# ---------------------------------------------------------------- finishing


def done(turn: Turn, request: Done) -> None:
    """A shard is complete. Idempotent; answered when all are."""
    member = turn.member(request.seat)
    replica = member.replica
    outcome = replica.outcomes.get((request.group, request.sequence))
    if outcome is not None and outcome.version is not None:
        turn.reply(Committed(outcome.version))
        return
    _check_open(member, request.group, request.sequence)
    transaction = replica.transaction
    part = None if transaction is None else transaction.parts.get(request.seat.shard)
    if part is None or part.generation != request.generation:
        raise BadRequest("there is no such filling of this shard; replicate first", at(member))
    if part.phase is Phase.DONE:
        take_over(turn, part)
        return
    if part.phase is Phase.HELD:
        part.phase, part.call = Phase.DONE, turn.call
        settled(turn, part)
        return
    filling = part.filling
    if filling is None:
        raise BadRequest(f"this shard is {part.phase.value}: it cannot be done", at(member))
    _finish(turn, part, filling, request)


def _finish(turn: Turn, part: Part, filling: Holding, request: Done) -> None:
    slot = filling.slot
    # A subset has no root of its own: its chunks were verified one by one, and nobody will read it.
    known = slot.root if part.serves else request.root
    if known is not None and known != request.root:
        error = wrong_root(part)
        abort(turn, part.transaction, {part.member.seat.shard: error}, (part.member.seat.shard,))
        raise error
    grants.leave_queue(turn, part)
    if part.call is not None:
        turn.refuse(part.member.session.id, part.call, Busy("the filling was reported done", at(part.member)))
    turn.deadlines.cancel(("part", part.member.seat))
    part.phase, part.call = Phase.DONE, turn.call
    filling.root = request.root
    filling.watermark = slot.content.chunks
    origins.count(filling, request.bytes_done)
    detach(turn, filling)
    stragglers.finished(turn, filling)
    refresh(turn, filling)
    if known is not None:
        settled(turn, part)
    else:
        slot.reported[filling.generation] = filling
        turn.slots[slot] = None


def wrong_root(part: Part) -> SourceFailed:
    return SourceFailed(
        "the root digest of what was read differs from the version's: a source served other bytes; replicate again",
        at(part.member, None if part.transaction.record is None else part.transaction.record.version),
    )


def settled(turn: Turn, part: Part) -> None:
    """The part's root is the version's; commit with the last one."""
    transaction = part.transaction
    transaction.done[part.member.seat.shard] = None
    if len(transaction.done) == transaction.replica.shards:
        commit(turn, transaction)


def commit(turn: Turn, transaction: Transaction) -> None:
    """All shards are done: show the version, answer everybody."""
    record = transaction.record
    if record is None:
        return
    version = record.version
    close(turn, transaction, Outcome(version, {}))
    for part in transaction.parts.values():
        filling = part.filling
        if filling is not None and part.serves:
            filling.state, filling.doubted = HoldingState.COMPLETE, False
            refresh(turn, filling)
        elif filling is not None:
            drop(turn, filling, "a subset is never served")
        if part.call is not None:
            turn.say(part.member.session.id, part.call, Committed(version))
    seat = next(iter(transaction.parts.values())).member.seat
    turn.event("committed", record.model, version, seat, f"transaction {transaction.group}/{transaction.sequence}")


# ---------------------------------------------------------------- aborting


def give_up(turn: Turn, request: Abort) -> None:
    """A shard cannot finish, and reads no more. For a transaction that is over it adds its reason to the outcome."""
    session, number = turn.session(), (request.group, request.sequence)
    reason = request.reason if len(request.reason) <= REASON_TEXT_MAX else f"{request.reason[:REASON_TEXT_MAX]}..."
    if request.seat not in session.members and stopped(turn, session, request.seat, number):
        turn.reply(Ok())  # its seat was lost while it read
        return
    member = turn.member(request.seat)
    replica = member.replica
    error = GroupAborted(reason, at(member))
    outcome = replica.outcomes.get(number)
    if outcome is not None:
        if outcome.version is None and reason:
            outcome.failures.setdefault(request.seat.shard, reason)
    elif number == (replica.group, replica.sequence):
        transaction = replica.transaction or Transaction(replica, request.group, request.sequence, Latest(), "")
        if part_done := transaction.done:
            # The others are what this shard has been waiting for: say so.
            missing = [str(shard) for shard in range(replica.shards) if shard not in part_done]
            error = GroupAborted(f"{reason}; not done: shard {', '.join(missing)}", at(member))
        abort(turn, transaction, {request.seat.shard: error}, (request.seat.shard,))
    elif request.group == replica.group and request.sequence > replica.sequence:
        _check_open(member, request.group, request.sequence)
    stopped(turn, session, request.seat, number)
    turn.reply(Ok())


def abort(
    turn: Turn, transaction: Transaction, failures: Mapping[int, TensorHubError], quiet: tuple[int, ...] = ()
) -> None:
    """End a transaction for all its shards: nothing of it is served, nothing hidden that was not written to.

    Shards that have not asked yet hear of it, too: the number is used up, and one that went on with it would miss
    every transaction of its siblings from then on, by one. `quiet` are the shards that end it by a request of their
    own: they learn of it by its answer, not by a notice.
    """
    replica, record = transaction.replica, transaction.record
    outcome = Outcome(None, {shard: error.message for shard, error in failures.items()})
    reason = f"transaction {transaction.group}/{transaction.sequence} is aborted: {outcome}"
    close(turn, transaction, outcome)
    for shard, part in sorted(transaction.parts.items()):
        _abort_part(turn, part, failures.get(shard), reason, shard in quiet)
    for shard, member in sorted(replica.members.items()):
        if shard not in transaction.parts and shard not in quiet:
            _tell(turn, transaction, member, reason)
    for holding in transaction.hidden.values():
        if turn.state.generations.get(holding.generation) is holding:
            show(turn, holding)
    failed = replica.members.get(next(iter(failures)))
    version = None if record is None else record.version
    turn.event("aborted", replica.model, version, None if failed is None else failed.seat, reason)


def _abort_part(turn: Turn, part: Part, own: TensorHubError | None, reason: str, is_quiet: bool) -> None:
    transaction, member = part.transaction, part.member
    version = None if transaction.record is None else transaction.record.version
    if part.call is not None:
        turn.refuse(member.session.id, part.call, own or GroupAborted(reason, at(member, version)))
    elif not is_quiet:
        _tell(turn, transaction, member, reason)
    if part.filling is not None and turn.state.generations.get(part.filling.generation) is part.filling:
        if not is_quiet:
            linger(turn, part.filling, (transaction.group, transaction.sequence))
        drop(turn, part.filling, reason)


def _tell(turn: Turn, transaction: Transaction, member: Member, reason: str) -> None:
    notice = TransactionAborted(member.seat, transaction.group, transaction.sequence, reason)
    turn.notify(member.session.id, notice)


def close(turn: Turn, transaction: Transaction, outcome: Outcome) -> None:
    """What commit and abort share: no timer, pin or queue entry survives, and the next sequence number is open."""
    replica = transaction.replica
    replica.transaction = None
    replica.model.undecided.pop(replica.id, None)
    turn.deadlines.cancel(("transaction", replica.model.key, replica.id))
    turn.deadlines.cancel(("absent", replica.model.key, replica.id))
    for part in transaction.parts.values():
        turn.deadlines.cancel(("part", part.member.seat))
        grants.leave_queue(turn, part)
    for shard in list(transaction.pins):
        unpin(turn, transaction, shard)
    record(replica, transaction.group, transaction.sequence, outcome)
    replica.sequence += 1


def record(replica: Replica, group: int, sequence: int, outcome: Outcome) -> None:
    """Remember how a transaction ended, for calls that come late or again."""
    replica.outcomes[group, sequence] = outcome
    while len(replica.outcomes) > OUTCOMES_MAX:
        del replica.outcomes[next(iter(replica.outcomes))]
