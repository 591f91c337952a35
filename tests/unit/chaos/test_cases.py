"""Which cases there are, what is drawn for them, and how the report shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tensorhub.cli.__main__ import main
from tensorhub.cli.chaos import cases, view
from tensorhub.cli.chaos.record import Outcome
from tensorhub.cli.demo_worker import Member, Progress
from tensorhub.errors import BadRequest

OK = Outcome("zombie", "did", "must", True, 3.0, 134_000_000, 0, ("LeaseLost",), ("it was refused",))
FAILED = Outcome("reader_killed", "did", "must", False, 3.0, complaints=("one", "two", "three", "four", "five"))
SKIPPED = Outcome("control_partition", "did", "must", True, 0.0, skipped="a Unix socket")


def test_cases_are_chosen_by_name_in_their_order() -> None:
    """None named means all; an unknown one is refused, and those that exist are told."""
    assert [case.name for case in cases.choose(["zombie", "source_stopped"])] == ["source_stopped", "zombie"]
    assert [case.name for case in cases.choose([])] == list(cases.CASES)
    with pytest.raises(BadRequest, match=r"zombi.*source_killed_midchunk"):
        cases.choose(["zombi"])


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    """Weights and moment of trouble come from seed and case alone; another seed or case has others."""
    zombie, other = cases.CASES["zombie"], cases.CASES["source_stopped"]
    first = cases.place_of(zombie, "frames", tmp_path, 16, 7)
    assert cases.place_of(zombie, "frames", tmp_path, 16, 7) == first
    assert cases.place_of(zombie, "frames", tmp_path, 16, 8).seed != first.seed
    assert cases.place_of(other, "frames", tmp_path, 16, 7).part != first.part
    assert cases.PARTS[0] <= first.part <= cases.PARTS[1]


@pytest.mark.parametrize("mib", [0, cases.MIB_MIN - 1, cases.MIB_MAX + 1])
def test_sizes_that_show_nothing_are_refused(mib: int, tmp_path: Path) -> None:
    """Weights that fit into sockets' buffers have no middle."""
    with pytest.raises(BadRequest, match="--mib"):
        cases.place_of(cases.CASES["zombie"], "frames", tmp_path, mib, 1)


def test_a_way_that_cannot_be_cut_is_skipped(tmp_path: Path) -> None:
    """A case that cannot run here starts nothing, and says why."""
    case = cases.CASES["control_partition"]
    found = cases.run(case, cases.place_of(case, "local", tmp_path, 16, 1), lambda *_: None)
    assert "Unix socket" in found.skipped
    assert list(tmp_path.iterdir()) == []


def test_list_names_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    """`tensorhub chaos --list` runs nothing; with --json it is one document."""
    assert main(["chaos", "--list", "--json"]) == 0
    assert [case["case"] for case in json.loads(capsys.readouterr().out)["cases"]] == list(cases.CASES)
    assert main(["chaos", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cases.CASES)


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--server", "ray://x"], ["--mib", "1"]])
def test_malformed_requests_have_their_exit_code(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A case, server or size that is none is told in one line before anything starts."""
    assert main(["chaos", *arguments]) == 2
    assert capsys.readouterr().err.count("BadRequest") == 1


def test_the_report_shows_every_verdict() -> None:
    """What failed says why, in a few lines; what was left out, why; what is hidden is counted."""
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(view.report([OK, FAILED, SKIPPED]))
    shown = captured.get()
    for part in ("zombie", "134.0 MB", "it was refused", "FAILED", "three", "and 2 more", "a Unix socket"):
        assert part in shown
    assert "four" not in shown
    assert view.last_words([OK, FAILED, SKIPPED], 7) == "1 ok, 1 FAILED, 1 skipped; repeat with --seed 7"
    assert view.outcome_lines(SKIPPED)[-1] == "  skipped: a Unix socket"
    assert view.outcome_lines(OK)[-1] == "  ok (134.0 MB verified, 0 B read again, 3.0 s)"


def test_the_live_display_shows_what_runs() -> None:
    """The running case with its transfers, and the verdicts of those that are done."""
    chosen = cases.choose(["reader_killed", "zombie"])
    live = view.LiveView(Console(), chosen)
    live.begin(chosen[0])
    live.done(FAILED)
    live.begin(chosen[1])
    live.progress(Member("rollout", 0), Progress(50, 100, "trainer#0"))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(live.render())
    shown = captured.get()
    for part in ("FAILED", "running", "rollout#0", "trainer#0", "50 B"):
        assert part in shown
