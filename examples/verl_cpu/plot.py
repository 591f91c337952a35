"""Draws what runs have written by `--json`: the reward of each step, and where the time of each sync goes.

python examples/verl_cpu/plot.py real.json [frozen.json] --out verl-cpu.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt  # the back end is chosen before this
from outcome import ROLLOUT_PHASES, TRAINER_PHASES

DOTS_PER_INCH = 110
KEYS = [f"trainer/{phase}" for phase in TRAINER_PHASES] + [f"rollout/{phase}" for phase in ROLLOUT_PHASES]
COLOURS = dict(zip(KEYS, mpl.colormaps["tab20"].colors, strict=False))


def main() -> int:
    """One picture of two parts."""
    parser = argparse.ArgumentParser(prog="plot.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="FILE", help="what run.py --json wrote; phases: the first"
    )
    parser.add_argument("--out", type=Path, default=Path("verl-cpu.png"), metavar="FILE", help="picture (%(default)s)")
    options = parser.parse_args()
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in options.runs]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), layout="constrained", sharex=True)
    for run in runs:
        _rewards(above, run)
    _syncs(below, runs[0])
    figure.savefig(options.out, dpi=DOTS_PER_INCH)
    print(options.out)
    return 0


def _rewards(axes: Any, run: dict[str, Any]) -> None:
    label = "frozen: rollouts keep version 0" if run["frozen"] else f"weights moved by {run['back_end']}"
    steps = range(1, run["steps"] + 1)
    axes.plot(steps, run["rewards"], label=label, linestyle="--" if run["frozen"] else "-", marker=".")
    axes.set(ylabel="mean reward of the step", ylim=(0, 1), title="GRPO by an unmodified verl 0.9.1 on CPU")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _syncs(axes: Any, run: dict[str, Any]) -> None:
    """Two bars per step, trainer and rollouts, which work at the same time; of each phase, the slowest process's."""
    width = 0.4
    for phases, side, offset in ((TRAINER_PHASES, "trainer", -width / 2), (ROLLOUT_PHASES, "rollout", width / 2)):
        base = [0.0] * run["steps"]
        for phase in phases:
            key = f"{side}/{phase}"
            seconds = [step.get(key, 0.0) for step in run["phases"]]
            if any(seconds):
                places = [step + offset for step in range(1, run["steps"] + 1)]
                axes.bar(places, seconds, bottom=base, label=key, color=COLOURS[key], width=width)
                base = [below + more for below, more in zip(base, seconds, strict=True)]
    axes.plot(
        range(1, run["steps"] + 1), run["sync_s"], color="black", linewidth=1, label="update_weights, as verl sees it"
    )
    axes.set(xlabel="step", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", ncols=3, fontsize="small")


if __name__ == "__main__":
    sys.exit(main())
