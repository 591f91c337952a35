"""The arithmetic of the question about fan-out: the model, who is in the middle, where the slowest reader's time is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import fanout_plot, model
from bench.cluster import Host
from bench.fanout_ablation import slowest_phases
from bench.fanout_fleet import Round, grouped, single
from bench.fanout_hubs import Held, Said
from bench.fanout_trouble import middle_source
from bench.remote import Missing, RemoteFailed
from bench.report import Report

CONSTANTS = model.Constants(chunk_bytes=100, batch_s=0.0, poll_s=0.02, readers_per_source=1)
FITTED = model.Fitted(bytes_per_s=1000.0, around_s=0.5, look_s=0.01)


def test_one_reader_is_predicted_as_it_was_fitted() -> None:
    """At N = 1 the model says what was measured, whatever the split between transfer and the rest."""
    fitted = model.Fitted.of(10_000, [12.0, 11.0, 13.0], [10.0, 9.0, 11.0], 0.01)
    assert fitted.bytes_per_s == 1000.0
    assert model.predict(CONSTANTS, fitted, 10_000, 1) == pytest.approx(12.0)


def test_a_chain_costs_one_hop_per_reader() -> None:
    """With one reader per source, each further reader adds a chunk's time, half a poll and a look."""
    steps = [model.predict(CONSTANTS, FITTED, 10_000, n) for n in (1, 2, 3, 17)]
    hop = 100 / 1000 + 0.02 / 2 + 0.01
    assert steps[1] - steps[0] == pytest.approx(hop)
    assert steps[3] - steps[0] == pytest.approx(16 * hop)


def test_readers_of_one_source_share_its_link() -> None:
    """Four readers of one source take four times as long as one; more form a second level for one hop more."""
    wide = replace(CONSTANTS, readers_per_source=4)
    assert model.predict(wide, FITTED, 10_000, 4) == pytest.approx(0.5 + 40.0)
    assert model.predict(wide, FITTED, 10_000, 20) == pytest.approx(0.5 + 40.0 + model.hop_s(wide, FITTED))


@pytest.mark.parametrize(("readers", "depth"), [(1, 1), (4, 1), (5, 2), (20, 2), (21, 3), (84, 3), (85, 4)])
def test_a_crowd_fills_level_by_level(readers: int, depth: int) -> None:
    """At four readers per source, 4 + 16 + 64 readers are three levels deep."""
    assert model.Shape.of(readers, 4) == model.Shape(depth, min(readers, 4))


def test_a_batch_that_is_shorter_than_a_chunk_takes_a_chunk() -> None:
    """Watermarks count whole chunks: no hop is faster than one."""
    slow = model.hop_s(replace(CONSTANTS, batch_s=0.3), FITTED)
    assert slow - model.hop_s(CONSTANTS, FITTED) == pytest.approx(0.2)


def test_an_error_is_relative_to_what_was_measured() -> None:
    """Too high and too low count alike."""
    assert model.error(1.1, 1.0) == pytest.approx(0.1)
    assert model.error(0.9, 1.0) == pytest.approx(0.1)


def held(replica: str, upstream: str, state: str = "filling") -> Held:
    """A row of the server's view."""
    return Held(replica, 0, state, f"{upstream}#0" if upstream else "", (), 0.5)


def test_the_middle_of_a_chain_has_both_ends_far() -> None:
    """Of five relays in a row, the third; of readers that nobody reads from, none."""
    names = ["t", "a", "b", "c", "d", "e"]
    rows = [held("t", "", "published"), *(held(*pair) for pair in zip(names[1:], names, strict=False))]
    assert middle_source(rows) == "c"
    with pytest.raises(RemoteFailed, match="nobody relays"):
        middle_source([held("t", "", "published"), held("a", "t"), held("b", "t")])


def said(**phases: float) -> Said:
    """What a reader told."""
    return Said(0.0, 1.0, phases, (), 1, 0.1)


def test_phases_of_the_slowest_add_up() -> None:
    """What no phase claims is waiting: also for the commit, never for the time before the version was published."""
    found = Round(
        {"a": 1.0, "b": 3.0}, {"a": said(wait=9.0, transfer=1.0), "b": said(wait=9.0, transfer=2.5, plan=0.1)}
    )
    assert found.slowest == 3.0
    assert found.slowest_without(["b"]) == 1.0
    phases = slowest_phases(found)
    assert phases == {"wait": pytest.approx(0.4), "transfer": 2.5, "plan": 0.1}


def test_hosts_become_replicas() -> None:
    """One shard per replica, or several, in the order of the hosts."""
    hosts = [Host(f"h{at}") for at in range(4)]
    assert [group.hosts for group in single(hosts)] == [(host,) for host in hosts]
    assert [group.hosts for group in grouped(hosts, 2)] == [(hosts[0], hosts[1]), (hosts[2], hosts[3])]


def test_a_report_is_drawn_beside_its_document(tmp_path: Path) -> None:
    """Each drawing gets a file of its own next to the JSON, named after both."""
    report = Report("fanout")
    report.drawings["curve"] = lambda path: path.write_text("a picture", encoding="utf-8") and None
    report.write(tmp_path / "f.json")
    assert (tmp_path / "f-curve.png").read_text(encoding="utf-8") == "a picture"
    assert json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))["question"] == "fanout"


def test_without_matplotlib_nothing_is_drawn_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are an extra: their absence names what to install."""
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(Missing, match=r"\.\[bench\]"):
        fanout_plot.check_able()
