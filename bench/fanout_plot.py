"""Draws what the question about fan-out found: T(N) beside its prediction and its peers, and the ablation by phase.

It draws from figures that were reported and measures nothing. Needs matplotlib: pip install '.[bench]' in a checkout.
Graphs of who pulled from whom are drawn by the command line's own code, `tensorhub.cli.graph_svg`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.measure import Sample
from bench.remote import Missing
from tensorhub.cli import graph_svg
from tensorhub.cli.graph import Graph
from tensorhub.errors import BadRequest

DPI = 150
WIDTH, HEIGHT = 7.0, 4.2
#: Drawn to see whether anything can be.
EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'


def curve(
    path: Path,
    measured: Mapping[int, Sample],
    predicted: Mapping[int, float],
    ideal: float,
    peers: Mapping[str, float],
    peers_at: int,
) -> None:
    """T(N) with its quartiles; `peers` are points at N = `peers_at`."""
    figure, axes = _axes()
    counts = sorted(measured)
    middle = [measured[n].median for n in counts]
    low = [measured[n].median - measured[n].low for n in counts]
    high = [measured[n].high - measured[n].median for n in counts]
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
    """One bar per mode, its slowest reader's phases beside each other, and how long it is."""
    figure, axes = _axes()
    left = dict.fromkeys(phases, 0.0)
    for phase in dict.fromkeys(phase for mode in phases.values() for phase in mode):
        widths = [mode.get(phase, 0.0) for mode in phases.values()]
        axes.barh(list(phases), widths, left=list(left.values()), label=phase)
        left = {name: left[name] + width for name, width in zip(phases, widths, strict=True)}
    for at, seconds in enumerate(left.values()):
        axes.text(seconds, at, f" {seconds:.2f} s", va="center")
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.set_xlabel("seconds, slowest of all readers")
    axes.legend(fontsize="small")
    _save(figure, path)


def graph(path: Path, found: Graph) -> None:
    """Who pulled what from whom, as SVG or PNG by the file's ending."""
    document = graph_svg.svg(found)
    path.write_bytes(graph_svg.png(document) if path.suffix == ".png" else document.encode())


def check_able(name: str) -> None:
    """`Missing` where the picture of this name cannot be drawn."""
    if not name.startswith("graph."):
        _pyplot()
    elif name.endswith(".png"):
        try:
            graph_svg.png(EMPTY)
        except BadRequest as error:
            raise Missing(str(error)) from error


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
