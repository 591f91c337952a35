"""What `python -m bench recovery` makes of its runs: bounds against the worst, and no figure of what shows nothing."""

from __future__ import annotations

import pytest

from bench import recovery
from bench.recovery import Recovered
from bench.remote import RemoteFailed
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
