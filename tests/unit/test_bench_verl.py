"""What `python -m bench verl` says is right on this side: lines that count, gains, processes that fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.remote import Missing, RemoteFailed
from bench.report import Report
from bench.verl import lines, sections

GLUE = '''"""Says what it is."""

import os  # counted for nobody


class TensorHubCheckpointEngine:
    """Of two lines,
    neither of which is code."""

    def send(self):
        # a remark
        return shared(
            1,
        )


class TensorHubCheckpointManager:
    @property
    def update(self):
        return alone() + shared(2)


def alone():
    return "a string over \\
two lines"


def shared(number):
    return number
'''


def test_lines_go_to_whom_uses_them() -> None:
    """Class, method, three lines of a call and a shared function: the engine's; the manager has its class, its
    decorator and what it alone uses. Docstrings, comments, blanks and imports count for nobody."""
    assert lines.parts(GLUE) == (5 + 2, 4 + 3)


def test_a_patch_counts_what_it_changes() -> None:
    """Lines added and removed; not the files' names, not what stands around."""
    assert lines.changed_lines("--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n same\n-old\n+new\n+more\n") == 3


def test_a_gain_is_of_the_last_steps_over_the_first() -> None:
    """The mean of the last ten less that of the first five; what lies between counts for nothing."""
    rewards = [0.25] * 5 + [9.0] * 7 + [0.75] * 10
    assert sections.gain(rewards) == 0.5


def test_too_few_steps_have_no_gain() -> None:
    """Where first and last steps would overlap, a gain would be of nothing."""
    with pytest.raises(RemoteFailed, match="14 steps"):
        sections.gain([1.0] * 14)


def test_without_verl_it_says_what_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python that is not there, or has no verl, is `Missing`, with the script that makes one."""
    monkeypatch.setenv(sections.PYTHON, str(tmp_path / "python"))
    with pytest.raises(Missing, match="scripts/setup-verl"):
        sections.verl_python()


@pytest.mark.slow
def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is told as it is said, and its last lines are in the error."""
    monkeypatch.setattr(sections, "verl_python", lambda: sys.executable)
    told: list[str] = []
    report = Report("verl", tell=told.append)
    with pytest.raises(RemoteFailed, match=r"(?s)exit code 3.*not today"):
        sections.run(["-c", "print('not today'); raise SystemExit(3)"], report)
    assert told == ["not today"]
