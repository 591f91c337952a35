"""`python -m bench QUESTION [--json FILE]`: asks one question and shows its answer.

The exit code is 0 whether bounds hold or not: a benchmark informs; what may be merged, tests decide.
"""

from __future__ import annotations

import importlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Question(StrEnum):
    """A module of this package each."""

    PULL = "pull"
    PUBLISH = "publish"
    DIGEST = "digest"


def main(
    question: Annotated[Question, typer.Argument(help="what to measure")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the answer there, too")
    ] = None,
) -> None:
    """Measure against raw peers of the same run: medians of interleaved pairs, with quartiles."""
    report = importlib.import_module(f"bench.{question.value}").run()
    report.show(Console(width=None if sys.stdout.isatty() else 140))
    if json_file is not None:
        report.write(json_file)


if __name__ == "__main__":
    typer.run(main)
