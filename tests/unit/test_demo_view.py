"""The demo's display: who pulls from whom, bytes, GB/s and phases are on it, and nothing is printed for `--json`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tensorhub.cli import demo_view, weights
from tensorhub.cli.demo import Options, ReplicaRound, Round
from tensorhub.cli.demo_worker import Member, Progress

PULLS = (
    {"source": "trainer#0", "nbytes": 60, "engine": "local", "reason": "nearest"},
    {"source": "rollout-1#0", "nbytes": 40, "engine": "local", "reason": "the first one left"},
)
PHASES = {"plan": 0.0, "transfer": 0.25}
ROUND = Round(
    version=7,
    tensors_changed=103,
    publish_s=0.002,
    unpublish_s=0.001,
    replicas=(ReplicaRound("rollout-0", 7, 90_900_000, 0.5, 0.18, False, PULLS, PHASES, True),),
    differences=(),
)


def test_plain_lines_tell_the_round() -> None:
    """Without a terminal a round is lines of text: sources in order, bytes, rate, phases, verdict."""
    stream = io.StringIO()
    with demo_view.PlainView(Console(file=stream, width=40)) as view:
        view.stage(7, "train")
        view.progress(Member("rollout-0", 0), Progress(1, 2, "trainer#0"))
        view.round_done(ROUND)
    first, second, third = stream.getvalue().splitlines()
    assert first.startswith("version 7: train step changed 103 tensors, published in 2.0 ms")
    assert (
        "rollout-0 <- trainer#0, rollout-1#0: 90.9 MB in 0.500 s, 0.18 GB/s over local [transfer 250 ms] identical"
        in second
    )
    assert "not verified" in second
    assert third == "  graph: trainer -> rollout-0 (1 reader, depth 1, widest 1, 2 first holders served 2)"


@pytest.mark.parametrize(("number", "text"), [(1, "1 round"), (0, "0 rounds"), (3, "3 rounds")])
def test_one_is_no_plural(number: int, text: str) -> None:
    """Counts read as people say them."""
    assert demo_view.count(number, "round") == text


def test_quiet_view_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json` stdout carries one document and nothing else."""
    with demo_view.PlainView(None) as view:
        view.stage(7, "train")
        view.round_done(ROUND)
    assert capsys.readouterr() == ("", "")


def test_live_view_shows_progress_and_rounds() -> None:
    """The live table names each shard with its source and bytes; finished rounds stay below it."""
    console = Console(file=io.StringIO(), width=150, record=True)
    view = demo_view.LiveView(console, Options(weights.synthetic(2), replicas=1, shards=2))
    view.stage(7, "train")
    view.stage(7, "replicate")
    view.progress(Member("rollout-0", 1), Progress(1_500_000, 3_000_000, "trainer#1"))
    view.round_done(ROUND)
    console.print(view.render())
    shown = console.export_text()
    for part in ("round 7 of 3: replicate", "rollout-0#1", "trainer#1", "1.5 MB", "transfer 250 ms", "identical"):
        assert part in shown


@pytest.mark.parametrize(("width", "beside"), [(150, True), (80, False)])
def test_live_view_draws_who_pulls_from_whom(width: int, beside: bool) -> None:
    """A tree of replicas moves beside the bars, below them on a narrow terminal; a source of any shard counts."""
    console = Console(file=io.StringIO(), width=width, record=True)
    view = demo_view.LiveView(console, Options(weights.synthetic(2), replicas=2, shards=2))
    view.stage(7, "replicate")
    for shard in (0, 1):
        view.progress(Member("rollout-0", shard), Progress(300, 300, f"trainer#{shard}"))
        view.progress(Member("rollout-1", shard), Progress(150, 300, f"rollout-0#{shard}"))
    console.print(view.render())
    shown = console.export_text().splitlines()
    (first,) = [line for line in shown if "2 readers, depth 2, widest 1, trainer served 1" in line]
    assert ("pulls from" in first) is beside
    for part in ("└ rollout-0  complete", "└ rollout-1  █████░░░░░  50%"):
        assert any(part in line for line in shown)


def test_live_view_forgets_the_last_round_when_the_next_begins() -> None:
    """Progress of the last version is not shown as that of the next."""
    view = demo_view.LiveView(Console(file=io.StringIO()), Options(weights.synthetic(2)))
    view.progress(Member("rollout-0", 0), Progress(2, 2, "trainer#0"))
    view.stage(8, "train")
    assert view.running == {}


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (4096, "4.1 kB"), (90_900_000, "90.9 MB")])
def test_sizes_are_for_people(nbytes: int, text: str) -> None:
    """Decimal units, one digit."""
    assert demo_view.size(nbytes) == text
