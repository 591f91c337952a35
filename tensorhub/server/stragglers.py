"""What is done about a slow reader: it goes to the end of the chain, and those behind it go on from its source.

Nobody is cut off: each is asked to leave its source (`SourceLost`) and reads on until it says `Reroute`; until it has
another source it keeps its old one, and gets that again when there is none. Who is slow, `pace.py` judges; the new
sources, placement chooses.
"""

from __future__ import annotations

from tensorhub.messages import SourceLost
from tensorhub.server import pace
from tensorhub.server.grants import part_of
from tensorhub.server.holdings import reweigh
from tensorhub.server.offers import refresh
from tensorhub.server.settings import MOVES_MAX, SLOW_SHARE
from tensorhub.server.state import Holding, HoldingState, Member, Phase
from tensorhub.server.turn import Turn


def mind(turn: Turn, filling: Holding, period_ns: int) -> None:
    """A filling has reported: does it lag?

    Judged by its own report alone, which is newer than its source's: where both have just begun, or begun again, the
    source's rate is the lower one, and nobody is blamed for having come second.
    """
    pace.note(filling, turn.now_ns, period_ns)
    reason = "" if filling.asked or filling.moves >= MOVES_MAX else pace.lag(filling, turn.now_ns)
    if reason and not _many_are_slow(filling):
        _set_aside(turn, filling, reason)


def _many_are_slow(filling: Holding) -> bool:
    fillings = [one for one in filling.slot.holdings.values() if one.state is HoldingState.FILLING]
    return sum(bool(one.member.slow) for one in fillings) >= max(1, len(fillings) // SLOW_SHARE)


def _set_aside(turn: Turn, slow: Holding, reason: str) -> None:
    """Mark it, ask its readers to leave it, and it to leave its source to them."""
    mark(turn, slow.member, reason)
    turn.event("slow", slow.slot.record.model, slow.slot.record.version, slow.member.seat, reason)
    for reader in list(slow.readers.values()):
        _ask(turn, reader, slow, f"{slow.member.seat} is {reason}")
    if slow.upstream is not None:
        _ask(turn, slow, slow.upstream, f"it makes room for those behind it: it is {reason}")


def mark(turn: Turn, member: Member, reason: str) -> None:
    """A slow member is the last to be offered, and takes too little of a source to count; an empty reason unmarks."""
    member.slow = reason
    for holding in member.holdings.values():
        reweigh(turn, holding)
        refresh(turn, holding)


def _ask(turn: Turn, reader: Holding, source: Holding, reason: str) -> None:
    """It counts no more as the source's reader, for as long as it may take to answer."""
    part = part_of(reader)
    if reader.asked or reader.moves >= MOVES_MAX or part is None or part.phase is not Phase.READING:
        return
    reader.asked, reader.moves = reason, reader.moves + 1
    turn.deadlines.set(("asked", reader.generation), turn.now_ns + turn.settings.slow_patience_ns)
    reweigh(turn, reader)
    turn.notify(reader.member.session.id, SourceLost(reader.member.seat, reader.generation, source.generation, reason))


def not_heard(turn: Turn, reader: Holding) -> None:
    """It did not leave: it counts as a reader again."""
    reader.asked = ""
    reweigh(turn, reader)


def finished(turn: Turn, filling: Holding) -> None:
    """A filling is whole. One as fast as usual takes the mark from its member."""
    if pace.finish(filling, turn.now_ns) and filling.member.slow:
        mark(turn, filling.member, "")
