"""What came of a run: reads verl's metrics and the witnesses' records, judges them. It waits for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from recipe import Run
from witness import WORKER, Exactness, exactness, lines

#: The phases of a sync in order, as JSON and pictures name them. With verl's own manager, rollouts tell verl nothing:
#: then there is only `pull`, the time until the first tensor came out of the back end.
TRAINER_PHASES = ("drain", "gather", "stage", "register", "publish")
ROLLOUT_PHASES = ("pull", "wait", "plan", "drain", "register", "transfer", "verify", "install", "load")
PREFIX = "tensorhub/"
#: Of the keys that TensorHub's back end gives to verl: "tensorhub/rank0/gather_s" is a trainer rank's.
RANK = "rank"
REWARD = "critic/score/mean"
SYNC = "timing_s/update_weights"
CLIPPED = "actor/pg_clipfrac"
KL = "actor/ppo_kl"
#: Fewer steps say nothing about learning.
STEPS_TO_LEARN = 40
FIRST, LAST = 5, 10
GAIN_MIN = 0.25
FROZEN_GAIN_MAX = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One entry per step in each list."""

    rewards: list[float]
    sync_s: list[float]
    phases: list[dict[str, float]]
    clip_fraction: list[float]
    kl: list[float]
    exactness: Exactness

    @property
    def gain(self) -> float | None:
        """By how much the mean reward of the last steps is above that of the first; None with too few steps."""
        if len(self.rewards) < FIRST + LAST:
            return None
        return fmean(self.rewards[-LAST:]) - fmean(self.rewards[:FIRST])

    def complaints(self, run: Run) -> list[str]:
        """What is not as it has to be, in sentences; empty when all is."""
        found = []
        if len(self.rewards) != run.steps:
            found.append(f"{run.steps} steps were asked for, {len(self.rewards)} were logged")
        if not run.is_frozen and not self.exactness.is_exact:
            found.append(
                f"rollouts differ from what was published in {len(self.exactness.differing)} tensors of "
                f"{self.exactness.loads} loads: {list(self.exactness.differing[:3])}"
            )
        if run.is_frozen and self.exactness.is_exact:
            found.append("rollouts were to be frozen, and hold what was published all the same")
        if run.steps >= STEPS_TO_LEARN and self.gain is not None:
            if run.is_frozen and self.gain > FROZEN_GAIN_MAX:
                found.append(f"rollouts were frozen, and the reward rose by {self.gain:.2f} > {FROZEN_GAIN_MAX} anyway")
            if not run.is_frozen and self.gain < GAIN_MIN:
                found.append(f"the reward rose by {self.gain:.2f} only, not by {GAIN_MIN}")
        return found

    def as_json(self, run: Run) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "rewards": self.rewards,
            "sync_s": self.sync_s,
            "phases": self.phases,
            "shares": shares(self.phases),
            "steps": len(self.rewards),
            "back_end": run.back_end,
            "manager": run.manager.value,
            "frozen": run.is_frozen,
            "clip_fraction": self.clip_fraction,
            "kl": self.kl,
            "gain": self.gain,
            "exact": self.exactness.is_exact,
            "loads_compared": self.exactness.loads,
            "replicas": self.exactness.replicas,
        }


def read(run: Run) -> Outcome:
    """Everything that the run has left in its folder."""
    steps = read_steps(run.metrics)
    loads: dict[int, list[dict[str, float]]] = {}
    for file in run.record.glob(f"{WORKER}*.jsonl"):
        for line in lines(file):
            loads.setdefault(line.pop("version"), []).append(line)
    return Outcome(
        rewards=[step.get(REWARD, float("nan")) for step in steps],
        sync_s=[step.get(SYNC, float("nan")) for step in steps],
        phases=[phases(step, loads.get(number, [])) for number, step in enumerate(steps, 1)],
        clip_fraction=[step.get(CLIPPED, float("nan")) for step in steps],
        kl=[step.get(KL, float("nan")) for step in steps],
        exactness=exactness(run.record),
    )


def read_steps(file: Path) -> list[dict[str, float]]:
    """The metrics of each step so far."""
    return [line["data"] for line in lines(file)]


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all the time that trainer ranks spent in syncs, which part in each phase; of the rollouts', too.

    Without the first step, in which memory is made and registered.
    """
    seconds: dict[str, float] = {}
    sides: dict[str, float] = {}
    for step in steps[1:]:
        for phase, spent in step.items():
            side = phase.partition("/")[0]
            seconds[phase] = seconds.get(phase, 0.0) + spent
            sides[side] = sides.get(side, 0.0) + spent
    return {phase: spent / sides[phase.partition("/")[0]] for phase, spent in seconds.items() if spent > 0}


def phases(step: Mapping[str, float], loads: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """{"trainer/gather": seconds, ...} of one sync: of each phase, the slowest process's."""
    told = [
        (f"{'trainer' if who.startswith(RANK) else 'rollout'}/{name.removesuffix('_s')}", seconds)
        for who, name, seconds in (
            (*key.removeprefix(PREFIX).split("/", 1), seconds)
            for key, seconds in step.items()
            if key.startswith(PREFIX) and key.count("/") == 2 and key.endswith("_s")
        )
    ]
    told += [(f"rollout/{name.removesuffix('_s')}", seconds) for load in loads for name, seconds in load.items()]
    slowest: dict[str, float] = {}
    for phase, seconds in told:
        slowest[phase] = max(seconds, slowest.get(phase, 0.0))
    return slowest
