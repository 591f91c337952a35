"""Every operation, every way to fail, every place: `python -m tests.leaks [OPERATION [WAY [AT]]]`.

Prints each place after which something is wrong, and how many places there were.
"""

from __future__ import annotations

import sys
import time

from tests.leaks.operations import OPERATIONS, Operation
from tests.leaks.run import WAYS, places, run


def main(only: str = "", how: str = "", at: str = "") -> int:
    """1 when something is wrong."""
    total = bad = 0
    for operation in OPERATIONS:
        for way in WAYS:
            if only in ("", operation.name) and how in ("", way):
                count, wrong = _visit(operation, way, int(at or 0))
                total, bad = total + count, bad + wrong
    print(f"{total} failures, {bad} of them with consequences")
    return 1 if bad else 0


def _visit(operation: Operation, way: str, at: int) -> tuple[int, int]:
    """(places visited, those after which something is wrong)."""
    began, wrong = time.perf_counter(), 0
    sites = places(operation, way)
    chosen = [at] if at else range(1, len(sites) + 1)
    for k in chosen:
        verdict = run(operation, way, k)
        wrong += bool(verdict.found)
        for line in verdict.found:
            print(f"{operation.name} / {way} / {k} at {verdict.struck} -> {verdict.outcome!r}: {line}")
    seconds = time.perf_counter() - began
    distinct = len(set(sites))
    print(f"{operation.name} / {way}: {len(chosen)} places, {distinct} of a kind, {seconds:.1f} s", flush=True)
    return len(chosen), wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
