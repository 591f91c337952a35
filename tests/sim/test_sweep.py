"""Many worlds: a fixed range of seeds that must reach every mark, seeds that once failed, and a few nobody has seen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.sim.marks import Mark
from tests.sim.run import Result, simulate

#: Chosen so that all marks are met; the last for the rarest, a commit whose answer was lost; about 35 s of one core.
SWEEP = (*range(37), 46)
FRESH = 3
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def regressions() -> list[int]:
    """The seeds of `regressions.txt`."""
    lines = REGRESSIONS.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def story(result: Result) -> str:
    """What to print of a seed that failed."""
    what = "\n".join([f"seed {result.seed}; replay with: python -m tests.sim {result.seed}", *result.plan])
    return f"{what}\n" + "\n".join(result.violations)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fixed_sweep_holds_every_guarantee_and_meets_every_situation() -> None:
    """No seed violates a guarantee, and no interesting situation is left out: a sweep that never saw a reroute proves
    nothing about reroutes. (source_killed_midchunk, source_stopped, reader_killed, sibling_dies, transport_lies,
    sick_source_quarantined, mutate_during_read, reader_fetched_before_unpublish, no_advance_on_failure,
    one_version_per_replica, relay_does_not_propagate_corruption, restart_same_name_same_addr)"""
    met: set[Mark] = set()
    for seed in SWEEP:
        result = simulate(seed)
        assert not result.violations, story(result)
        met.update(result.marks)
    assert met == set(Mark), f"never met: {sorted(mark.name for mark in set(Mark) - met)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", regressions())
def test_a_seed_that_once_failed(seed: int) -> None:
    """What was repaired stays repaired."""
    result = simulate(seed)
    assert not result.violations, story(result)


@pytest.mark.slow
def test_fresh_seeds() -> None:
    """Every run looks at worlds that nobody has seen. The seeds are printed when one fails."""
    for _ in range(FRESH):
        result = simulate(random.SystemRandom().randrange(1 << 32))
        assert not result.violations, story(result)
