"""What happens between grant and done: serving a prefix, progress, another source, and the waking of those who queue.

It ends a transaction only through `groups.abort`, and only when no source can come any more.
"""

from __future__ import annotations

from itertools import islice

from tensorhub.errors import BadRequest, GroupAborted
from tensorhub.messages import Ok, Progress, Reroute, Serve
from tensorhub.server import grants, groups, origins, stragglers
from tensorhub.server.grants import check_opaque
from tensorhub.server.holdings import advance, detach, drop, is_drained, raise_to, reweigh
from tensorhub.server.offers import refresh
from tensorhub.server.placement import Place, centre_of, has_idle, is_host, rack
from tensorhub.server.publishing import own_holding
from tensorhub.server.settings import ROUTE_TEXT_MAX, SICK_REPORTS
from tensorhub.server.state import Holding, HoldingState, Kind, Line, Member, Part, Phase, Replica, Slot
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
    filling.serves, filling.begun = part.serves, True
    refresh(turn, filling)
    turn.reply(Ok())


def progress(turn: Turn, request: Progress) -> None:
    """How far a holding is. It proves the life of the reader and, when it rises, of its source."""
    member = turn.member(request.seat)
    holding = own_holding(member, request.generation)
    source, before = holding.upstream, holding.watermark
    _note_route(holding, request.route)
    advance(turn, holding, request.watermark, request.bytes_done)
    if holding.doubted:
        holding.doubted = False
        reweigh(turn, holding)
        refresh(turn, holding)
    if source is not None and holding.watermark > before:
        session = source.member.session.id
        turn.deadlines.set(("lease", session), turn.now_ns + turn.settings.lease_ns)
    if holding.state is HoldingState.FILLING:
        stragglers.mind(turn, holding, request.period_ns)
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
    if source is not None:
        # Whatever it has of it, the source has, and the source's source: those behind a lost one go on from there.
        raise_to(turn, source, min(request.watermark, filling.slot.content.chunks))
    if source is not None and filling.asked:
        # No fault of the source: it is kept until there is another, lest this reader ends up with none.
        turn.deadlines.cancel(("asked", filling.generation))
    else:
        _left(turn, part, filling, request.source)
    # After the detach: what was read before the failure does not clear the source's name.
    advance(turn, filling, request.watermark, request.bytes_done)
    part.deadline_ns = turn.until(request.timeout_ns)
    turn.deadlines.set(("part", member.seat), part.deadline_ns)
    groups.extend(turn, part.transaction)
    groups.fail_if(turn, part, grants.place(turn, part))


def _left(turn: Turn, part: Part, filling: Holding, generation: Generation) -> None:
    """The reader gave its source up. One that starves itself is not to blame, the first time: its own reader will tell
    of the cause. It may be dead as well, so it is not given again and again."""
    source = turn.state.generations.get(generation)
    is_excused = source is not None and _starves(source) and generation not in part.excused
    if is_excused:
        part.excused.add(generation)
    elif source is not None:
        part.suspects[generation] = None
    left = filling.upstream
    detach(turn, filling)
    if left is not None and not is_excused:
        _report(turn, left, part.member)
        left.doubted = left.state is HoldingState.FILLING
        reweigh(turn, left)
        refresh(turn, left)


def _starves(source: Holding) -> bool:
    """Whether it had nothing to serve: it waits for a source, or was just given another, or its own one is reported."""
    above, content = source.upstream, source.slot.content
    if source.state is not HoldingState.FILLING or source.watermark == content.chunks:
        return False
    was_moved = len(source.origins) > 1 and source.pace.measured_ns == 0
    return above is None or was_moved or bool(above.reports)


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
    """A place is free, a source came or went: try those who queue, line by line, oldest first.

    Hundreds may queue while sources come one by one, so a step must not look at them all: what the first of a line
    does not find, no other of its line does, nor of the other lines of its data centre but those of hosts with sources
    of their own. Only odd ones (few) and those who may have lost all hope are all tried.
    """
    in_vain: set[tuple[Kind, str]] = set()
    for unplaced in [each for each in slot.record.unplaced.values() if each.member.seat.shard == slot.shard]:
        if slot.record.unplaced.pop(unplaced.member.seat, None) is unplaced:
            groups.fail_if(turn, unplaced, grants.place(turn, unplaced))
    for line in sorted(slot.lines, key=lambda line: _order(slot, line)):
        kind, place = line
        over, group = 0, (kind, centre_of(place))
        while slot.free or not slot.complete:
            part = next(islice(slot.lines.get(line, {}).values(), over, None), None)
            is_vain = group in in_vain and not _has_own(slot, place)
            if part is None or (is_vain and slot.complete):
                break
            if not is_vain or not grants.may_appear(slot, part):
                _try(turn, part)
            if part.line is not None:
                over += 1
                if is_host(place) and place in slot.promises and slot.complete:
                    break  # this host waits for what comes to it; others do not
                if kind is not Kind.ODD:
                    in_vain.add(group)


def _order(slot: Slot, line: Line) -> tuple[Kind, bool, bool, bool]:
    """By kind; data centres that have sources first, as those of others read over long links; then hosts that have one;
    then racks that have an idle one, so that a chain runs through one rack after the other; then the line that is there
    for longest."""
    kind, place = line
    is_far = slot.shard not in slot.record.centres.get(centre_of(place), ())
    return kind, is_far, not _has_own(slot, place), not has_idle(slot, rack(place) if is_host(place) else place)


def _has_own(slot: Slot, place: Place) -> bool:
    """Whether it is a host on which there is a source with a place."""
    return is_host(place) and place in slot.shelves


def lose_hope(turn: Turn) -> None:
    """The grace is over: a shard that nobody has brought back is gone."""
    for model in turn.state.models.values():
        for record in list(model.versions.values()):
            for part in list(record.unplaced.values()):
                if part.member.seat in record.unplaced:
                    groups.fail_if(turn, part, grants.place(turn, part))


def _try(turn: Turn, part: Part) -> None:
    if part.line is not None:
        groups.fail_if(turn, part, grants.place(turn, part))


def patience_over(turn: Turn, replica: Replica, shard: int) -> None:
    """A reader waited long enough for an idle source."""
    transaction = replica.transaction
    part = None if transaction is None else transaction.parts.get(shard)
    if part is not None:
        groups.fail_if(turn, part, grants.lose_patience(turn, part))


def drained(turn: Turn, holding: Holding) -> None:
    """A reader or pin of this holding is gone: whoever waits for the last of them, or for a place here, goes on."""
    if turn.state.generations.get(holding.generation) is not holding:
        return
    if not is_drained(holding):
        for seat, transaction in list(holding.pins.items()) if holding.hidden else ():
            part = transaction.parts.get(seat.shard)
            if part is not None:
                _try(turn, part)
        return
    member = holding.member
    own = member.replica.transaction
    part = None if own is None else own.parts.get(member.seat.shard)
    if holding.drain is not None:
        record = holding.slot.record
        turn.event("unpublished", record.model, record.version, member.seat)
        drop(turn, holding, "unpublished")
    elif part is not None and part.phase is Phase.DRAINING and holding.buffers == part.transaction.buffers:
        grants.overwrite(turn, part, holding)
        groups.fail_if(turn, part, grants.place(turn, part))
