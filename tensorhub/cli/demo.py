"""The demo's course: rounds of train, publish, replicate, compare, unpublish, and a last comparison byte for byte.

It decides what counts as identical and what the run reports. Processes are `fleet.py`'s, tensors `weights.py`'s, the
screen `demo_view.py`'s; the course itself can be run over a fake fleet.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from tensorhub.cli import compare, weights
from tensorhub.cli.demo_worker import (
    Command,
    Digests,
    Leave,
    Member,
    Open,
    Progress,
    Publish,
    Pulled,
    Replicate,
    Setup,
    Step,
    Stream,
    Unpublish,
)
from tensorhub.cli.fleet import Fleet, OnProgress
from tensorhub.errors import BadRequest

TRAINER = "trainer"
MODEL = "demo"
#: The demo's processes share one host; more would show nothing but a busy machine.
WORKERS_MAX = 64
ROUNDS_MAX = 10_000
SEED = 20_240_229
#: Interpreter, torch and a first contact with the server, for all workers at once on a busy machine.
START_SECONDS = 180.0
#: A hub call's own timeout; the fleet waits a little longer, so that the hub's error is the one that is seen.
CALL_SECONDS = 120.0
CALL_SLACK_SECONDS = 15.0
#: Local work (a train step, digests) at 20 MB/s on a starved machine, at least this long.
WORK_SECONDS_MIN = 120.0
WORK_BYTES_PER_SECOND = 20e6


@dataclass(frozen=True, slots=True)
class Options:
    """What `tensorhub demo` was asked for."""

    model: weights.Model
    replicas: int = 4
    shards: int = 2
    rounds: int = 3
    #: Names of engines, best first.
    engine: tuple[str, ...] = ("auto",)
    server: str | None = None

    def check(self) -> None:
        """`BadRequest` for what no demo can do."""
        if self.replicas < 1 or self.shards < 1 or not 1 <= self.rounds <= ROUNDS_MAX:
            raise BadRequest(f"--replicas, --shards and --rounds are at least 1 (rounds at most {ROUNDS_MAX})")
        if (self.replicas + 1) * self.shards > WORKERS_MAX:
            raise BadRequest(f"{self.replicas} replicas + 1 of {self.shards} shards are over {WORKERS_MAX} processes")

    @property
    def rollouts(self) -> tuple[str, ...]:
        return tuple(f"rollout-{i}" for i in range(self.replicas))

    def members(self, *replicas: str) -> list[Member]:
        return [Member(replica, shard) for replica in replicas for shard in range(self.shards)]


@dataclass(frozen=True, slots=True)
class ReplicaRound:
    """One rollout replica in one round: its shards together. `seconds` and `phases` are its slowest shard's."""

    replica: str
    version: int
    nbytes: int
    seconds: float
    gb_per_s: float
    verified: bool
    sources: tuple[dict[str, Any], ...]
    phases: dict[str, float]
    identical: bool


@dataclass(frozen=True, slots=True)
class Round:
    """One version's way from the trainer to every rollout."""

    version: int
    tensors_changed: int
    publish_s: float
    unpublish_s: float
    replicas: tuple[ReplicaRound, ...]
    differences: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """What the demo found. `differences` holds every one of all rounds and of the comparison byte for byte."""

    options: Options
    rounds: list[Round] = field(default_factory=list)
    differences: list[compare.Difference] = field(default_factory=list)
    bytes_compared: int = 0

    @property
    def identical(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "model": {
                "title": self.options.model.title,
                "tensors": len(self.options.model.specs),
                "nbytes": self.options.model.nbytes,
            },
            "replicas": self.options.replicas,
            "shards": self.options.shards,
            "engine": ",".join(self.options.engine),
            "rounds": [asdict(done) for done in self.rounds],
            "bytes_compared": self.bytes_compared,
            "differences": [asdict(difference) for difference in self.differences],
        }


class View(Protocol):
    """Where the course is shown."""

    def stage(self, version: int, name: str, /) -> None:
        """A stage ("train", "publish", "replicate", "compare", "unpublish", "compare bytes") begins."""
        ...

    def progress(self, member: Member, progress: Progress, /) -> None:
        """A replicate of `member` has come this far."""
        ...

    def round_done(self, done: Round, /) -> None:
        """Everything of one version is done and compared."""
        ...


def setups(options: Options) -> list[Setup]:
    """One setup per worker. Without `--server` the run has a namespace (job) of its own on the local server."""
    job = None if options.server is not None else f"demo-{secrets.token_hex(8)}"
    model = MODEL if job is not None else f"{MODEL}-{secrets.token_hex(8)}"
    parts = weights.split(options.model.specs, options.shards)
    return [
        Setup(
            member=member,
            shards=options.shards,
            trainer=member.replica == TRAINER,
            specs=parts[member.shard],
            file=options.model.file,
            seed=SEED,
            model=model,
            server=options.server,
            job=job,
            engine=options.engine,
            timeout_s=CALL_SECONDS,
        )
        for member in options.members(TRAINER, *options.rollouts)
    ]


def run(options: Options, fleet: Fleet, view: View) -> Outcome:
    """All rounds, then the comparison byte for byte. Differences are found, not raised; failures of workers are."""
    course = _Course(options, fleet, view)
    course.ask(course.everyone, Open(), START_SECONDS)
    outcome = Outcome(options)
    before = course.digests(course.trainers)
    for number in range(1, options.rounds + 1):
        before = course.round(number, before, outcome, last=number == options.rounds)
    course.ask(course.everyone, Leave(), CALL_SECONDS + CALL_SLACK_SECONDS)
    return outcome


class _Course:
    """The steps of a demo, in the words of the fleet."""

    def __init__(self, options: Options, fleet: Fleet, view: View) -> None:
        self.options = options
        self.fleet = fleet
        self.view = view
        self.trainers = options.members(TRAINER)
        self.rollouts = options.members(*options.rollouts)
        self.everyone = self.trainers + self.rollouts
        self.work_s = max(WORK_SECONDS_MIN, options.model.nbytes / WORK_BYTES_PER_SECOND)

    def ask(
        self, members: Sequence[Member], command: Command, timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[Member, Any]:
        return self.fleet.ask(dict.fromkeys(members, command), timeout_s, on_progress)

    def call(self, members: Sequence[Member], command: Command) -> dict[Member, Any]:
        """A command that ends in a call of the hub, with its deadline."""
        return self.ask(members, command, CALL_SECONDS + CALL_SLACK_SECONDS, self.view.progress)

    def digests(self, members: Sequence[Member]) -> dict[Member, dict[str, str]]:
        return self.ask(members, Digests(), self.work_s)

    def round(
        self, version: int, before: dict[Member, dict[str, str]], outcome: Outcome, last: bool
    ) -> dict[Member, dict[str, str]]:
        """Everything of one version; returns the trainer's digests, which the next train step must change."""
        self.view.stage(version, "train")
        self.ask(self.trainers, Step(SEED + version * WORKERS_MAX), self.work_s)
        self.view.stage(version, "publish")
        published = self.call(self.trainers, Publish(version))
        self.view.stage(version, "replicate")
        pulled: dict[Member, Pulled] = self.call(self.rollouts, Replicate())
        self.view.stage(version, "compare")
        found = self.digests(self.everyone)
        expected = {member: found[member] for member in self.trainers}
        differences = self.differences(version, before, expected, found, pulled)
        if last:
            self.view.stage(version, "compare bytes")
            more, outcome.bytes_compared = self.compare_bytes()
            differences += more
        self.view.stage(version, "unpublish")
        unpublished = self.call(self.trainers, Unpublish())
        done = Round(
            version=version,
            tensors_changed=sum(
                before[member][name] != expected[member][name] for member in self.trainers for name in expected[member]
            ),
            publish_s=max(published.values()),
            unpublish_s=max(unpublished.values()),
            replicas=tuple(self.summary(replica, pulled, differences) for replica in self.options.rollouts),
            differences=tuple(str(difference) for difference in differences),
        )
        outcome.rounds.append(done)
        outcome.differences += differences
        self.view.round_done(done)
        return expected

    def differences(
        self,
        version: int,
        before: dict[Member, dict[str, str]],
        expected: dict[Member, dict[str, str]],
        found: dict[Member, dict[str, str]],
        pulled: dict[Member, Pulled],
    ) -> list[compare.Difference]:
        """The train step changed what it must; every rollout holds this version, and the trainer's bytes."""
        differences: list[compare.Difference] = []
        parts = weights.split(self.options.model.specs, self.options.shards)
        for member in self.trainers:
            stale = compare.unchanged(weights.trained(parts[member.shard]), before[member], expected[member])
            reason = "the train step changed nothing"
            differences += [compare.Difference(TRAINER, member.shard, name, reason) for name in stale]
        for member in self.rollouts:
            if pulled[member].version != version:
                reason = f"replicate returned version {pulled[member].version}, not {version}"
                differences.append(compare.Difference(member.replica, member.shard, "(all)", reason))
            twin = Member(TRAINER, member.shard)
            differences += compare.compare_digests(member.replica, member.shard, expected[twin], found[member])
        return differences

    def compare_bytes(self) -> tuple[list[compare.Difference], int]:
        """Each rollout shard's bytes against its twin's of the trainer, piece by piece, nothing kept."""
        differences: list[compare.Difference] = []
        compared = 0
        for shard in range(self.options.shards):
            twins = [Member(replica, shard) for replica in self.options.rollouts]
            trainer = Member(TRAINER, shard)
            listed = self.ask([trainer, *twins], Stream(), self.work_s)
            for twin in twins:
                if listed[twin] != listed[trainer]:
                    raise BadRequest(f"{twin} lists other tensors or sizes than {trainer}: nothing to compare")
            for name, nbytes in listed[trainer]:
                streams = [self.fleet.pieces(member, nbytes, self.work_s) for member in (trainer, *twins)]
                differing: dict[Member, str] = {}
                offset = 0
                for expected, *pieces in zip(*streams, strict=True):
                    for twin, piece in zip(twins, pieces, strict=True):
                        at = compare.compare_piece(expected, piece)
                        if at is not None:
                            differing.setdefault(twin, f"first different byte at offset {offset + at}")
                    offset += len(expected)
                compared += offset * len(twins)
                for twin, reason in differing.items():
                    differences.append(compare.Difference(twin.replica, shard, name, reason))
        return differences, compared

    def summary(
        self, replica: str, pulled: dict[Member, Pulled], differences: Sequence[compare.Difference]
    ) -> ReplicaRound:
        """A replica's shards in one row."""
        shards = [pulled[member] for member in self.options.members(replica)]
        nbytes = sum(shard.nbytes for shard in shards)
        slowest = max(shards, key=lambda shard: shard.seconds)
        return ReplicaRound(
            replica=replica,
            version=slowest.version,
            nbytes=nbytes,
            seconds=slowest.seconds,
            gb_per_s=nbytes / slowest.seconds / 1e9 if slowest.seconds > 0 else 0.0,
            verified=all(shard.verified for shard in shards),
            sources=tuple(asdict(pull) for shard in shards for pull in shard.pulls),
            phases=slowest.phases,
            identical=not any(difference.replica == replica for difference in differences),
        )
