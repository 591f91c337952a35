"""Shows chaos while it happens: a live table on a terminal, a line per case anywhere else; and the table at the end.

It only looks. What is ok, `record.py` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tensorhub.cli.chaos.cases import Case
from tensorhub.cli.chaos.record import COMPLAINTS_SHOWN, Outcome
from tensorhub.cli.demo_worker import Member, Progress
from tensorhub.cli.units import size

REFRESH_PER_SECOND = 12
BAR_COLUMNS = 24
STYLES = {"ok": "green", "FAILED": "bold red", "skipped": "yellow"}


class PlainView:
    """A line when a case begins and some when it is done; without a console, nothing."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, case: Case, /) -> None:
        if self.console is not None:
            self.console.print(f"{case.name}: {case.did}", markup=False, highlight=False, soft_wrap=True)

    def progress(self, _member: Member, _progress: Progress, /) -> None:
        return None

    def done(self, found: Outcome, /) -> None:
        if self.console is not None:
            for line in outcome_lines(found):
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """All cases with their verdicts so far, and the transfers of the one that runs."""

    def __init__(self, console: Console, cases: Sequence[Case]) -> None:
        self.cases = cases
        self.outcomes: dict[str, Outcome] = {}
        self.running = ""
        self.transfers: dict[Member, Progress] = {}
        self.live = Live(
            console=console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self.render, transient=True
        )

    def __enter__(self) -> LiveView:
        self.live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def begin(self, case: Case, /) -> None:
        self.running = case.name
        self.transfers = {}

    def progress(self, member: Member, progress: Progress, /) -> None:
        self.transfers = {**self.transfers, member: progress}  # the display may be reading the old one

    def done(self, found: Outcome, /) -> None:
        self.outcomes[found.case] = found
        self.running = ""

    def render(self) -> Group:
        cases = Table.grid(padding=(0, 2, 0, 0))
        for case in self.cases:
            cases.add_row(case.name, self._state(case), case.did if case.name == self.running else "")
        transfers = Table.grid(padding=(0, 2, 0, 0))
        for member, told in self.transfers.items():
            bar = ProgressBar(total=told.bytes_total or 1, completed=told.bytes_done, width=BAR_COLUMNS)
            transfers.add_row(f"  {member}", "<-", told.source or "-", bar, size(told.bytes_done))
        return Group(cases, transfers)

    def _state(self, case: Case) -> Text:
        if (found := self.outcomes.get(case.name)) is not None:
            return Text(found.verdict, style=STYLES[found.verdict])
        return Text("running", style="cyan") if case.name == self.running else Text("-", style="dim")


def report(outcomes: Sequence[Outcome]) -> Table:
    """The table at the end."""
    table = Table(title="chaos", title_justify="left", show_lines=True)
    for heading in ("case", "what was done, and what had to happen", "what happened", "verified", "again", "s", ""):
        table.add_column(heading, overflow="fold")
    for found in outcomes:
        happened = Text("\n".join((*found.happened, found.skipped) if found.skipped else found.happened))
        for complaint in shown_complaints(found):
            happened.append(f"\n{complaint}", style="red")
        table.add_row(
            found.case,
            Text(f"{found.did}: {found.must}"),
            happened,
            size(found.verified_bytes),
            size(found.bytes_again),
            f"{found.seconds:.1f}",
            Text(found.verdict, style=STYLES[found.verdict]),
        )
    return table


def case_list(cases: Sequence[Case]) -> Table:
    """What there is to ask for."""
    table = Table(title="cases", title_justify="left")
    for heading in ("case", "what is done", "what has to happen"):
        table.add_column(heading, overflow="fold")
    for case in cases:
        table.add_row(case.name, case.did, case.must)
    return table


def outcome_lines(found: Outcome) -> list[str]:
    """One case as plain text."""
    lines = [f"  had to: {found.must}", *(f"  {line}" for line in found.happened)]
    lines += [f"  {complaint}" for complaint in shown_complaints(found)]
    reason = f": {found.skipped}" if found.skipped else ""
    figures = f"{size(found.verified_bytes)} verified, {size(found.bytes_again)} read again, {found.seconds:.1f} s"
    return [*lines, f"  {found.verdict}{reason or f' ({figures})'}"]


def last_words(outcomes: Sequence[Outcome], seed: int) -> str:
    """The run in a line."""
    counts = {verdict: sum(found.verdict == verdict for found in outcomes) for verdict in STYLES}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{told or 'nothing ran'}; repeat with --seed {seed}"


def shown_complaints(found: Outcome) -> list[str]:
    """The first ones; the rest is counted."""
    hidden = len(found.complaints) - COMPLAINTS_SHOWN
    return [*found.complaints[:COMPLAINTS_SHOWN], *([f"... and {hidden} more (all with --json)"] if hidden > 0 else [])]
