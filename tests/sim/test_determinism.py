"""A seed is a run: the same trace, whatever the interpreter's hash seed and however often."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.run import simulate

ROOT = Path(__file__).parents[2]
SEED = 3
#: Virtual hours pass in seconds; a process that takes longer hangs.
PATIENCE_S = 100.0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_trace() -> None:
    """Twice in one process: nothing is carried over from the run before."""
    first, second = simulate(SEED), simulate(SEED)
    assert first.lines == second.lines
    assert first.digest == second.digest
    assert first.digest != simulate(SEED + 1).digest


@pytest.mark.slow
def test_the_trace_does_not_depend_on_hash_order() -> None:
    """Three interpreters with three values of PYTHONHASHSEED: no decision follows the order of a set."""
    code = f"from tests.sim.run import simulate; print(simulate({SEED}).digest)"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": value},
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        ).stdout
        for value in ("0", "1", "4711")
    ]
    assert found[0].strip()
    assert len(set(found)) == 1, found
