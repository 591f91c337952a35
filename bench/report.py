"""Shows what a question found: a table for people, one JSON document for programs. It measures nothing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.measure import Ratio, Sample


@dataclass(slots=True)
class Report:
    """One question's answer: the samples measured, by name and unit, the ratios between them, and what is missing."""

    question: str
    results: dict[str, Sample] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    #: {what was not measured: why, and what to install}.
    skipped: dict[str, str] = field(default_factory=dict)
    #: {section that broke: how}; what it had measured before is in the results.
    failed: dict[str, str] = field(default_factory=dict)
    #: {"curve.png": how to draw it into a file}, beside the document.
    drawings: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    #: {title: {row: {column: figure}}}, for what is read in one look.
    tables: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    #: Hears what runs next, for whoever waits.
    tell: Callable[[str], None] = lambda _: None

    def add(self, name: str, unit: str, found: Sample) -> None:
        self.results[name] = found
        self.units[name] = unit

    def as_json(self) -> dict[str, Any]:
        """`results` holds `skipped` and `failed` beside the figures; they and `tables` are only there if not empty."""
        missing = {"skipped": self.skipped, "failed": self.failed}
        return {
            "question": self.question,
            "machine": machine(),
            "results": {name: asdict(found) | {"unit": self.units[name]} for name, found in self.results.items()}
            | {name: reasons for name, reasons in missing.items() if reasons},
            "ratios": {found.name: asdict(found) for found in self.ratios},
        } | ({"tables": self.tables} if self.tables else {})

    def write(self, path: Path) -> None:
        """The document, and beside it a picture per drawing: `FILE-curve.png`."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n", encoding="utf-8")
        for name, draw in self.drawings.items():
            draw(path.with_name(f"{path.stem}-{name}"))

    def show(self, console: Console) -> None:
        measured = Table(title=f"{self.question}: measured", title_justify="left")
        for heading in ("what", "median", "quartiles", "unit", "n"):
            measured.add_column(heading)
        for name, found in self.results.items():
            spread = f"{found.low:.4g} to {found.high:.4g}"
            measured.add_row(name, f"{found.median:.4g}", spread, self.units[name], str(found.count))
        for name, why in self.skipped.items():
            measured.add_row(name, escape(f"skipped: {why}"))
        for name, how in self.failed.items():
            last = how.strip().splitlines()[-1]  # of a traceback; the document has all of it
            measured.add_row(name, f"[red]{escape(f'failed: {last}')}[/]")
        ratios = Table(title=f"{self.question}: ratios, medians of pairs", title_justify="left")
        for heading in ("ratio", "median", "quartiles", "n", "bound", ""):
            ratios.add_column(heading)
        for answer in self.ratios:
            verdict = {True: "[green]holds[/]", False: "[red]falls short[/]", None: ""}[answer.holds]
            spread = f"{answer.low:.3f} to {answer.high:.3f}"
            ratios.add_row(answer.name, f"{answer.value:.3f}", spread, str(answer.count), answer.bound, verdict)
        console.print(measured, ratios, *(_table(self.question, title, rows) for title, rows in self.tables.items()))


def _table(question: str, title: str, rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Columns in the order in which rows name them first; what a row does not name stays empty."""
    columns = list(dict.fromkeys(column for figures in rows.values() for column in figures))
    shown = Table("", *columns, title=f"{question}: {title}", title_justify="left")
    for row, figures in rows.items():
        shown.add_row(row, *(f"{figures[column]:.3f}" if column in figures else "" for column in columns))
    return shown


def machine() -> dict[str, Any]:
    """What the figures were taken on, as far as they depend on it."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
    }
