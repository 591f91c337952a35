"""`python -m bench QUESTION [--only SECTIONS] [--json FILE]`: asks one question and shows its answer (docs/bench.md).

The exit code is 0 whether bounds hold or not: a benchmark informs; what may be merged, tests decide. It is 1 when a
section broke, because then the answer lacks what was asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.questions import QUESTIONS, ask, choose

Question = StrEnum("Question", {name.upper(): name for name in QUESTIONS})  # type: ignore[misc]

_SECTIONS = "; ".join(f"{question}: {', '.join(sections)}" for question, sections in QUESTIONS.items())


def main(
    question: Annotated[Question, typer.Argument(help="what to measure")],
    only: Annotated[
        str, typer.Option(metavar="SECTIONS", help=f"measure only these, comma-separated ({_SECTIONS})")
    ] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the answer there, too")
    ] = None,
) -> None:
    """Measure against raw peers of the same run: medians of interleaved pairs, with quartiles."""
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    try:
        choose(question.value, wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    with progress() as tell:
        report = ask(question.value, wanted, tell)
    report.show(Console(width=None if sys.stdout.isatty() else 140))
    if json_file is not None:
        report.write(json_file)
    if report.failed:
        raise typer.Exit(1)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What runs now, on stderr: one line that changes on a terminal, elsewhere a line per step."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: None if ": pair " in text else console.print(text, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield status.update


if __name__ == "__main__":
    typer.run(main)
