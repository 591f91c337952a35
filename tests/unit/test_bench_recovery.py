"""What `python -m bench recovery` makes of its runs: bounds against the worst, and no figure of what shows nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable

import pytest

from bench import recovery
from bench.recovery import Recovered
from bench.remote import Missing, RemoteFailed
from bench.report import Report


def run(seconds: float, again: int = 0, away_s: float = 0.0) -> Recovered:
    return Recovered(seconds, again, again / 100, away_s)


def ratios(report: Report) -> dict[str, tuple[float, bool | None]]:
    return {found.name: (found.value, found.holds) for found in report.ratios}


def test_the_worst_trial_is_held_against_the_bound() -> None:
    """One survivor of many that read too much again makes it fall short."""
    report = Report("recovery")
    recovery.killed_figures(report, [0.5, 0.5, 2.1])
    assert ratios(report) == {"recovery_extra_bytes_chunks": (2.1, False)}
    assert report.results["recovery_extra_bytes"].median == 0.5


def test_a_stop_is_noticed_half_a_second_after_the_setting_at_most() -> None:
    """The bound follows the setting; what is beyond the setting is told."""
    report = Report("recovery")
    recovery.stopped_figures(report, [4.25, 4.5, 4.5], 4.0)
    assert ratios(report) == {
        "recovery_stop_detect_s": (4.5, True),
        "recovery_stop_detect_excess_s": (0.5, None),
    }


def test_a_restart_is_held_against_its_pair() -> None:
    """Times by pairs; bytes read again by the worst; of the restart alone not a byte."""
    report = Report("recovery")
    restarted = [run(6.6, 50, 1.0), run(6.0, 190, 2.0)]
    recovery.restart_figures(report, restarted, [run(6.0), run(6.0)], [run(6.0), run(6.0, 1)])
    assert ratios(report) == {
        "recovery_server_restart_ratio": (pytest.approx(1.05), True),
        "recovery_server_restart_bytes_again": (1.0, False),
        "recovery_server_restart_chunks_again": (1.9, True),
    }


def test_a_restart_that_took_too_long_shows_nothing() -> None:
    """A transfer less than three times as long as the server was away is no result."""
    with pytest.raises(RemoteFailed, match="too busy"):
        recovery.restart_figures(Report("recovery"), [run(6.0, away_s=2.1)], [run(6.0)], [run(6.0)])


def simulation_by(monkeypatch: pytest.MonkeyPatch, simulate: Callable[[int], object]) -> Report:
    """The section over a simulation of our own."""
    monkeypatch.setitem(sys.modules, "tests.sim.run", types.SimpleNamespace(simulate=simulate))
    report = Report("recovery")
    recovery.simulation(report)
    return report


def test_seeds_are_simulated_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seed runs once; one with violations is not clean."""
    ran: list[int] = []

    def simulate(seed: int) -> object:
        ran.append(seed)
        return types.SimpleNamespace(events=1000, violations=["torn"] if seed == 3 else [])

    found = simulation_by(monkeypatch, simulate).results
    assert ran == list(range(recovery.SEEDS))
    assert (found["sim_seeds"].median, found["sim_seeds_clean"].median) == (recovery.SEEDS, recovery.SEEDS - 1)
    assert found["sim_events_per_second"].median > 0


def test_a_simulation_that_counts_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure is made up where events are not counted."""
    with pytest.raises(Missing, match="does not count"):
        simulation_by(monkeypatch, lambda _: types.SimpleNamespace(violations=[]))
