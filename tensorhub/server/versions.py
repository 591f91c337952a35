"""Which version may be published, and which one a selector means. It never looks at who asks beyond its place.

Lineages are ordered by their opening. Opening one retires the versions of older ones from its first number on, so the
numbers of all versions that are not retired rise from lineage to lineage, and every selector is a search in one list.
"""

from __future__ import annotations

import math

from tensorhub.errors import BadRequest, VersionOrder, VersionUnavailable, Where
from tensorhub.references import LineageMark
from tensorhub.server.offers import index_readable
from tensorhub.server.placement import centre
from tensorhub.server.settings import LINEAGES_MAX
from tensorhub.server.state import Lineage, Member, ModelTable, VersionRecord
from tensorhub.server.turn import Turn, at
from tensorhub.types import AtLeast, Exactly, Latest, Location, Newest, Selector, Version, check_name, check_version

#: Versions named in an error: enough to see what is going on.
NAMED_MAX = 8


def check_order(member: Member, version: Version) -> None:
    """`VersionOrder` unless this seat may publish this version now."""
    model = member.replica.model
    check_name("lineage", version.lineage)
    number = check_version(version.number)
    lineage = model.lineages.get(version.lineage)
    if lineage is None:
        if len(model.lineages) >= LINEAGES_MAX:
            raise BadRequest(
                f"model {model.key} has {LINEAGES_MAX} lineages already; start a new model name", at(member, version)
            )
        return
    if version.lineage != model.newest:
        raise VersionOrder(
            f"lineage {version.lineage!r} was replaced by {model.newest!r}; publish in the newest, or open a new one",
            at(member, version),
        )
    mine = member.published
    if mine is not None and mine.lineage == version.lineage and number <= mine.number:
        raise VersionOrder(
            f"version {version} does not follow {mine}, which this shard published; numbers rise within a lineage",
            at(member, version),
        )
    if number < lineage.highest and version not in model.versions:
        raise VersionOrder(
            f"version {version} is below {lineage.highest}, the highest of its lineage, and nobody holds it; "
            f"publish above {lineage.highest}, or open a new lineage",
            at(member, version),
        )


def enter(turn: Turn, model: ModelTable, version: Version) -> None:
    """Record that a version of this lineage exists; a lineage not seen before becomes the newest."""
    lineage = model.lineages.get(version.lineage)
    if lineage is None:
        last = max((each.order for each in model.lineages.values()), default=-1)
        model.lineages[version.lineage] = Lineage(last + 1, version.number, version.number, opened_here=True)
        _arrange(turn, model)
    elif version.number >= lineage.first:
        lineage.highest = max(lineage.highest, version.number)
    else:
        lineage.first = version.number
        _arrange(turn, model)


def recall(turn: Turn, model: ModelTable, mark: LineageMark) -> None:
    """A lineage is known, by who comes from an earlier life, to stand where the mark says.

    What this life has opened is newer, wherever it stood. Two lives that both believed to be the one may have given one
    place to two lineages: the second comes after the first. A place that has risen since a mark was given stays.
    """
    known = model.lineages.get(mark.name)
    if known is not None and mark.first >= known.first and mark.order <= known.order:
        return
    if known is None:
        known = model.lineages[mark.name] = Lineage(mark.order, mark.first, mark.first)
        _make_place(model, known, mark.order)
    elif mark.order > known.order:
        known.opened_here = False
        _make_place(model, known, mark.order)
    known.first = min(known.first, mark.first)
    _arrange(turn, model)


def _make_place(model: ModelTable, lineage: Lineage, order: int) -> None:
    """Put a lineage at this place, or the next that no other of an earlier life has; this life's go behind it."""
    others = [each for each in model.lineages.values() if each is not lineage]
    taken = {each.order for each in others if not each.opened_here}
    while order in taken:
        order += 1
    lineage.order = order
    ours = [each for each in others if each.opened_here]
    behind = order + 1 - min((each.order for each in ours), default=order + 1)
    for each in ours:
        each.order += max(0, behind)


def _arrange(turn: Turn, model: ModelTable) -> None:
    """Lineages have other places, or begin lower: the numbers of each end where a newer one begins."""
    model.newest = max(model.lineages, key=lambda name: model.lineages[name].order)
    #: {lineage: the lowest number that a newer one has taken, and whose it is}
    ends: dict[str, tuple[float, str]] = {}
    end: tuple[float, str] = (math.inf, "")
    for name, lineage in sorted(model.lineages.items(), key=lambda item: item[1].order, reverse=True):
        ends[name], end = end, min(end, (lineage.first, name))
    changed = []
    for record in model.versions.values():
        record.order = model.lineages[record.version.lineage].order
        if record.retired != (record.version.number >= ends[record.version.lineage][0]):
            changed.append(record)
    for record in sorted(changed, key=lambda record: record.retired):  # first those that make room for others
        record.retired = not record.retired
        if record.retired:
            del model.current[record.version.number]
            first, name = ends[record.version.lineage]
            turn.event("retired", model, record.version, None, f"lineage {name!r} begins at {first}")
        else:
            model.current[record.version.number] = record
        index_readable(record)
    turn.models[model] = None


def select(model: ModelTable, selector: Selector, location: Location) -> VersionRecord | None:
    """The version to read now, None to wait, or `VersionUnavailable` when waiting is in vain."""
    readable = model.readable
    match selector:
        case Exactly(number):
            record = model.current.get(number)
            if record is not None:
                return record if record.readable else None
            if model.newest is not None and number < model.lineages[model.newest].highest:
                raise VersionUnavailable(
                    f"version {number} is held by nobody and cannot come any more; {seen(model)}",
                    Where(model=str(model.key), version=number),
                )
            return None
        case Latest(back):
            return model.current[readable[-1 - back]] if back < len(readable) else None
        case AtLeast(number):
            return model.current[readable[-1]] if readable and readable[-1] >= number else None
        case Newest(staleness):
            for number in reversed(readable[-1 - staleness :] if staleness < len(readable) else readable):
                record = model.current[number]
                if len(record.centres.get(centre(location), ())) == record.shards:
                    return record
            return None


def seen(model: ModelTable) -> str:
    """What exists, for the errors of those who wait in vain: `readable: 7, 6; not readable: 8 (1 of 2 shards)`."""
    readable = [str(model.current[number].version) for number in reversed(model.readable[-NAMED_MAX:])]
    others = [
        f"{record.version} ({'retired' if record.retired else f'{record.covered} of {record.shards} shards'})"
        for record in list(model.versions.values())[-NAMED_MAX:]
        if record.retired or not record.readable
    ]
    text = f"readable: {', '.join(readable) or 'none'}"
    return f"{text}; not readable: {', '.join(others)}" if others else text
