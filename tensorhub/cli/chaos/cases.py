"""The cases of chaos by name, in words and as functions; and how one of them is run.

It decides what counts as the end of a case: also one that cannot come to its point has an outcome.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorhub.cli import weights
from tensorhub.cli.chaos import of_peers, of_server
from tensorhub.cli.chaos.record import Outcome, outcome
from tensorhub.cli.chaos.rig import ROLLOUT, TRAINER, CaseFailed, Place, Rig, Scene
from tensorhub.cli.fleet import OnProgress, WorkerFailed
from tensorhub.errors import BadRequest

#: Below this a transfer is a few chunks, and buffers of sockets hold a part of it that matters.
MIB_MIN = 16
MIB_MAX = 4096
#: Trouble begins somewhere in the middle.
PARTS = (0.4, 0.6)

TRIO = Scene()
PAIR = Scene((TRAINER, ROLLOUT))


@dataclass(frozen=True, slots=True)
class Case:
    """One story: what is done, and what has to happen."""

    act: Callable[[Rig], None]
    did: str
    must: str
    scene: Scene = TRIO
    #: Whether it cuts the way to the server, which a Unix socket does not have.
    needs_tcp: bool = False

    @property
    def name(self) -> str:
        return self.act.__name__


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            of_peers.source_killed_midchunk,
            "SIGKILL to the source of a transfer in its middle",
            "the reader goes on elsewhere from where it was; at most two chunks are read again",
        ),
        Case(
            of_peers.source_stopped,
            "SIGSTOP to the source of a transfer in its middle",
            "the reader notices within its patience, and goes on elsewhere",
        ),
        Case(
            of_peers.reader_killed,
            "SIGKILL to a reader in the middle, then unpublish",
            "the drain completes within the lease; the next version reaches others",
            Scene((TRAINER, ROLLOUT, "other")),
        ),
        Case(
            of_peers.sibling_dies,
            "SIGKILL to one shard of two of a replica in the middle",
            "the other shard's replicate ends within the lease and names it",
            Scene((TRAINER, ROLLOUT), shards=2),
        ),
        Case(
            of_peers.zombie,
            "SIGSTOP to a reader; its source drains, changes, publishes anew; then SIGCONT",
            "the drain completes within the lease; the reader never returns mixed bytes; its next replicate heals it",
            PAIR,
        ),
        Case(
            of_peers.control_partition,
            "a reader's way to the server is silent for half a lease in the middle of its transfer",
            "the transfer goes on and nothing is read again",
            Scene((TRAINER, ROLLOUT), behind=(ROLLOUT,)),
            needs_tcp=True,
        ),
        Case(
            of_peers.partition_past_lease,
            "a reader's way to the server is silent for longer than its lease; its source drains and changes",
            "the drain completes within the lease; the reader never returns mixed bytes; its next replicate heals it",
            Scene((TRAINER, ROLLOUT), behind=(ROLLOUT,)),
            needs_tcp=True,
        ),
        Case(
            of_peers.mutate_during_read,
            "the trainer writes to published tensors that are being read",
            "the reader fails, the trainer hears ContractBroken with the reader's name; the next version heals",
            PAIR,
        ),
        Case(
            of_server.server_restart_midtransfer,
            "SIGKILL to the server in the middle of a transfer, and an empty one in its place",
            "the transfer goes on from its source and returns; nothing is read again",
        ),
        Case(
            of_server.server_restart_waiting,
            "SIGKILL to the server while a reader waits for a version, and an empty one in its place",
            "the reader goes on waiting and gets the version",
            PAIR,
        ),
        Case(
            of_server.server_restart_unpublish,
            "SIGKILL to the server in the middle of a transfer, an empty one in its place, then unpublish and a write",
            "unpublish returns after the reader is done; nothing is read again",
            PAIR,
        ),
        Case(
            of_server.server_stopped,
            "SIGSTOP to the server in the middle of a transfer, SIGCONT after a lease and a half",
            "the transfer goes on and returns; nothing is read again; the next version arrives",
            PAIR,
        ),
    )
}


def choose(only: Sequence[str]) -> list[Case]:
    """The cases that are named, in their own order; all for none. `BadRequest` for an unknown one."""
    unknown = [name for name in only if name not in CASES]
    if unknown:
        raise BadRequest(f"--only {','.join(unknown)}: no such case; there are {', '.join(CASES)}")
    return [case for name, case in CASES.items() if not only or name in only]


def place_of(case: Case, server: str, folder: Path, mib: int, seed: int) -> Place:
    """Where a case runs: everything that is drawn, is drawn from the seed and the case's name."""
    if not MIB_MIN <= mib <= MIB_MAX:
        raise BadRequest(f"--mib is from {MIB_MIN} to {MIB_MAX}, not {mib}")
    drawn = random.Random(f"{seed} {case.name}")  # noqa: S311  a choice that can be repeated, not a secret
    return Place(server, folder, weights.synthetic(mib), drawn.randrange(2**31), drawn.uniform(*PARTS))


def run(case: Case, place: Place, on_progress: OnProgress) -> Outcome:
    """One case, to its end. What goes wrong is in the outcome; only being interrupted is raised."""
    if case.needs_tcp and place.server == "local":
        why = "the way to a local server is a Unix socket, which cannot be cut; use --server frames or grpc"
        return Outcome(case.name, case.did, case.must, ok=True, seconds=0.0, skipped=why)
    began = time.monotonic()
    rig = Rig(case.scene, place, case.name, on_progress)
    try:
        with rig:
            began = time.monotonic()
            case.act(rig)
    except (CaseFailed, WorkerFailed) as failure:
        rig.record.complaints.append(" ".join(str(failure).split()))
    return outcome(case.name, case.did, case.must, time.monotonic() - began, rig.record)
