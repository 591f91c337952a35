"""The time after a new life of the server has begun, in which others of an earlier one are still on their way.

The first session that has seen another life opens it. Until it is over, nothing is decided that they may contradict:
`latest` does not go backwards, a group that has a version keeps it, nobody loses hope for a source. A holding that was
brought back is not drained for a while longer: its readers may be the last to come.
"""

from __future__ import annotations

from tensorhub.server.state import Grace, Holding, ModelTable, Replica
from tensorhub.server.turn import Turn
from tensorhub.types import AtLeast, Exactly, Latest, Selector, Version


def open_grace(turn: Turn) -> None:
    """A session comes from another life: others will. Once per life."""
    if turn.state.grace is Grace.NONE:
        turn.state.grace = Grace.OPEN
        turn.deadlines.set(("grace",), turn.now_ns + turn.settings.grace_ns)


def end_grace(turn: Turn) -> None:
    """Who has not come back by now does not count: decide what waited."""
    turn.state.grace = Grace.OVER
    for model in turn.state.models.values():
        turn.models[model] = None
        for record in model.versions.values():
            turn.slots.update((slot, None) for slot in record.slots.values() if slot.lines)


def may_decide(turn: Turn, model: ModelTable, selector: Selector) -> bool:
    """Whether what this selector means now cannot be contradicted by who is still on the way.

    `latest` must not go backwards: a publisher is back, and the newest version is not older than anything that anybody
    back has seen or published. Of those before it some may be missing, so whoever wants one of them waits.
    """
    if turn.state.grace is not Grace.OPEN:
        return True
    match selector:
        case Exactly(number):
            record = model.current.get(number)
            return record is not None and record.readable
        case Latest(0) | AtLeast():
            return bool(model.readable) and model.vouched and not _is_older(model, model.readable[-1])
        case _:
            return False


def may_decide_for(turn: Turn, replica: Replica, selector: Selector) -> bool:
    """The same for a group: as long as a shard is missing, it may bring a decision."""
    is_whole = len(replica.members) == replica.shards
    return (is_whole or turn.state.grace is not Grace.OPEN) and may_decide(turn, replica.model, selector)


def raise_floor(model: ModelTable, version: Version) -> None:
    floor = model.floor
    newer = model.lineages[version.lineage].order, version.number
    if floor is None or newer > (model.lineages[floor.lineage].order, floor.number):
        model.floor = version


def _is_older(model: ModelTable, number: int) -> bool:
    """Whether the version of this number is older than the newest that is known to have been."""
    floor = model.floor
    if floor is None:
        return False
    order = model.current[number].order
    return (order, number) < (model.lineages[floor.lineage].order, floor.number)


def until_all_are_back(turn: Turn) -> int:
    """When whoever was here before the server died is back, or dead: it has no lease any more."""
    return turn.now_ns + max(turn.settings.lease_ns, turn.settings.grace_ns)


def doubt(turn: Turn, holding: Holding) -> None:
    """Readers of an earlier life may not have come back yet: not drained before they have had time to."""
    holding.is_unsure = True
    turn.deadlines.set(("unsure", holding.generation), until_all_are_back(turn))


def sure(turn: Turn, holding: Holding) -> None:
    """Whoever read from it in an earlier life of the server is back by now, or has no lease any more."""
    holding.is_unsure = False
    turn.drains[holding] = None
