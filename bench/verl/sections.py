"""Questions about verl: what a weight sync costs in it, how long its trainer stands still, and whether it still learns.

verl lives in an environment of its own (`scripts/setup-verl`), so that each section is a process of that environment;
this side runs without verl, starts them, and judges what they measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.measure import figure, ratio, sample
from bench.remote import Missing, RemoteFailed
from bench.report import Report
from bench.verl.environment import ROOT, environment

PYTHON = "TENSORHUB_VERL_PYTHON"
EXAMPLE = ROOT / "examples" / "verl_cpu" / "run.py"
#: A section is given up after this.
SECTION_SECONDS = 1800.0
#: Of what a process said, so much is shown when it fails.
LAST_LINES = 30
#: Over which steps the reward is averaged, at the end and at the beginning.
LAST_STEPS = 10
FIRST_STEPS = 5
SYNC_OVER_BASELINE_MAX = 0.6
STALL_OVER_STOCK_MAX = 0.4
REWARD_GAIN_MIN = 0.25
FROZEN_GAIN_MAX = 0.1


def sync(report: Report) -> None:
    """`verl_sync_over_baseline`: the worse of two and four replicas."""
    seconds = asked("sync", report)
    for name, values in seconds.items():
        report.add(f"verl_sync_{name}", "s", sample(values))
    counts = sorted({name.rpartition("_")[2] for name in seconds})
    found = [
        ratio(
            f"verl_sync_over_baseline_{count}",
            seconds[f"tensorhub_{count}"],
            seconds[f"tcp_baseline_{count}"],
            at_most=SYNC_OVER_BASELINE_MAX,
        )
        for count in counts
    ]
    report.ratios += [*found, replace(max(found, key=lambda one: one.value), name="verl_sync_over_baseline")]
    report.ratios += [
        ratio(f"verl_gather_over_baseline_{count}", seconds[f"gather_{count}"], seconds[f"tcp_baseline_{count}"])
        for count in counts
    ]


def stall(report: Report) -> None:
    """`verl_trainer_stall_over_stock`: per step, of the same length otherwise."""
    seconds = asked("stall", report)
    for name, values in seconds.items():
        report.add(f"verl_trainer_stall_{name}", "s", sample(values))
    found = ratio("verl_trainer_stall_over_stock", seconds["ours"], seconds["stock"], at_most=STALL_OVER_STOCK_MAX)
    report.ratios += [found, ratio("verl_gather_over_stock", seconds["gather"], seconds["stock"])]


def reward(report: Report) -> None:
    """`verl_reward_gain` of the example, and `verl_frozen_gain` of it with rollouts that keep their first weights."""
    if not EXAMPLE.exists():
        raise Missing(f"{EXAMPLE.relative_to(ROOT)} is not there: the rewards are those of the example")
    learned = example(report, "learning")
    frozen = example(report, "frozen", "--frozen")
    report.add("verl_example_sync", "s", sample([float(seconds) for seconds in learned["sync_s"]]))
    report.ratios += [
        figure("verl_reward_gain", sample([gain(learned["rewards"])]), at_least=REWARD_GAIN_MIN),
        figure("verl_frozen_gain", sample([gain(frozen["rewards"])]), at_most=FROZEN_GAIN_MAX),
    ]


def gain(rewards: list[float]) -> float:
    """By how much the mean reward of the last steps is above that of the first."""
    if len(rewards) < FIRST_STEPS + LAST_STEPS:
        raise RemoteFailed(f"the example has rewards of {len(rewards)} steps, too few to compare first and last")
    return sum(rewards[-LAST_STEPS:]) / LAST_STEPS - sum(rewards[:FIRST_STEPS]) / FIRST_STEPS


def example(report: Report, name: str, *options: str) -> dict[str, Any]:
    """What a run of the example has written."""
    report.tell(f"the example, {name}: minutes")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        run([str(EXAMPLE), "--json", str(file), *options], report)
        return dict(json.loads(file.read_text(encoding="utf-8")))


def asked(question: str, report: Report) -> dict[str, list[float]]:
    """Seconds, by name, that `bench.verl.measure` has found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        run(["-m", "bench.verl.measure", question, str(file)], report)
        return dict(json.loads(file.read_text(encoding="utf-8")))


def run(arguments: list[str], report: Report) -> None:
    """A process of verl's environment, to its end; what it says is told. `RemoteFailed` with its last lines."""
    said: deque[str] = deque(maxlen=LAST_LINES)
    process = subprocess.Popen(
        [verl_python(), *arguments],
        cwd=ROOT,
        env=os.environ | environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what it has started can be ended with it
    )
    guard = threading.Timer(SECTION_SECONDS, end, (process,))
    guard.start()
    try:
        assert process.stdout is not None  # it is a pipe
        with process.stdout:
            for line in process.stdout:
                said.append(line.rstrip())
                report.tell(line.rstrip())
        code = process.wait()
    finally:
        guard.cancel()
        end(process)
    if code != 0:
        raise RemoteFailed(f"{' '.join(arguments)} ended with exit code {code}:\n" + "\n".join(said))


def end(process: subprocess.Popen[str]) -> None:
    """The process, and all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verl_python() -> str:
    """The Python that has verl. `Missing` where it is not."""
    found = os.environ.get(PYTHON) or str(ROOT / ".venv-verl" / "bin" / "python")
    looks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('verl') is None)"
    try:
        there = subprocess.run([found, "-c", looks], capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        there = False
    if not there:
        raise Missing(f"{found} has no verl: scripts/setup-verl makes that environment, {PYTHON} names another")
    return found
