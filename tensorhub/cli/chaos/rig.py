"""What the cases of chaos act with: one server, a trainer and rollouts as processes, and transfers that take seconds.

It decides how long a transfer lasts (processes pace what they send: `cli/pace.py`) and where its middle is. What has to
come out of a case, the case says; `record.py` judges.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorhub.addresses import Address
from tensorhub.cli import compare, weights
from tensorhub.cli.chaos.partition import Partition
from tensorhub.cli.chaos.record import Record, Seen
from tensorhub.cli.chaos.servers import OwnServer
from tensorhub.cli.demo_worker import (
    Command,
    Digests,
    Failure,
    Member,
    Open,
    Pace,
    Progress,
    Publish,
    Pulled,
    Replicate,
    Result,
    Setup,
    Step,
    Unpublish,
)
from tensorhub.cli.fleet import OnProgress, ProcessFleet, WorkerFailed
from tensorhub.pipeline.manifest import chunk_size

TRAINER, STANDBY, ROLLOUT = "trainer", "standby", "rollout"
MODEL = "chaos"
#: Of the servers and workers of chaos: short enough that cases end, long beside what a busy machine makes of a beat.
LEASE_SECONDS, BEAT_SECONDS, STALL_SECONDS = 2.0, 0.2, 1.0
#: What a paced transfer takes: the middle is wide, and a server starts in less than half of it.
TRANSFER_SECONDS = 4.0
#: Beyond what is promised: processes that must wait for a processor, the answer's way.
SLACK_SECONDS = 1.0
#: A hub call's own timeout; whoever waits for it waits a little longer, so that the hub's error is the one seen.
CALL_SECONDS = 40.0
CALL_SLACK_SECONDS = 15.0
#: Interpreter, torch and a first contact with the server, for all workers at once on a busy machine.
START_SECONDS = 120.0
#: Errors of an unpublish that has happened all the same.
TOLD_AND_DONE = ("ContractBroken", "VersionConflict")


class CaseFailed(Exception):
    """A case could not come to what it is about; says how."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Who is there: replicas of so many shards each, the trainer first."""

    replicas: tuple[str, ...] = (TRAINER, STANDBY, ROLLOUT)
    shards: int = 1
    #: Replicas that reach the server by a way that can be cut.
    behind: tuple[str, ...] = ()

    def members(self, replica: str) -> list[Member]:
        return [Member(replica, shard) for shard in range(self.shards)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a case runs."""

    server: str
    folder: Path
    model: weights.Model
    seed: int
    #: When trouble begins, as a part of the transfer.
    part: float
    transfer_s: float = TRANSFER_SECONDS


class Rig:
    """A context manager: entering starts server and processes, leaving ends every one of them, by pid."""

    def __init__(self, scene: Scene, place: Place, name: str, on_progress: OnProgress = lambda *_: None) -> None:
        self.scene = scene
        self.place = place
        self.server = OwnServer(place.server, name, place.folder)
        self.partition: Partition | None = None
        self.shard_bytes = max(sum(spec.nbytes for spec in part) for part in self._parts())
        self.record = Record(chunk_size(self.shard_bytes))
        self.fleet: ProcessFleet
        self.version = 0
        #: {version: {shard: digests of what was published}}
        self.published: dict[int, dict[int, dict[str, str]]] = {}
        #: Whether the trainer's tensors are published: until it has unpublished.
        self.is_shown = False
        self._dead: set[Member] = set()
        self._on_progress = on_progress
        self._stack = ExitStack()

    def __enter__(self) -> Rig:
        with ExitStack() as stack:
            stack.enter_context(self.server)
            if self.scene.behind:
                at = Address.parse(self.server.address.partition("://")[2])
                self.partition = stack.enter_context(Partition(at))
            self.fleet = stack.enter_context(ProcessFleet(self._setups()))
            self.ask(self.everyone, Open(), START_SECONDS)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def everyone(self) -> list[Member]:
        """All that live."""
        members = [member for replica in self.scene.replicas for member in self.scene.members(replica)]
        return [member for member in members if member not in self._dead]

    @property
    def trainer(self) -> Member:
        return Member(TRAINER, 0)

    @property
    def rollout(self) -> Member:
        return Member(ROLLOUT, 0)

    # ------------------------------------------------------------ what processes do

    def ask(
        self, members: list[Member], command: Command, timeout_s: float = CALL_SECONDS + CALL_SLACK_SECONDS
    ) -> dict[Member, Any]:
        """All results; `WorkerFailed` names who failed, and how."""
        return self.fleet.ask(dict.fromkeys(members, command), timeout_s, self._on_progress)

    def publish(self) -> int:
        """What the trainer holds, as the next version; its digests are kept, taken by no hub."""
        self.version += 1
        trainers = self.scene.members(TRAINER)
        self.published[self.version] = {
            member.shard: digests for member, digests in self.ask(trainers, Digests()).items()
        }
        self.ask(trainers, Publish(self.version))
        self.is_shown = True
        return self.version

    def unpublish(self) -> Result | Failure:
        """What the trainer of one shard hears; its tensors are its own again, or it says that they are not."""
        answer = self.begin(self.trainer, Unpublish()).answer()
        self.is_shown = isinstance(answer, Failure) and answer.error not in TOLD_AND_DONE
        return answer

    def standby(self) -> None:
        """A second complete holder, filled at full speed."""
        for seen in [self.replicate(member) for member in self.scene.members(STANDBY)]:
            self.record.whole(seen, self.version)

    def pace(self, *, full: bool = False) -> None:
        """From now on a transfer from any holder takes some seconds; `full`: as little as it can."""
        self.ask(self.everyone, Pace(0 if full else round(self.shard_bytes / self.place.transfer_s)))

    def begin(self, member: Member, command: Command) -> Begun:
        """Give a command whose answer comes while other things happen."""
        began = time.monotonic()
        self.fleet.begin(member, command)
        return Begun(self, member, command, began)

    def read(self, member: Member, version: int | None = None, timeout_s: float = CALL_SECONDS) -> Begun:
        """Begin to replicate the newest version."""
        return self.begin(member, Replicate(self.version if version is None else version, timeout_s))

    def replicate(self, member: Member) -> Seen:
        """Replicate the newest version, to its end."""
        return self.read(member).seen()

    def heals(self, reader: Member | None = None) -> None:
        """After all: the trainer's next version reaches the rollout, or another reader, at full speed."""
        self.pace(full=True)
        if self.is_shown and isinstance(answer := self.unpublish(), Failure):
            raise CaseFailed(f"unpublish raised {answer.error}: {answer.message}")
        self.ask([self.trainer], Step(self.place.seed))
        self.publish()
        self.record.whole(self.replicate(reader or self.rollout), self.version)

    # ------------------------------------------------------------ what is done to them

    def way(self) -> Partition:
        """The way to the server that can be cut."""
        if self.partition is None:
            raise CaseFailed("nobody of this scene is behind a way that can be cut")
        return self.partition

    def kill(self, member: Member) -> None:
        self._dead.add(member)
        self.fleet.signal(member, signal.SIGKILL)

    def stop(self, member: Member) -> None:
        self.fleet.signal(member, signal.SIGSTOP)

    def go_on(self, member: Member) -> None:
        self.fleet.signal(member, signal.SIGCONT)

    def restart_server(self) -> float:
        """SIGKILL, and a new life that knows nothing; seconds that nobody served."""
        began = time.monotonic()
        self.server.kill()
        self.server.start()
        seconds = time.monotonic() - began
        self.record.notes.append(f"the server was away for {seconds:.2f} s")
        return seconds

    # ------------------------------------------------------------ inside

    def heard(self, member: Member, message: Progress) -> None:
        self._on_progress(member, message)

    def seen(self, begun: Begun, answer: Result | Failure) -> Seen:
        """A replicate's answer, and what lies in memory then."""
        member, seconds = begun.member, answer.at_s - begun.began_s
        if isinstance(answer, Failure):
            return Seen(str(member), 0, seconds, answer.at_s, error=answer.error, message=answer.message)
        got = answer.value
        if not isinstance(got, Pulled):
            raise CaseFailed(f"{member} answered a replicate by {got!r}")
        expected: Mapping[str, str] = self.published.get(got.version, {}).get(member.shard, {})
        found = self.ask([member], Digests())[member]
        return Seen(
            str(member),
            got.version,
            seconds,
            answer.at_s,
            got.nbytes,
            got.bytes_read,
            tuple(pull.source for pull in got.pulls),
            differences=tuple(compare.compare_digests(member.replica, member.shard, expected, found)),
        )

    def _parts(self) -> list[tuple[weights.TensorSpec, ...]]:
        return weights.split(self.place.model.specs, self.scene.shards)

    def _setups(self) -> list[Setup]:
        parts = self._parts()
        direct = Setup(
            member=self.trainer,
            shards=self.scene.shards,
            trainer=True,
            specs=(),
            file=None,
            seed=self.place.seed,
            model=MODEL,
            server=self.server.address,
            job=None,
            engine=("tcp",),  # over sockets: within a host memory needs neither the source's help nor time
            timeout_s=CALL_SECONDS,
            goes_on=True,
        )
        return [
            replace(
                direct,
                member=member,
                trainer=member.replica == TRAINER,
                specs=parts[member.shard],
                server=self._way_of(member.replica),
            )
            for member in self.everyone
        ]

    def _way_of(self, replica: str) -> str:
        if self.partition is None or replica not in self.scene.behind:
            return self.server.address
        return f"{self.place.server}://{self.partition.at}"


@dataclass(frozen=True, slots=True)
class Begun:
    """A command that a worker is busy with."""

    rig: Rig
    member: Member
    command: Command
    began_s: float

    def until(self, reached: Callable[[Progress], bool]) -> Progress:
        """The first progress of which this holds; `CaseFailed` when the command ends before."""
        message = self.rig.fleet.hear(self.member, CALL_SECONDS)
        while isinstance(message, Progress):
            self.rig.heard(self.member, message)
            if reached(message):
                return message
            message = self.rig.fleet.hear(self.member, CALL_SECONDS)
        if isinstance(message, Failure):
            raise CaseFailed(f"{self.member} raised before its time: {message.error}: {message.message}")
        raise CaseFailed(f"{self.member} was done before its middle was seen: the kernel does not pace its source")

    def middle(self, at: float | None = None) -> Progress:
        """When this part of the transfer is done; without one, that at which trouble begins."""
        part = self.rig.place.part if at is None else at
        return self.until(lambda told: told.bytes_total > 0 and part <= told.bytes_done / told.bytes_total < 1)

    def source(self, at: float | None = None) -> Member:
        """Who serves this replicate then."""
        replica, _, shard = self.middle(at).source.rpartition("#")
        return Member(replica, int(shard))

    def answer(self, timeout_s: float = CALL_SECONDS + CALL_SLACK_SECONDS) -> Result | Failure:
        """Its end."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.rig.fleet.hear(self.member, max(0.0, deadline - time.monotonic()))
            if not isinstance(message, Progress):
                return message
            self.rig.heard(self.member, message)

    def seen(self) -> Seen:
        """Of a replicate: its end, held against what was published."""
        return self.rig.seen(self, self.answer())


__all__ = ["Begun", "CaseFailed", "Place", "Rig", "Scene", "WorkerFailed"]
