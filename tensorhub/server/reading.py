"""What happens between grant and done: serving a prefix, progress, another source, and the waking of those who queue.

It ends a transaction only through `groups.abort`, and only when no source can come any more.
"""

from __future__ import annotations

from itertools import islice

from tensorhub.errors import BadRequest, GroupAborted
from tensorhub.messages import Ok, Progress, Reroute, Serve
from tensorhub.server import grants, groups, origins
from tensorhub.server.holdings import advance, detach, drop, is_drained, refresh
from tensorhub.server.publishing import check_opaque, own_holding
from tensorhub.server.settings import ROUTE_TEXT_MAX, SICK_REPORTS
from tensorhub.server.state import Holding, Member, Part, Phase, Slot
from tensorhub.server.turn import Turn, at
from tensorhub.types import Generation


def serve(turn: Turn, request: Serve) -> None:
    """A filling has been planned: it may be read from, unless it is a subset."""
    member = turn.member(request.seat)
    part, filling = _filling(member, request.generation)
    check_opaque(member, request.locators, request.exposure)
    if part.phase not in (Phase.READING, Phase.REROUTING):
        raise BadRequest(f"this shard is {part.phase.value}: it serves already", at(member))
    filling.locators, filling.exposure = request.locators, request.exposure
    _note_route(filling, request.route)
    filling.serves = part.serves
    refresh(turn, filling)
    turn.reply(Ok())


def progress(turn: Turn, request: Progress) -> None:
    """How far a holding is. It proves the life of the reader and, when it rises, of its source."""
    member = turn.member(request.seat)
    holding = own_holding(member, request.generation)
    source, before = holding.upstream, holding.watermark
    _note_route(holding, request.route)
    advance(turn, holding, request.watermark, request.bytes_done)
    if source is not None and holding.watermark > before:
        session = source.member.session.id
        turn.deadlines.set(("lease", session), turn.now_ns + turn.settings.lease_ns)
    turn.reply(Ok())


def reroute(turn: Turn, request: Reroute) -> None:
    """The reader's source failed it. A report about a source it has left already only repeats the grant."""
    member = turn.member(request.seat)
    part, filling = _filling(member, request.generation)
    if part.phase not in (Phase.READING, Phase.REROUTING):
        raise BadRequest(f"this shard is {part.phase.value}: it needs no source", at(member))
    source = filling.upstream
    if source is not None and source.generation != request.source:
        turn.reply(grants.granted(filling.slot, source, "the source it was given before"))
        return
    groups.take_over(turn, part)
    if request.source in turn.state.generations:
        part.suspects[request.source] = None
    if source is not None:
        detach(turn, filling)
        _report(turn, source, member)
    # After the detach: what was read before the failure does not clear the source's name.
    advance(turn, filling, request.watermark, request.bytes_done)
    part.deadline_ns = turn.until(request.timeout_ns)
    turn.deadlines.set(("part", member.seat), part.deadline_ns)
    groups.extend(turn, part.transaction)
    groups.fail_if(turn, part, grants.place(turn, part))


def _report(turn: Turn, source: Holding, reader: Member) -> None:
    """Count the report; enough different readers keep the source from everybody for a while."""
    source.reports[reader.seat] = None
    if len(source.reports) >= SICK_REPORTS:
        source.quarantined = True
        turn.deadlines.set(("quarantine", source.generation), turn.now_ns + turn.settings.quarantine_ns)
        refresh(turn, source)


def end_quarantine(turn: Turn, source: Holding) -> None:
    """It was kept out long enough: the next reader probes it, and one more report keeps it out again."""
    source.quarantined = False
    source.reports.pop(next(iter(source.reports)), None)
    refresh(turn, source)


def _note_route(filling: Holding, route: str) -> None:
    """Shown to people; what is too long is cut, and nothing said means that nothing changed."""
    if route:
        origins.note_route(filling, route[:ROUTE_TEXT_MAX])


def _filling(member: Member, generation: Generation) -> tuple[Part, Holding]:
    transaction = member.replica.transaction
    part = None if transaction is None else transaction.parts.get(member.seat.shard)
    if part is None or part.filling is None or part.generation != generation:
        last = next(reversed(member.replica.outcomes.values()), None)
        raise GroupAborted(f"this filling is over: {last or 'its group moved on'}", at(member))
    return part, part.filling


# ---------------------------------------------------------------- waking


def wake(turn: Turn, slot: Slot) -> None:
    """A place is free, a source came or went: try those who queue, oldest first, while there is a place.

    Never copies the queue: who fails for reasons of its own (suspects, a low watermark) is stepped over, and is rare.
    """
    over = 0
    while slot.free or not slot.complete:
        part = next(islice(slot.queue.values(), over, None), None)
        if part is None:
            return
        _try(turn, slot, part)
        over += part.member.seat in slot.queue


def _try(turn: Turn, slot: Slot, part: Part) -> None:
    if slot.queue.get(part.member.seat) is part:
        groups.fail_if(turn, part, grants.place(turn, part))


def drained(turn: Turn, holding: Holding) -> None:
    """A reader or pin of this holding is gone: whoever waits for the last of them, or for a place here, goes on."""
    if turn.state.generations.get(holding.generation) is not holding:
        return
    if not is_drained(holding):
        for seat in list(holding.pins) if holding.hidden else ():
            part = holding.slot.queue.get(seat)
            if part is not None:
                _try(turn, holding.slot, part)
        return
    member = holding.member
    transaction = member.replica.transaction
    part = None if transaction is None else transaction.parts.get(member.seat.shard)
    if holding.drain is not None:
        record = holding.slot.record
        turn.event("unpublished", record.model, record.version, member.seat)
        drop(turn, holding, "unpublished")
    elif part is not None and part.phase is Phase.DRAINING and holding.buffers == part.transaction.buffers:
        grants.overwrite(turn, part, holding)
        groups.fail_if(turn, part, grants.place(turn, part))
