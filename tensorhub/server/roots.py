"""One content per version: whose root digest a shard of a version has, and who is offered or withdrawn because of it.

The first publisher's seal decides; if it is gone unsealed, the first root that anybody named. It computes no digest.
"""

from __future__ import annotations

from tensorhub.errors import VersionConflict
from tensorhub.messages import Conflicted
from tensorhub.server.grants import part_of
from tensorhub.server.groups import abort, settled, wrong_root
from tensorhub.server.holdings import drop
from tensorhub.server.offers import refresh
from tensorhub.server.state import Holding, Phase, Slot
from tensorhub.server.turn import Turn, at
from tensorhub.types import Digest


def report(turn: Turn, holding: Holding, root: Digest) -> VersionConflict | None:
    """A publisher names its root. The error, when the version's is another one; the holding is withdrawn then."""
    slot = holding.slot
    holding.root = root
    if slot.root is not None:
        return compare(turn, holding)
    if slot.author is holding or slot.author is None:
        establish(turn, slot, root)
        return None if holding.proven else compare(turn, holding)
    slot.reported[holding.generation] = holding
    return None


def settle(turn: Turn, slot: Slot) -> None:
    """The first publisher is gone unsealed: the first root that anybody has named becomes the version's."""
    if slot.root is None and slot.author is None and slot.reported:
        first = next(iter(slot.reported.values()))
        if first.root is not None:
            establish(turn, slot, first.root)


def establish(turn: Turn, slot: Slot, root: Digest) -> None:
    """The version's root is known: settle all who named theirs before, in that order."""
    slot.root, slot.author = root, None
    reported, slot.reported = slot.reported, {}
    for holding in reported.values():
        if turn.state.generations.get(holding.generation) is not holding:
            continue
        part = part_of(holding)
        if part is None or part.phase is not Phase.DONE:
            compare(turn, holding)
        elif holding.root == root:
            settled(turn, part)
        else:
            abort(turn, part.transaction, {part.member.seat.shard: wrong_root(part)})


def compare(turn: Turn, holding: Holding) -> VersionConflict | None:
    """Offer a holding whose root is the version's; withdraw one whose root is not."""
    slot, member = holding.slot, holding.member
    version = slot.record.version
    if holding.root == slot.root:
        holding.proven = True
        refresh(turn, holding)
        return None
    reason = (
        f"version {version} is published with other bytes by others, whose bytes are kept: root digests differ; "
        "publish a higher version, or open a new lineage after a restart from a checkpoint"
    )
    turn.notify(member.session.id, Conflicted(member.seat, holding.generation, version, reason))
    turn.event("conflict", slot.record.model, version, member.seat, reason)
    drop(turn, holding, reason)
    return VersionConflict(f"{reason}; it was withdrawn, unpublish is not needed", at(member, version))
