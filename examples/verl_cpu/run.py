"""Trains with an unmodified verl on CPU, weights moved by TensorHub, and shows the reward of every step.

    python examples/verl_cpu/run.py [--steps 40] [--frozen] [--json FILE] [--manager tensorhub] ...

It decides when a run has failed: verl did, made no progress, or what came of it is not as it has to be. It ends all
processes that it started, whatever happens, and removes the run's folder unless it is to be kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import children
import outcome
import recipe
import task
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

#: Nine processes that import torch and verl, on however few cores.
START_SECONDS = 480
#: One step of a toy, on a machine that is busy with other things.
STEP_SECONDS = 120
#: verl ends by itself after its last step.
END_SECONDS = 60
LOOK_SECONDS = 0.25
TAIL_LINES = 40


class Failed(Exception):
    """The run did not come to its end."""


def main() -> int:
    """0 when all steps were made, every load of a rollout was exact, and the reward did what it should."""
    options = _parser().parse_args()
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with _folder(options.keep) as folder:
        run = recipe.Run(
            steps=options.steps,
            back_end=options.back_end,
            back_end_module=options.back_end_module,
            manager=options.manager,
            is_frozen=options.frozen,
            folder=folder,
        )
        try:
            _train(run, console)
        except Failed as error:
            console.print(f"[red]failed[/red]: {error}", highlight=False)
            _print_tail(folder / "verl.log", console)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted; all processes have ended")
            return 128 + signal.SIGINT
        came = outcome.read(run)
    if options.json:
        options.json.write_text(json.dumps(came.as_json(run), indent=1) + "\n", encoding="utf-8")
    return _report(run, came, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=outcome.STEPS_TO_LEARN, help="training steps (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rewards, times and phases of each step")
    parser.add_argument("--frozen", action="store_true", help="negative control: rollouts keep the first version")
    parser.add_argument(
        "--back-end", default="tensorhub", metavar="NAME", help="verl's checkpoint engine (%(default)s)"
    )
    parser.add_argument(
        "--back-end-module",
        default="tensorhub.integrations.verl",
        metavar="MODULE",
        help="which module registers it (%(default)s); empty: verl itself",
    )
    parser.add_argument(
        "--manager",
        type=recipe.Manager,
        choices=list(recipe.Manager),
        default=recipe.Manager.STOCK,
        metavar="|".join(recipe.Manager),
        help="verl's own manager, or TensorHub's, for which a copy of verl is patched (stock)",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep model, log, metrics and records there")
    return parser


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder of the run. Its path is short, because Ray puts sockets into it."""
    folder = Path(tempfile.mkdtemp(prefix="th-verl-"))
    try:
        (folder / "record").mkdir()
        yield folder
    finally:
        if keep:
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("ray", "patched"))
        shutil.rmtree(folder, ignore_errors=True)


def _train(run: recipe.Run, console: Console) -> None:
    """Runs verl to its end, or raises `Failed`. Nothing that it started is left in either case."""
    children.adopt_orphans()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *recipe.overrides(run, task.make(run.folder))]
    with (run.folder / "verl.log").open("w", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                command,
                cwd=run.folder,
                env=recipe.environment(run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            with _shown(run, console) as show:
                _follow(process, run, show)
        finally:
            children.end_all()


def _follow(process: subprocess.Popen[bytes], run: recipe.Run, show: Show) -> None:
    """Shows each step as it is logged, until the process has ended well."""
    seen = 0
    deadline = time.monotonic() + START_SECONDS
    while (code := process.poll()) is None:
        steps = outcome.read_steps(run.metrics)
        if len(steps) > seen:
            deadline = time.monotonic() + (STEP_SECONDS if len(steps) < run.steps else END_SECONDS)
        for step in steps[seen:]:
            seen += 1
            show.step(seen, step)
        if time.monotonic() > deadline:
            raise Failed(f"no progress after step {seen} of {run.steps}")
        time.sleep(LOOK_SECONDS)
    for step in outcome.read_steps(run.metrics)[seen:]:
        seen += 1
        show.step(seen, step)
    if code != 0:
        raise Failed(f"verl ended with exit code {code} after step {seen} of {run.steps}")


class Show:
    """Progress as a bar on a terminal, as one line per step elsewhere."""

    def __init__(self, run: recipe.Run, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("starting", total=run.steps, figures="")

    def step(self, number: int, metrics: dict[str, float]) -> None:
        """One more step has been made."""
        reward, sync = metrics.get(outcome.REWARD, float("nan")), metrics.get(outcome.SYNC, float("nan"))
        figures = f"reward {reward:.2f} {_bar(reward)} sync {sync:.2f} s"
        self._bar.update(self._task, completed=number, description="training", figures=figures)
        if not self._console.is_terminal:
            print(f"step {number:3}  {figures}", flush=True)


def _bar(share: float, cells: int = 20) -> str:
    """A share of 1 in so many cells."""
    full = round(share * cells) if share == share else 0  # NaN: no reward was logged
    return "█" * full + "·" * (cells - full)


@contextmanager
def _shown(run: recipe.Run, console: Console) -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[figures]}"), console=console, disable=not console.is_terminal
    ) as bar:
        yield Show(run, console, bar)


def _report(run: recipe.Run, came: outcome.Outcome, console: Console) -> int:
    complaints = came.complaints(run)
    rewards = came.rewards
    if came.gain is not None:
        first, last = rewards[: outcome.FIRST], rewards[-outcome.LAST :]
        console.print(
            f"reward {sum(first) / len(first):.2f} in the first {len(first)} steps, "
            f"{sum(last) / len(last):.2f} in the last {len(last)}",
            highlight=False,
        )
    exact = "exact" if came.exactness.is_exact else "not exact"
    console.print(
        f"{came.exactness.loads} loads of {came.exactness.replicas} rollouts compared with what was published: {exact}"
        + (", as it has to be: they were frozen" if run.is_frozen else ""),
        highlight=False,
    )
    for complaint in complaints:
        console.print(f"[red]failed[/red]: {complaint}", highlight=False)
    return 1 if complaints else 0


def _print_tail(log: Path, console: Console) -> None:
    if log.exists():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
        console.print("\n".join(lines), markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
