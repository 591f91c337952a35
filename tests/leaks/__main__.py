"""Every operation, every way to fail, every place: `python -m tests.leaks [OPERATION [WAY [AT]]]`.

Prints each place after which something is wrong, and how many places there were.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.leaks.operations import OPERATIONS, Operation
from tests.leaks.run import WAYS, places, run


def main(arguments: list[str]) -> int:
    """1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.leaks", description=__doc__)
    names = [operation.name for operation in OPERATIONS]
    parser.add_argument("operation", nargs="?", metavar="OPERATION", choices=names, help=f"one of {names}")
    parser.add_argument("way", nargs="?", metavar="WAY", choices=list(WAYS), help=f"one of {list(WAYS)}")
    parser.add_argument("at", nargs="?", metavar="AT", type=int, help="the number of a place, from 1")
    given = parser.parse_args(arguments)
    total = bad = 0
    for operation in OPERATIONS:
        for way in WAYS:
            if given.operation in (None, operation.name) and given.way in (None, way):
                count, wrong = _visit(operation, way, given.at)
                total, bad = total + count, bad + wrong
    if not total:
        parser.error(f"there is no such place to fail at: {' '.join(map(repr, arguments))}")
    print(f"{total} failures, {bad} of them with consequences")
    return 1 if bad else 0


def _visit(operation: Operation, way: str, at: int | None) -> tuple[int, int]:
    """(places visited, those after which something is wrong)."""
    began, wrong = time.perf_counter(), 0
    sites = places(operation, way)
    chosen = [k for k in range(1, len(sites) + 1) if at in (None, k)]
    for k in chosen:
        verdict = run(operation, way, k)
        wrong += bool(verdict.found)
        for line in verdict.found:
            print(f"{operation.name} / {way} / {k} at {verdict.struck} -> {verdict.outcome!r}: {line}")
    seconds = time.perf_counter() - began
    visited = f"{len(chosen)} of {len(sites)} places ({len(set(sites))} different)"
    print(f"{operation.name} / {way}: {visited}, {seconds:.1f} s", flush=True)
    return len(chosen), wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
