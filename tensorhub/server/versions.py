"""Which version may be published, and which one a selector means. It never looks at who asks beyond its place.

Lineages are ordered by their opening. Opening one retires the versions of older ones from its first number on, so the
numbers of all versions that are not retired rise from lineage to lineage, and every selector is a search in one list.
"""

from __future__ import annotations

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
        recall(turn, model, LineageMark(version.lineage, last + 1, version.number))
    elif version.number >= lineage.first:
        lineage.highest = max(lineage.highest, version.number)
    else:
        _begin(turn, model, version.lineage, lineage, version.number)


def recall(turn: Turn, model: ModelTable, mark: LineageMark) -> None:
    """A lineage is known to stand where the mark says, by this life or by who comes from an earlier one."""
    lineage = model.lineages.get(mark.name)
    if lineage is not None and mark.first >= lineage.first:
        return
    if lineage is None:
        lineage = model.lineages[mark.name] = Lineage(mark.order, mark.first, mark.first)
        model.newest = max(model.lineages, key=lambda name: model.lineages[name].order)
    _begin(turn, model, mark.name, lineage, mark.first)


def _begin(turn: Turn, model: ModelTable, name: str, lineage: Lineage, first: int) -> None:
    """The lineage begins at this number: those before it end below."""
    lineage.first = first
    for record in model.versions.values():
        if record.order < lineage.order and record.version.number >= lineage.first and not record.retired:
            record.retired = True
            del model.current[record.version.number]
            index_readable(record)
            turn.event("retired", model, record.version, None, f"lineage {name!r} begins at {first}")
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
