"""What a deadline means for a transaction: a shard that waited in vain, or a group of which some did not finish.

It names who was missing, and leaves the ending to `groups.py`.
"""

from __future__ import annotations

from tensorhub.errors import DrainTimeout, GroupAborted, TensorHubError, VersionUnavailable, WaitTimeout
from tensorhub.server.groups import abort
from tensorhub.server.holdings import names
from tensorhub.server.state import Part, Phase, Replica, Transaction
from tensorhub.server.turn import Turn, at
from tensorhub.server.versions import seen
from tensorhub.types import Version


def part_late(turn: Turn, replica: Replica, shard: int) -> None:
    """A shard's own deadline passed while it waited."""
    transaction = replica.transaction
    part = None if transaction is None else transaction.parts.get(shard)
    if part is not None:
        abort(turn, part.transaction, {shard: _too_late(part)})


def _too_late(part: Part) -> TensorHubError:
    member, transaction = part.member, part.transaction
    version: Version | None = None if transaction.record is None else transaction.record.version
    match part.phase:
        case Phase.WAITING:
            return WaitTimeout(
                f"no version matched {transaction.selector} in time; {seen(member.replica.model)}", at(member)
            )
        case Phase.DRAINING:
            readers = ", ".join(names(member.holdings[transaction.buffers]))
            return DrainTimeout(f"readers of this shard's old version did not end in time: {readers}", at(member))
        case Phase.QUEUED | Phase.REROUTING:
            return VersionUnavailable(f"no source of version {version} in time: {part.lack}", at(member, version))
        case Phase.READING | Phase.HELD | Phase.DONE:
            return GroupAborted(f"not all shards finished version {version} in time", at(member, version))


def transaction_late(turn: Turn, transaction: Transaction) -> None:
    """A decided transaction outlived all its members' deadlines: name the shards that are missing."""
    replica = transaction.replica
    failures: dict[int, TensorHubError] = {}
    for shard in range(replica.shards):
        part = transaction.parts.get(shard)
        if part is None:
            failures[shard] = GroupAborted("it never asked")
        elif shard not in transaction.done:
            failures[shard] = GroupAborted(f"it was still {part.phase.value}", at(part.member))
    abort(turn, transaction, failures)


def not_back(turn: Turn, transaction: Transaction) -> None:
    """Whoever outlived the server is back: a shard that is not has died with it, and its siblings wait in vain."""
    replica = transaction.replica
    absent = [shard for shard in range(replica.shards) if shard not in replica.members]
    if absent:
        abort(
            turn, transaction, {shard: GroupAborted("it has not come back since the server died") for shard in absent}
        )
