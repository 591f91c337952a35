"""The arithmetic of the question about fan-out: which figures it gives, who is in the middle, where the time went."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import fanout, fanout_plot
from bench.cluster import Host
from bench.fanout_ablation import slowest_phases, table
from bench.fanout_fleet import Round, grouped, single
from bench.fanout_hubs import Said
from bench.fanout_relay import chain_of
from bench.fanout_trouble import Place, chunks_read_again, middle, place, straggler_figures
from bench.remote import Missing, RemoteFailed
from bench.report import Report
from tensorhub.cli.graph import Graph, Holder, Origin, build
from tensorhub.client.results import PHASES
from tensorhub.pipeline.manifest import chunk_size

DOCS = Path(__file__).resolve().parents[2] / "docs" / "bench.md"
CHUNK = chunk_size(fanout.SHARD_BYTES)


def graph(above: Mapping[str, str], state: str = "complete") -> Graph:
    """Of readers in this state, each with its source; "t" published."""
    readers = [
        Holder(name, 0, state, 1.0, 8, origins=(Origin(source, 8, "tcp", live=True),)) for name, source in above.items()
    ]
    return build("m", "1", [Holder("t", 0, "published", 1.0, 8), *readers])


def chain(*names: str, state: str = "complete") -> Graph:
    """Each reads from the one before it, the first from the trainer."""
    return graph(dict(zip(names, ["t", *names], strict=False)), state)


def said(nbytes: int = 1, bytes_read: int = 1, **phases: float) -> Said:
    """What a reader told."""
    return Said(0.0, 1.0, phases, (), nbytes, bytes_read, 0.1)


def rounds(seconds: Sequence[float], names: Sequence[str] = ("a",)) -> list[Round]:
    """Rounds in which all readers took as long."""
    phases = {"transfer": 2.0, "plan": 0.003, "register": 0.002, "verify": 0.001}
    return [Round(dict.fromkeys(names, each), dict.fromkeys(names, said(**phases)), chain(*names)) for each in seconds]


# ------------------------------------------------------------ what is reported


def test_the_curve_gives_its_ratios_and_a_prediction_for_every_n() -> None:
    """Each round of 16 and 32 is held against the round of 1 beside it, and the model against each N but 1."""
    done = {n: rounds([2.1 + n / 1000] * 3, [f"r{at}" for at in range(n)]) for n in fanout.COUNTS}
    report = Report("fanout")
    fanout.curve_figures(report, done)
    found = {ratio.name: ratio for ratio in report.ratios}
    assert set(found) == {
        "fanout_t16_over_t1",
        "fanout_t32_over_t1",
        "fanout_ideal_over_t16",
        "fanout_model_error",
    }
    assert found["fanout_t16_over_t1"].value == pytest.approx(2.116 / 2.101)
    assert found["fanout_ideal_over_t16"].value == pytest.approx(2.0 / 2.116)
    assert report.results["fanout_t1_predicted"].median == pytest.approx(2.101)
    assert report.results["fanout_t32_depth"].median == 32
    assert {f"fanout_t{n}_reader_cpu" for n in (16, 32)} < set(report.results)


def test_a_reader_alone_tells_what_a_hop_costs() -> None:
    """Set-up is planning and registering, as the phases of N = 1 have them; nothing else is taken from N > 1."""
    predicted = fanout.predictions(rounds([2.1]), [1, 2])
    rate = fanout.SHARD_BYTES / 2.0
    lag = (CHUNK + fanout.PACKET_BYTES) / rate + CHUNK / fanout.DIGEST_BYTES_PER_S + 0.001
    assert predicted[2] - predicted[1] == pytest.approx(max(0.005, lag))


def test_peers_are_held_against_ours() -> None:
    """What ran once is over each of ours; what is not installed gives no figure."""
    report = Report("fanout")
    ours = {"tensorhub_16": [2.0, 2.0, 4.0], "chunk_chain_16": [1.9, 2.0, 2.1]}
    slow = {"single_source": 30.0, "gloo_broadcast": None, "all_trainers": 8.0, "store_forward": 32.0}
    fanout.peer_figures(report, ours, {**slow, "bucket_chain": 4.0})
    found = {ratio.name: ratio for ratio in report.ratios}
    assert set(found) == {
        f"fanout_{peer}_over_tensorhub_16"
        for peer in ("chunk_chain", "single_source", "all_trainers", "store_forward", "bucket_chain")
    }
    assert found["fanout_single_source_over_tensorhub_16"].value == 15.0
    assert found["fanout_single_source_over_tensorhub_16"].bound == "at least 10"
    assert found["fanout_store_forward_over_tensorhub_16"].bound == "at least 1.5"
    assert found["fanout_chunk_chain_over_tensorhub_16"].bound == ""


def test_the_straggler_is_told_with_its_place() -> None:
    """The others with it over without, its own time over what its link allows, where it stood before and after."""
    names = ["a", "b", "c"]
    even, slowed = rounds([2.0], names), rounds([2.2], names)
    slowed[0] = replace(slowed[0], seconds={"a": 2.1, "b": 8.8, "c": 2.2}, graph=chain("a", "c", "b"))
    report = Report("fanout")
    straggler_figures(report, even, slowed, ["b"])
    found = {ratio.name: ratio.value for ratio in report.ratios}
    assert found == {"fanout_straggler_ratio": pytest.approx(1.1), "fanout_straggler_own": pytest.approx(1.1)}
    stood = {name: sample.median for name, sample in report.results.items() if "straggler_" in name}
    assert stood["fanout_straggler_depth_before"] == 2
    assert stood["fanout_straggler_below_before"] == 1
    assert stood["fanout_straggler_depth_after"] == 3
    assert stood["fanout_straggler_below_after"] == 0


def test_bytes_read_in_vain_are_told_in_chunks() -> None:
    """The most of any survivor; who was disturbed does not count; where nothing counts, there is no figure."""
    told = {"a": said(100, 100), "b": said(100, 100 + 3 * CHUNK // 2), "c": said(0, 9 * CHUNK)}
    found = Round(dict.fromkeys(told, 1.0), told, chain(*told), ("c",))
    assert chunks_read_again(found) == 1.5
    assert chunks_read_again(replace(found, said={**told, "a": said(100, 0)})) is None


def test_what_was_disturbed_is_in_no_figure() -> None:
    """The slowest is the slowest survivor, also when a stopped reader came back and finished."""
    found = Round({"a": 1.0, "b": 9.0}, {"a": said(), "b": said()}, chain("a", "b"), ("b",))
    assert found.slowest == 1.0


def test_every_bounded_ratio_is_documented() -> None:
    """docs/bench.md has a row for each ratio of fan-out that has a bound, under the name the report uses."""
    text = DOCS.read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in Path(fanout.__file__).parent.glob("fanout*.py"))
    names = set(re.findall(r'(?:ratio|figure)\(\s*"(\w+)"', source))
    names |= {f"fanout_{peer}_over_tensorhub_16" for peer in fanout.PEERS_AT_LEAST}
    assert len(names) > 10
    assert {name for name in names if f"`{name}`" not in text} == set()


# ------------------------------------------------------------ graphs and phases


def test_the_middle_of_a_chain_has_both_ends_far() -> None:
    """Of five in a row, the third, if it is in the state that is asked for; of readers that nobody reads from, none."""
    assert middle(chain("a", "b", "c", "d", "e", state="filling"), "filling") == "c"
    for nobody in (graph({"a": "t", "b": "t"}), chain("a", "b", "c", state="filling")):
        with pytest.raises(RemoteFailed, match="nobody relays"):
            middle(nobody, "complete")


def test_a_place_counts_hops_above_and_replicas_below() -> None:
    """Below are all whose bytes came by it, over any number of hops."""
    forked = graph({"a": "t", "b": "a", "c": "b", "d": "b", "e": "d"})
    assert place(forked, "b") == Place(2, 3)
    assert place(forked, "e") == Place(4, 0)


def test_a_chain_is_known_by_its_sources() -> None:
    """In the order of the hops, whoever asked first; a fork and a reader of two sources are none."""
    assert chain_of({"a": ["c"], "b": ["a"], "c": ["t"]}, "t") == ["c", "a", "b"]
    assert chain_of({"a": ["t"], "b": ["t"]}, "t") is None
    assert chain_of({"a": ["t"], "b": ["a", "t"]}, "t") is None
    assert chain_of({"a": ["b"], "b": ["a"]}, "t") is None


def test_phases_of_the_slowest_add_up() -> None:
    """What no phase claims is waiting: also for the commit, never for the time before the version was published."""
    told = {"a": said(wait=9.0, transfer=1.0), "b": said(wait=9.0, transfer=2.5, plan=0.1)}
    found = Round({"a": 1.0, "b": 3.0}, told, chain("a", "b"))
    assert found.slowest == 3.0
    assert found.slowest_without(["b"]) == 1.0
    phases = slowest_phases(found)
    assert phases == {"wait": pytest.approx(0.4), "transfer": 2.5, "plan": 0.1}


def test_the_ablation_is_one_table_of_all_phases() -> None:
    """Every mode has every phase of a replicate, in its order, after the whole."""
    rows = table({"broadcast": {"wait": 1.0, "transfer": 2.0}, "ours": dict.fromkeys(PHASES, 0.5)})
    assert list(rows["broadcast"]) == list(rows["ours"]) == ["all", *PHASES]
    assert rows["broadcast"]["all"] == 3.0
    assert rows["broadcast"]["plan"] == 0.0


def test_hosts_become_replicas() -> None:
    """One shard per replica, or several, in the order of the hosts."""
    hosts = [Host(f"h{at}") for at in range(4)]
    assert [group.hosts for group in single(hosts)] == [(host,) for host in hosts]
    assert [group.hosts for group in grouped(hosts, 2)] == [(hosts[0], hosts[1]), (hosts[2], hosts[3])]


# ------------------------------------------------------------ the document and its pictures


def test_a_report_is_drawn_beside_its_document(tmp_path: Path) -> None:
    """Each drawing gets a file of its own next to the JSON, named after both."""
    report = Report("fanout")
    report.tables["ablation"] = {"ours": {"all": 1.0}}
    report.drawings["curve.png"] = lambda path: path.write_text("a picture", encoding="utf-8") and None
    report.write(tmp_path / "f.json")
    assert (tmp_path / "f-curve.png").read_text(encoding="utf-8") == "a picture"
    document = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    assert (document["question"], document["tables"]) == ("fanout", {"ablation": {"ours": {"all": 1.0}}})


def test_the_graph_of_a_round_is_drawn_as_the_command_line_does(tmp_path: Path) -> None:
    """The same picture as of `tensorhub graph`: every replica is in it."""
    fanout_plot.graph(tmp_path / "graph.svg", chain("reader-1", "reader-2"))
    picture = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    assert "<svg" in picture
    assert all(name in picture for name in ("reader-1", "reader-2"))


def test_without_matplotlib_nothing_is_drawn_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are an extra: their absence names what to install. A graph as SVG needs nothing."""
    for module in ("matplotlib", "resvg_py"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    fanout_plot.check_able("graph.svg")
    for name, extra in (("curve.png", r"\.\[bench\]"), ("graph.png", r"\.\[graph\]")):
        with pytest.raises(Missing, match=extra):
            fanout_plot.check_able(name)
