"""Many seeds over several processes: what came of each, as it ends, and what came of all.

It decides how seeds are spread; what a seed is, `run.py` says. A seed whose run raises or hangs has failed, by name.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from tensorhub.cli.chaos.child import die_with
from tests.sim.faults import SERVER_DIES
from tests.sim.marks import OF_RESTARTS, Mark
from tests.sim.run import Result, simulate

#: Seeds handed out beyond those that run: a process never waits for the next.
AHEAD = 2
#: Seeds take fractions of a second, the slowest few seconds: none ends within this, one hangs.
HANG_S = 120.0


@dataclass
class Tally:
    """What came of the seeds so far."""

    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    met: dict[Mark, int] = field(default_factory=lambda: dict.fromkeys(Mark, 0))
    failed: list[Result] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.events += result.events
        self.virtual_s += result.virtual_s
        for mark, count in result.marks.items():
            self.met[mark] += count
        if result.violations:
            self.failed.append(result)

    @property
    def wall_s(self) -> float:
        return max(time.monotonic() - self.began_s, 1e-9)

    @property
    def never_met(self) -> list[str]:
        """Situations that the faults that are drawn can bring about, and did not."""
        out_of_reach = frozenset() if SERVER_DIES else OF_RESTARTS
        return [mark.name for mark, count in self.met.items() if not count and mark not in out_of_reach]

    def line(self) -> str:
        """Where it stands, in one line."""
        return (
            f"{self.seeds} seeds, {self.seeds / self.wall_s:.1f}/s; {self.events / self.wall_s:,.0f} events/s; "
            f"{sum(len(result.violations) for result in self.failed)} violations in {len(self.failed)} seeds"
        )

    def report(self) -> str:
        """All of it, marks included, for people."""
        marks = [f"{count:8d}  {mark.name}: {mark.value}" for mark, count in self.met.items()]
        ratio = self.virtual_s / self.wall_s
        return "\n".join(
            [
                *marks,
                f"{sum(map(bool, self.met.values()))} of {len(Mark)} marks met",
                f"{self.virtual_s:,.0f} virtual seconds in {self.wall_s:,.1f} s, {ratio:,.0f} times as fast as real",
                self.line(),
            ]
        )

    def write(self, path: Path) -> None:
        """The same for programs."""
        told = {
            "seeds": self.seeds,
            "wall_s": self.wall_s,
            "seeds_per_s": self.seeds / self.wall_s,
            "virtual_s": self.virtual_s,
            "events": self.events,
            "events_per_s": self.events / self.wall_s,
            "marks": {mark.name: count for mark, count in self.met.items()},
            "failed": [{"seed": result.seed, "violations": result.violations} for result in self.failed],
        }
        path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def story(result: Result) -> str:
    """What to print of a seed that failed."""
    what = "\n".join([f"seed {result.seed}; replay with: python -m tests.sim {result.seed}", *result.plan])
    return f"{what}\n" + "\n".join(result.violations)


def run_seeds(seeds: Iterable[int], jobs: int) -> Generator[Result, None, None]:
    """What came of each seed, in the order in which they end, without their traces. Seeds may be endless.

    Its processes die with the thread that asks for the first of them, however that ends.
    """
    coming, spawn, others = iter(seeds), multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=die_with, initargs=(os.getpid(),))
    running: dict[Future[Result], int] = {}
    try:
        while True:
            for seed in islice(coming, jobs + AHEAD - len(running)):
                running[pool.submit(_one, seed)] = seed
            if not running:
                return
            done, _ = wait(running, HANG_S, FIRST_COMPLETED)
            if not done:
                for process in set(multiprocessing.active_children()) - others:
                    process.kill()  # or the pool would wait for it for ever
                raise TimeoutError(f"no seed ended within {HANG_S:g} s; under way or next: {list(running.values())}")
            for future in done:
                seed, error = running.pop(future), future.exception()
                yield future.result() if error is None else _broken(seed, error)
    finally:
        pool.shutdown(cancel_futures=True)


def _one(seed: int) -> Result:
    """In a process of the pool. What a world leaves in cycles is collected when it is over: it is small, and a
    collector that looks while it runs takes a tenth of its time."""
    gc.disable()
    try:
        return replace(simulate(seed), lines=[])
    finally:
        gc.collect()


def _broken(seed: int, error: BaseException) -> Result:
    return Result(seed, [], [f"broken: the run raised {error!r}"], {}, [], "", 0, 0.0)
