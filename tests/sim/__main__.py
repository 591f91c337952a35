"""Replay and search: `python -m tests.sim SEED` prints a run; `--seeds A..B` and `--forever` look for mistakes."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from tests.sim.run import simulate
from tests.sim.sweep import Tally, run_seeds, story

#: Between two live lines where they replace each other, and where each stays.
LINE_S, LOG_LINE_S = 0.5, 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing was violated, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, help="replay this seed, printing its trace")
    parser.add_argument("--seeds", type=_range, metavar="A..B", help="run seeds A to B, B not included")
    parser.add_argument("--forever", action="store_true", help="run fresh seeds until one fails")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that run seeds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what came of it there, too")
    given = parser.parse_args(arguments)
    if given.seed is not None:
        return _replay(given.seed)
    if given.forever:
        seeds: Iterable[int] = (random.SystemRandom().randrange(1 << 32) for _ in itertools.count())
    elif given.seeds is not None:
        seeds = given.seeds
    else:
        parser.print_help()
        return 2
    return _search(seeds, given.jobs, given.json, stop_early=given.forever)


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A..B with A below B (one seed alone: without --seeds)")
    return range(int(first), int(last))


def _replay(seed: int) -> int:
    result = simulate(seed, echo=True)
    print(f"trace {result.digest}; marks: {', '.join(sorted(mark.name for mark in result.marks))}")
    print(f"{result.events} events in {result.virtual_s:.1f} virtual seconds")
    for line in result.violations:
        print(f"VIOLATION {line}")
    return 1 if result.violations else 0


def _search(seeds: Iterable[int], jobs: int, json: Path | None, *, stop_early: bool) -> int:
    tally, live, told_s = Tally(), sys.stdout.isatty(), 0.0
    end, gap_s = ("\r", LINE_S) if live else ("\n", LOG_LINE_S)
    with closing(run_seeds(seeds, jobs)) as results:
        for result in results:
            tally.add(result)
            if result.violations:
                print(f"\n{story(result)}\n", flush=True)
                if stop_early:
                    break
            if time.monotonic() - told_s > gap_s:
                told_s = time.monotonic()
                print(tally.line(), end=end, flush=True)
    print(f"\n{tally.report()}")
    if json is not None:
        tally.write(json)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
