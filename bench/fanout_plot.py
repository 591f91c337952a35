"""Draws what the question about fan-out found: T(N) beside its prediction and its peers, and the ablation by phase.

It draws from figures that were reported and measures nothing. Needs matplotlib: pip install '.[bench]' in a checkout.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.remote import Missing

DPI = 150
WIDTH, HEIGHT = 7.0, 4.2


def curve(
    path: Path,
    measured: Mapping[int, Sequence[float]],
    predicted: Mapping[int, float],
    ideal: float,
    peers: Mapping[str, float],
    peers_at: int,
) -> None:
    """T(N) with the range of its repeats; `peers` are points at N = `peers_at`."""
    figure, axes = _axes()
    counts = sorted(measured)
    middle = [sorted(measured[n])[len(measured[n]) // 2] for n in counts]
    low = [middle[at] - min(measured[n]) for at, n in enumerate(counts)]
    high = [max(measured[n]) - middle[at] for at, n in enumerate(counts)]
    axes.errorbar(counts, middle, yerr=[low, high], marker="o", capsize=3, label="TensorHub, verified")
    axes.plot(counts, [predicted[n] for n in counts], linestyle="--", label="model, fitted on N = 1")
    axes.axhline(ideal, color="grey", linewidth=0.8, label="shard / link")
    for name, seconds in peers.items():
        axes.plot([peers_at], [seconds], marker="x", linestyle="none", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set_xlabel("replicas N")
    axes.set_ylabel("seconds until the last has everything")
    axes.legend(fontsize="small")
    _save(figure, path)


def ablation(path: Path, phases: Mapping[str, Mapping[str, float]]) -> None:
    """One bar per mode, its slowest reader's phases on top of each other."""
    figure, axes = _axes()
    left = dict.fromkeys(phases, 0.0)
    for phase in dict.fromkeys(phase for mode in phases.values() for phase in mode):
        widths = [mode.get(phase, 0.0) for mode in phases.values()]
        axes.barh(list(phases), widths, left=list(left.values()), label=phase)
        left = {name: left[name] + width for name, width in zip(phases, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("seconds, slowest of all readers")
    axes.legend(fontsize="small")
    _save(figure, path)


def check_able() -> None:
    """`Missing` without matplotlib."""
    _pyplot()


def _axes() -> tuple[Any, Any]:
    return tuple(_pyplot().subplots(figsize=(WIDTH, HEIGHT), layout="constrained"))


def _pyplot() -> Any:
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise Missing(f"no matplotlib ({error}); install: pip install '.[bench]' in a checkout") from error


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=DPI)
    _pyplot().close(figure)
