"""Many worlds: a fixed range of seeds that must reach every mark, seeds that once failed, and a few nobody has seen."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sim.__main__ import main
from tests.sim.marks import Mark
from tests.sim.run import Result, simulate
from tests.sim.sweep import Tally, run_seeds, story
from tests.support.servers import until

#: Enough that all marks are met many times over, the rarest a few: about a minute of one core.
SWEEP = range(200)
JOBS = 2
FRESH = 10
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def regressions() -> list[int]:
    """The seeds of `regressions.txt`."""
    lines = REGRESSIONS.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fixed_sweep_holds_every_guarantee_and_meets_every_situation() -> None:
    """No seed violates a guarantee, and no interesting situation is left out: a sweep that never saw a reroute proves
    nothing about reroutes. (source_killed_midchunk, source_stopped, reader_killed, sibling_dies, transport_lies,
    sick_source_quarantined, mutate_during_read, reader_fetched_before_unpublish, no_advance_on_failure,
    one_version_per_replica, relay_does_not_propagate_corruption, restart_same_name_same_addr)"""
    tally = Tally()
    for result in run_seeds(SWEEP, JOBS):
        tally.add(result)
    assert tally.seeds == len(SWEEP)
    assert not tally.failed, "\n\n".join(map(story, tally.failed))
    assert not tally.never_met


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


@pytest.mark.slow
def test_a_search_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m tests.sim --seeds A..B` prints, and writes, how many seeds ran, for how long, and what they met; what
    a seed does is the same in every process."""
    told = tmp_path / "told.json"
    assert main(["--seeds", "3..6", "--jobs", "2", "--json", str(told)]) == 0
    written, here = json.loads(told.read_text(encoding="utf-8")), [simulate(seed) for seed in range(3, 6)]
    assert (written["seeds"], written["failed"]) == (3, [])
    assert written["events"] == sum(result.events for result in here)
    assert written["marks"]["ALREADY_HELD"] == sum(result.marks.get(Mark.ALREADY_HELD, 0) for result in here)
    assert "3 seeds" in capsys.readouterr().out


def _broken(seed: int) -> Result:
    return Result(seed, [], ["a violation"], {}, [], "", 1, 1.0)


@pytest.mark.slow
def test_a_search_stops_at_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--forever` ends with a seed that failed, and says how to replay it."""
    monkeypatch.setattr("tests.sim.__main__.run_seeds", lambda seeds, jobs: (_broken(seed) for seed in seeds))
    assert main(["--forever"]) == 1
    out = capsys.readouterr().out
    assert "1 violations in 1 seeds" in out
    assert "replay with: python -m tests.sim" in out


def _never(seed: int) -> Result:
    time.sleep(3600)
    return _broken(seed)


@pytest.mark.slow
def test_a_seed_that_hangs_is_named_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that does not end ends the search by its number; what ran it is not waited for."""
    monkeypatch.setattr("tests.sim.sweep.HANG_S", 0.1)
    monkeypatch.setattr("tests.sim.sweep._one", _never)
    with pytest.raises(TimeoutError, match=r"no seed ended within .*\[7\]"):
        list(run_seeds([7], jobs=1))


@pytest.mark.slow
def test_a_search_that_is_killed_leaves_nobody_behind() -> None:
    """Its processes would go on with seeds that nobody asks for, and occupy every core."""
    command = [sys.executable, "-m", "tests.sim", "--forever", "--jobs", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as search:
        assert search.stdout is not None
        assert "seeds" in search.stdout.readline()
        children = Path(f"/proc/{search.pid}/task/{search.pid}/children").read_text(encoding="ascii").split()
        search.kill()
    assert len(children) >= 2
    until(lambda: not any(_lives(int(child)) for child in children), "the end of its processes")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
