"""Measures weight synchronisation within verl's own schedule, in an environment that has verl; hands figures on.

`python -m bench.verl.measure sync|stall FILE` writes seconds into the file, by name, in pairs; on stdout, what runs
next. It judges nothing: `sections.py` does, elsewhere. A step counts only if its bytes arrived.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from bench.measure import PAIRS_MIN, interleave
from bench.verl import models
from bench.verl.rig import Rig, held, ray_cluster, workers
from bench.verl.rollout import Replica

BACKENDS = ("tensorhub", "tcp_baseline")
TRAINER_RANKS = 2
REPLICAS = (2, 4)
#: Before those that count: connections and both staging sets are made by then.
WARM_STEPS = 3
#: What a step computes before it hands over weights: long enough for replicas to pull and load the last ones.
STEP_SECONDS = 2.0
#: Steps in a row under one manager; the trainer's two staging sets are used twice.
STEPS_PER_TURN = 4
REPLICAS_OF_STALL = 2
#: A hang guard.
ARRIVE_SECONDS = 120.0

Seconds = dict[str, list[float]]
Tell = Callable[[str], None]


def sync(tell: Tell) -> Seconds:
    """Seconds of `CheckpointEngineManager.update_weights`, for each back end and number of replicas."""
    with tempfile.TemporaryDirectory() as folder, ray_cluster():
        tell(f"starting {TRAINER_RANKS} ranks and {max(REPLICAS)} replicas")
        rig = Rig.start(models.make(Path(folder), models.LARGE), ranks=TRAINER_RANKS, replicas=max(REPLICAS))
        found: Seconds = {}
        for count in REPLICAS:
            turns = {f"{backend}_{count}": one_sync(rig, backend, rig.replicas[:count]) for backend in BACKENDS}
            turns[f"gather_{count}"] = lambda: gather(rig)
            for name, turn in turns.items():
                tell(f"warming {name}")
                for _ in range(WARM_STEPS):
                    turn()
            found |= interleave(turns, PAIRS_MIN, tell)
        return found


def one_sync(rig: Rig, backend: str, replicas: Sequence[Replica]) -> Callable[[], float]:
    """Changes every weight, then syncs, timed, and looks at what arrived."""

    def turn() -> float:
        rig.use(backend)
        ray.get(rig.trainer.compute(0.0))
        step = next(rig.steps)
        manager = rig.manager(replicas)
        began = time.perf_counter()
        manager.update_weights(step)
        seconds = time.perf_counter() - began
        check(rig, replicas, step)
        return seconds

    return turn


def gather(rig: Rig) -> float:
    """Seconds in which the trainer's ranks put every full tensor together and use none: before any back end begins."""
    began = time.perf_counter()
    ray.get(rig.trainer.drain())
    return time.perf_counter() - began


def stall(tell: Tell) -> Seconds:
    """Seconds per step that the trainer does not compute, under verl's manager and under ours, on the same back end."""
    from verl.checkpoint_engine import CheckpointEngineManager

    from tensorhub.integrations.verl import TensorHubCheckpointManager

    with tempfile.TemporaryDirectory() as folder, ray_cluster():
        tell(f"starting {TRAINER_RANKS} ranks and {REPLICAS_OF_STALL} replicas")
        model = models.make(Path(folder), models.LARGE)
        rig = Rig.start(model, ranks=TRAINER_RANKS, replicas=REPLICAS_OF_STALL)
        rig.use("tensorhub")
        turns: dict[str, Callable[[], float]] = {
            "ours": lambda: several_steps(rig, TensorHubCheckpointManager),
            "stock": lambda: several_steps(rig, CheckpointEngineManager),
            "gather": lambda: gather(rig),
        }
        for name, turn in turns.items():
            tell(f"warming {name}")
            turn()
        return interleave(turns, PAIRS_MIN, tell)


def several_steps(rig: Rig, manager_class: Any) -> float:
    """Mean seconds by which a step was longer than its compute: the call, and whatever it waits for there or here."""
    manager: Any = rig.manager(manager=manager_class)
    manager.update_weights(next(rig.steps))  # ours waits for every replica the first time
    began = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        ray.get(rig.trainer.compute(STEP_SECONDS))
        step = next(rig.steps)
        manager.update_weights(step)
    seconds = (time.perf_counter() - began) / STEPS_PER_TURN - STEP_SECONDS
    ray.get([worker.wait_step.remote(step) for worker in workers(rig.replicas).workers], timeout=ARRIVE_SECONDS)
    check(rig, rig.replicas, step)
    manager.remove_replicas(list(rig.replicas))
    return seconds


def check(rig: Rig, replicas: Sequence[Replica], step: int) -> None:
    """A fast sync of other bytes is no result."""
    expected = rig.sums()
    for number, got in enumerate(held(replicas)):
        if got.global_steps != step or got.sums != expected:
            wrong = sorted(name for name in expected if got.sums.get(name) != expected[name])
            raise RuntimeError(f"step {step} is no result: replica {number} has {got.global_steps}; wrong: {wrong[:5]}")


def main(question: str, file: str) -> None:
    """Ask one question."""
    found = {"sync": sync, "stall": stall}[question](lambda text: print(text, flush=True))
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that outlive their work must not keep the answer waiting
