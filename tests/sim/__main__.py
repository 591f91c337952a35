"""Replay and search: `python -m tests.sim SEED` prints a run; `--seeds A..B` and `--forever` look for mistakes."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterable

from tests.sim.marks import Mark
from tests.sim.run import simulate


def main() -> int:
    """The number of seeds that failed, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this seed, printing its trace")
    parser.add_argument("--seeds", help="run seeds A..B, printing those that fail")
    parser.add_argument("--forever", action="store_true", help="run fresh seeds until one fails")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _replay(arguments.seed)
    if arguments.forever:
        return _search(random.SystemRandom().randrange(1 << 32) for _ in itertools.count())
    if arguments.seeds:
        first, _, last = arguments.seeds.partition("..")
        return _sweep(range(int(first), int(last)))
    parser.print_help()
    return 2


def _replay(seed: int) -> int:
    result = simulate(seed, echo=True)
    print(f"trace {result.digest}; marks: {', '.join(sorted(mark.name for mark in result.marks))}")
    for line in result.violations:
        print(f"VIOLATION {line}")
    return 1 if result.violations else 0


def _search(seeds: Iterable[int]) -> int:
    for seed in seeds:
        print(f"seed {seed}", flush=True)
        if simulate(seed).violations:
            return _replay(seed)
    return 0


def _sweep(seeds: Iterable[int]) -> int:
    failed, met = 0, dict.fromkeys(Mark, 0)
    for seed in seeds:
        result = simulate(seed)
        for mark, count in result.marks.items():
            met[mark] += count
        failed += bool(result.violations)
        for line in result.violations:
            print(f"seed {seed}: {line}", flush=True)
    for mark, count in met.items():
        print(f"{count:6d}  {mark.name}: {mark.value}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
