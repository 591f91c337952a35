"""What came of a run: reads verl's metrics and the witnesses' records, judges them. It waits for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from recipe import Run
from witness import Exactness, exactness

#: A phase of a sync as the pictures name it: `gather` to `publish` are trainer ranks', `wait` to `load` rollouts'.
PHASES = ("gather", "cast", "stage", "publish", "wait", "transfer", "verify", "load")
PREFIX = "tensorhub/"
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
    return Outcome(
        rewards=[step.get(REWARD, float("nan")) for step in steps],
        sync_s=[step.get(SYNC, float("nan")) for step in steps],
        phases=[phases(step) for step in steps],
        clip_fraction=[step.get(CLIPPED, float("nan")) for step in steps],
        kl=[step.get(KL, float("nan")) for step in steps],
        exactness=exactness(run.record),
    )


def read_steps(file: Path) -> list[dict[str, float]]:
    """The metrics of each step so far; a line that is still being written is left out."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line)["data"] for line in lines]


def phases(step: Mapping[str, float]) -> dict[str, float]:
    """Seconds per phase of one sync: of each phase, the slowest rank's."""
    slowest: dict[str, float] = {}
    for key, seconds in step.items():
        name = key.rpartition("/")[2].removesuffix("_s")
        if key.startswith(PREFIX) and name in PHASES:
            slowest[name] = max(seconds, slowest.get(name, 0.0))
    return slowest
