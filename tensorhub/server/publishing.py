"""Publish, seal and unpublish: how a version appears in place and goes away again.

It never touches group transactions but to refuse what would overwrite one.
"""

from __future__ import annotations

from tensorhub.errors import (
    AlreadyPublished,
    BadRequest,
    Busy,
    DrainTimeout,
    LayoutMismatch,
    NotPublished,
    VersionConflict,
)
from tensorhub.messages import Announced, Content, Ok, Publish, Seal, Unpublish, Unpublished
from tensorhub.server import roots
from tensorhub.server.grants import check_buffers, check_generation, check_opaque, mark_of
from tensorhub.server.holdings import drop, is_drained, make, names, slot_for
from tensorhub.server.offers import hide, refresh
from tensorhub.server.state import Drain, Holding, HoldingState, Member, Transaction
from tensorhub.server.turn import Turn, at
from tensorhub.server.versions import check_order, enter
from tensorhub.types import ID_BYTES, Digest, Version


def publish(turn: Turn, request: Publish) -> None:
    member = turn.member(request.seat)
    if _is_published(member, request):
        turn.reply(Announced(mark_of(member.holdings[request.buffers].slot.record)))  # asked again: the answer was lost
        return
    _check_free(member, request)
    check_generation(turn, member, request.generation)
    check_buffers(member, request.buffers)
    check_opaque(member, request.locators, request.exposure)
    check_order(member, request.version)
    check_content(member, request.version, request.content)
    model = member.replica.model
    enter(turn, model, request.version)
    slot = slot_for(member, request.version, request.content)
    is_first = not slot.holdings and slot.root is None
    holding = make(turn, member, request.buffers, slot, request.generation, state=HoldingState.PUBLISHED)
    holding.locators, holding.exposure = request.locators, request.exposure
    if not request.content.verified:
        holding.root = slot.root
    elif is_first:
        slot.author = holding
    else:
        holding.proven = False
    member.published = request.version
    turn.event("published", model, request.version, member.seat)
    refresh(turn, holding)
    turn.reply(Announced(mark_of(slot.record)))


def _is_published(member: Member, request: Publish) -> bool:
    holding = member.holdings.get(request.buffers)
    return (
        holding is not None
        and holding.state is HoldingState.PUBLISHED
        and (holding.generation, holding.slot.record.version) == (request.generation, request.version)
    )


def _check_free(member: Member, request: Publish) -> None:
    """The buffer set must be nobody's: neither shown, nor hidden and undrained, nor about to be overwritten."""
    transaction = member.replica.transaction
    decided = transaction is not None and transaction.record is not None and transaction.buffers == request.buffers
    if transaction is not None and (decided or is_claimed(transaction, member, request.buffers)):
        raise Busy(
            f"buffer set {request.buffers!r} is being replicated into; wait for the replicate or abort it",
            at(member, request.version),
        )
    holding = member.holdings.get(request.buffers)
    if holding is not None:
        version = holding.slot.record.version
        raise AlreadyPublished(
            f"buffer set {request.buffers!r} holds version {version}; unpublish before publishing or writing again",
            at(member, request.version),
        )


def is_claimed(transaction: Transaction, member: Member, buffers: str) -> bool:
    """Whether this seat has asked the open transaction to write this buffer set."""
    return transaction.buffers == buffers and member.seat.shard in transaction.parts


def check_content(member: Member, version: Version, content: Content) -> None:
    """`LayoutMismatch` or `VersionConflict` unless this may be a shard of that version."""
    replica = member.replica
    check_well_formed(member, version, content)
    record = replica.model.versions.get(version)
    if record is None:
        return
    if (record.shards, record.layout) != (replica.shards, replica.layout):
        raise LayoutMismatch(
            f"version {version} is cut into {record.shards} shards of layout {record.layout!r}, this replica into "
            f"{replica.shards} of {replica.layout!r}",
            at(member, version),
        )
    slot = record.slots.get(member.seat.shard)
    if slot is None:
        return
    if slot.content != content:
        raise VersionConflict(
            f"version {version} is published with other content: {slot.content} there, {content} here; "
            "a version is immutable, publish a new one",
            at(member, version),
        )
    if not content.verified:
        raise VersionConflict(
            f"version {version} is published without digests: a second publisher cannot be compared with the first",
            at(member, version),
        )


def check_well_formed(member: Member, version: Version, content: Content) -> None:
    if len(content.manifest) != ID_BYTES or content.shard_bytes < 0 or content.chunks < 0:
        raise BadRequest(f"malformed content {content}", at(member, version))


def seal(turn: Turn, request: Seal) -> None:
    """The publisher has digested everything."""
    member = turn.member(request.seat)
    holding = own_holding(member, request.generation)
    version = holding.slot.record.version
    if holding.state is not HoldingState.PUBLISHED:
        raise BadRequest("only a publisher seals; a reader reports its root with Done", at(member, version))
    if holding.root is not None:
        if holding.root != request.root:
            raise BadRequest("this holding is sealed with another root already", at(member, version))
        turn.reply(Ok())
        return
    _check_root(member, version, request.root)
    conflict = roots.report(turn, holding, request.root)
    if conflict is not None:
        raise conflict
    holding.watermark = holding.slot.content.chunks
    turn.event("sealed", member.replica.model, version, member.seat)
    turn.reply(Ok())


def _check_root(member: Member, version: Version, root: Digest) -> None:
    if len(root) != ID_BYTES:
        raise BadRequest(f"a root digest has {ID_BYTES} bytes, not {len(root)}", at(member, version))


def own_holding(member: Member, generation: bytes) -> Holding:
    """The seat's holding of this generation, or `NotPublished`."""
    for holding in member.holdings.values():
        if holding.generation == generation:
            return holding
    raise NotPublished(f"this shard holds nothing of generation {generation.hex()}", at(member))


# ---------------------------------------------------------------- unpublish


def unpublish(turn: Turn, request: Unpublish) -> None:
    """Hide, then answer when drained. A second call waits in place of the first."""
    member = turn.member(request.seat)
    transaction, shard = member.replica.transaction, member.seat.shard
    if transaction is not None and is_claimed(transaction, member, request.buffers):
        raise Busy(f"buffer set {request.buffers!r} is being replicated into; abort that first", at(member))
    holding = member.holdings.get(request.buffers)
    if holding is None or holding.generation != request.generation:
        raise NotPublished(f"buffer set {request.buffers!r} holds nothing of this generation to unpublish", at(member))
    if transaction is not None and holding.buffers == transaction.buffers:
        transaction.hidden.pop(shard, None)
        transaction.held.pop(shard, None)
    version = holding.slot.record.version
    if not holding.hidden:
        hide(turn, holding)
    if request.abandon or is_drained(holding):
        turn.event("unpublished", member.replica.model, version, member.seat, "abandoned" if request.abandon else "")
        readers = drop(turn, holding, f"version {version} was unpublished without waiting for its readers")
        turn.reply(Unpublished(readers, tuple(holding.served)))
        return
    if holding.drain is not None and holding.drain.call != turn.call:
        turn.refuse(holding.drain.session, holding.drain.call, Busy("a later unpublish took its place", at(member)))
    holding.drain = Drain(turn.call, turn.sender)
    turn.deadlines.set(("drain", holding.generation), turn.until(request.timeout_ns))


def drain_late(turn: Turn, holding: Holding) -> None:
    """The readers did not end in time: the version stays hidden, the caller may wait again."""
    drain, holding.drain = holding.drain, None
    if drain is not None:
        readers = names(holding)
        error = DrainTimeout(
            f"{len(readers)} reader(s) still read version {holding.slot.record.version}: {', '.join(readers)}; "
            "it stays hidden, unpublish again to wait on",
            at(holding.member, holding.slot.record.version),
        )
        turn.refuse(drain.session, drain.call, error)
