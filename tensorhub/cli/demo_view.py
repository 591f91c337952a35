"""Shows a demo while it runs: a live table on a terminal, plain lines anywhere else, nothing but the end for `--json`.

It only looks. What is identical, and what the process returns, others decide.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tensorhub.cli.demo import MODEL, TRAINER, Options, Outcome, ReplicaRound, Round
from tensorhub.cli.demo_worker import Member, Progress
from tensorhub.cli.graph import Graph, Holder, Origin, build
from tensorhub.cli.graph_text import Drawing, paths
from tensorhub.cli.units import size

#: Differences that are printed one by one; the rest is counted, and complete with `--json`.
DIFFERENCES_SHOWN = 20
#: Rounds that stay on the live display.
ROUNDS_SHOWN = 6
REFRESH_PER_SECOND = 12
#: On a narrower terminal the tree of who pulls from whom stands below the bars, not beside them.
BESIDE_COLUMNS_MIN = 110


class PlainView:
    """One block of lines per round; without a console, nothing."""

    def __init__(self, console: Console | None) -> None:
        self.console = console

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def stage(self, _version: int, _name: str, /) -> None:
        return None

    def progress(self, _member: Member, _progress: Progress, /) -> None:
        return None

    def round_done(self, done: Round, /) -> None:
        if self.console is None:
            return
        for line in round_lines(done):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """A table per shard that moves while bytes do, above the last rounds."""

    def __init__(self, console: Console, options: Options) -> None:
        self.console = console
        self.options = options
        self.version = 0
        self.stage_name = "start"
        self.running: dict[Member, Progress] = {}
        self.rounds: list[Round] = []
        self.live = Live(console=console, refresh_per_second=REFRESH_PER_SECOND, get_renderable=self.render)

    def __enter__(self) -> LiveView:
        self.live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def stage(self, version: int, name: str, /) -> None:
        self.version, self.stage_name = version, name
        if name == "train":
            self.running.clear()

    def progress(self, member: Member, progress: Progress, /) -> None:
        self.running[member] = progress

    def round_done(self, done: Round, /) -> None:
        self.rounds.append(done)

    def render(self) -> Group:
        title = Text(f"{self.options.model.title}, {size(self.options.model.nbytes)}", style="bold")
        title.append(f"   round {self.version} of {self.options.rounds}: {self.stage_name}", style="cyan")
        bars, tree = self.shards_table(), Drawing(live_graph(self.options, self.version, self.running), brief=True)
        if self.console.width < BESIDE_COLUMNS_MIN:
            return Group(title, bars, tree, self.rounds_table())
        beside = Table.grid(padding=(0, 4, 0, 0))
        beside.add_row(bars, tree)
        return Group(title, beside, self.rounds_table())

    def shards_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("rollout", "pulls from", "", "bytes"):
            table.add_column(heading)
        for member in self.options.members(*self.options.rollouts):
            now = self.running.get(member, Progress(0, 0, ""))
            bar = ProgressBar(total=now.bytes_total or 1, completed=now.bytes_done, width=30)
            table.add_row(str(member), now.source or "-", bar, size(now.bytes_done) if now.bytes_total else "")
        return table

    def rounds_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("version", "rollout", "sources", "bytes", "GB/s", "phases", ""):
            table.add_column(heading)
        for done in self.rounds[-ROUNDS_SHOWN:]:
            for row in done.replicas:
                verdict = Text("identical", style="green") if row.identical else Text("DIFFERENT", style="bold red")
                table.add_row(
                    str(done.version),
                    row.replica,
                    sources(row),
                    size(row.nbytes),
                    f"{row.gb_per_s:.2f}",
                    phases(row),
                    verdict,
                )
        return table


def live_graph(options: Options, version: int, running: dict[Member, Progress]) -> Graph:
    """Who pulls from whom right now, as the readers tell it."""
    holders = [Holder(TRAINER, shard, "published", 1.0, 0) for shard in range(options.shards)]
    for member in options.members(*options.rollouts):
        now = running.get(member)
        if now is not None:
            done = now.bytes_done / now.bytes_total if now.bytes_total else 1.0
            state = "filling" if done < 1 else "complete"
            origins = [Origin(source.rpartition("#")[0], 0) for source in now.source.split(", ") if source]
            holders.append(
                Holder(member.replica, member.shard, state, done, max(now.bytes_total, 1), origins=tuple(origins))
            )
    return build(MODEL, str(version), holders)


def round_graph(done: Round) -> Graph:
    """Who pulled how much from whom in a round."""
    holders = [Holder(TRAINER, 0, "published", 1.0, 0)]
    for row in done.replicas:
        origins: dict[int, list[Origin]] = {}
        for pull in row.sources:
            source, _, shard = str(pull["source"]).rpartition("#")
            origins.setdefault(int(shard), []).append(Origin(source, pull["nbytes"], pull["engine"]))
        for number, pulled in origins.items():
            holders.append(Holder(row.replica, number, "complete", 1.0, row.nbytes, origins=tuple(pulled)))
    return build(MODEL, str(done.version), holders)


def round_lines(done: Round) -> list[str]:
    """One round as plain text."""
    lines = [
        f"version {done.version}: train step changed {count(done.tensors_changed, 'tensor')}, published in "
        f"{done.publish_s * 1e3:.1f} ms, unpublished in {done.unpublish_s * 1e3:.1f} ms"
    ]
    for row in done.replicas:
        verdict = "identical" if row.identical else "DIFFERENT"
        unverified = "" if row.verified else " (not verified by the hub)"
        lines.append(
            f"  {row.replica} <- {sources(row)}: {size(row.nbytes)} in {row.seconds:.3f} s, {row.gb_per_s:.2f} GB/s"
            f"{over(row)} [{phases(row)}] {verdict}{unverified}"
        )
    graph = round_graph(done)
    return [*lines, f"  graph: {paths(graph) or 'nobody pulled'} ({graph.summary})"]


def outcome_lines(outcome: Outcome) -> list[str]:
    """The last words."""
    lines = [str(difference) for difference in outcome.differences[:DIFFERENCES_SHOWN]]
    hidden = len(outcome.differences) - len(lines)
    if hidden:
        lines.append(f"... and {hidden} more (all with --json)")
    options = outcome.options
    what = (
        f"{count(len(options.model.specs), 'tensor')} in {count(options.replicas, 'rollout')} of "
        f"{count(options.shards, 'shard')}, "
        f"{count(len(outcome.rounds), 'round')} by digest, {size(outcome.bytes_compared)} byte for byte"
    )
    verdict = "identical" if outcome.identical else f"DIFFERENT ({len(outcome.differences)} differences)"
    return [*lines, f"{verdict}: {what}"]


def sources(row: ReplicaRound) -> str:
    """ "trainer#0, rollout-1#1" in the order they were used."""
    return ", ".join(dict.fromkeys(str(pull["source"]) for pull in row.sources)) or "nobody"


def over(row: ReplicaRound) -> str:
    """ " over tcp, local": the engines that carried the bytes; why each was chosen is in the document of `--json`."""
    engines = ", ".join(dict.fromkeys(str(pull["engine"]) for pull in row.sources))
    return f" over {engines}" if engines else ""


def count(number: int, noun: str) -> str:
    """ "1 round", "2 rounds"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def phases(row: ReplicaRound) -> str:
    """The phases that took any time, in milliseconds."""
    return " ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in row.phases.items() if seconds >= 5e-4)
