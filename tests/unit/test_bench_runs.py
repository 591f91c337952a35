"""How benchmarks run: sections, what is missing or broken, processes of peers, and that nothing unmoved is a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench import __main__ as command
from bench import pull_engines, questions, timed_server
from bench.measure import interleave
from bench.peers import mooncake, pair
from bench.process import cpu_seconds
from bench.pulls import Puller
from bench.questions import QUESTIONS, Section, ask, choose
from bench.remote import Missing, Remote, RemoteFailed, State, stands_still
from bench.report import Report
from bench.server import percentile


def test_whoever_waits_hears_what_runs() -> None:
    """Every run of a pair is told before it starts."""
    told: list[str] = []
    interleave({"a": lambda: 1.0, "b": lambda: 1.0}, 2, told.append)
    assert told == ["pair 1 of 2: a", "pair 1 of 2: b", "pair 2 of 2: b", "pair 2 of 2: a"]


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(section, id=f"{question}-{name}")
        for question, made in QUESTIONS.items()
        for name, section in made.items()
    ],
)
def test_sections_name_functions_that_exist(section: Section) -> None:
    """No section of any question leads nowhere; none needs an optional library to be named."""
    assert callable(getattr(__import__(section.module, fromlist=["_"]), section.function))


def test_sections_are_chosen_by_name() -> None:
    """Chosen sections run in the question's order; none chosen means all; an unknown one is named."""
    assert list(choose("pull", ["tcp", "local"])) == ["local", "tcp"]
    assert choose("pull", []) == QUESTIONS["pull"]
    with pytest.raises(ValueError, match="pull has no section udp; it has local, tiny"):
        choose("pull", ["tcp", "udp"])


def measure_one(report: Report) -> None:
    report.skipped["a peer"] = "pip install peer"


def lacks(report: Report) -> None:
    raise Missing("no module; install: pip install module")


def breaks(report: Report) -> None:
    raise RemoteFailed("reader: a traceback\nValueError: seven")


def test_sections_go_on_without_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section that lacks its library is skipped, one that breaks has failed, by name; the others are measured."""
    here = __name__
    made = {name: Section(here, name, "") for name in ("lacks", "breaks", "measure_one")}
    monkeypatch.setattr(questions, "QUESTIONS", {"pull": made})
    told: list[str] = []
    report = ask("pull", tell=told.append)
    assert report.skipped == {"lacks": "no module; install: pip install module", "a peer": "pip install peer"}
    assert list(report.failed) == ["breaks"]
    assert told[0] == "pull 1/3 lacks: starting"
    document = report.as_json()["results"]
    assert document["skipped"] == report.skipped
    assert document["failed"] == report.failed


def test_table_names_what_is_missing() -> None:
    """The table has a line for each thing skipped or failed; of a traceback it shows what was raised."""
    report = Report(
        "pull", skipped={"nixl": "install: pip install 'x[y]'"}, failed={"ray": "Traceback\nValueError: seven"}
    )
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=140, file=nowhere)
        report.show(console)
    shown = console.export_text()
    assert "skipped: install: pip install 'x[y]'" in shown
    assert "failed: ValueError: seven" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_command_refuses_unknown_sections() -> None:
    """An unknown section is told before anything is measured; help lists those there are."""
    app = command.typer.Typer()
    app.command()(command.main)
    refused = CliRunner().invoke(app, ["pull", "--only", "udp"])
    assert refused.exit_code == 2
    assert "no section udp" in refused.output
    told = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"})
    assert "local, tiny, versions, mooncake, tcp, gil, nixl, gloo, ray" in told.output


def test_missing_library_says_what_to_install() -> None:
    """A peer's module that is not there is `Missing`, with the command that brings it."""
    with pytest.raises(Missing, match=r"no no_such_module .*; install: pip install such"):
        pair.load("no_such_module", "pip install such")


def load_nothing(_: State) -> None:
    pair.load("no_such_module", "pip install such")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_missing_crosses_processes_and_others_do_not() -> None:
    """What a process lacks arrives as `Missing`; what it breaks at as `RemoteFailed` with its traceback."""
    with Remote("worker") as worker:
        with pytest.raises(Missing, match="pip install such"):
            worker.call(load_nothing)
        with pytest.raises(RemoteFailed, match="KeyError: 'arrays'"):
            worker.call(pair.change)
        worker.call(pair.allocate, [8], 1)  # it goes on after both


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_paused_process_stands_still_until_it_is_resumed(method: Literal["spawn", "forkserver"]) -> None:
    """`pause` returns once the process has stopped, also where a fork server is its parent; what it is asked meanwhile
    it does afterwards."""
    with Remote("worker", method) as worker:
        worker.call(pair.allocate, [8], 1)
        assert not stands_still(worker.pid)
        worker.pause()
        assert stands_still(worker.pid)
        worker.start(pair.fills)
        worker.resume()
        assert worker.result() == [1]
    assert stands_still(worker.pid)


def test_an_array_that_is_half_there_is_full_of_nothing() -> None:
    """A peer's bytes are compared as a whole: one that differs is enough."""
    state: State = {}
    pair.allocate(state, [8, 8], 3)
    state["arrays"][1][5] = 4
    assert pair.fills(state) == [3, None]


def copy_nothing(_: State) -> None:
    """A peer that claims to have moved something."""


def copy_bytes(state: State, values: list[int]) -> None:
    for array, value in zip(state["arrays"], values[::2], strict=True):
        array.fill(value)


@pytest.mark.slow
def test_peer_that_moved_nothing_is_no_result() -> None:
    """A turn changes the source's bytes and fails unless the reader has them; a peer is stopped between its turns."""
    with pair.Pair("peer", [16, 8]) as peer:
        with peer.turn():
            peer.reader.call(copy_bytes, peer.source.call(pair.first_bytes))
        assert {state_of(end.pid) for end in (peer.source, peer.reader)} == {"T"}
        with pytest.raises(RuntimeError, match="peer is no result"), peer.turn():
            peer.reader.call(copy_nothing)
    assert not Path(f"/proc/{peer.source.pid}/stat").exists()  # stopped or not, it has ended


@pytest.mark.slow
def test_cpu_time_counts_children() -> None:
    """CPU time of a process includes that of what it started: a serving helper is part of the cost."""
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds(os.getpid())
    mine = time.process_time()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = cpu_seconds(os.getpid()) - before
        mine = time.process_time() - mine
        child.communicate(b"\n")
    assert grown >= 0.15 + mine - 0.02  # in steps of 10 ms
    with pytest.raises(ProcessLookupError, match="has ended"):
        cpu_seconds(child.pid)


class End:
    """A process of a pull that answers from a table."""

    pid = os.getpid()

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.called: list[str] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.called.append(function.__name__)
        return self.answers.get(function.__name__)


def ends(*, here: int = 2, verified: bool = True, engine: str = "tcp") -> tuple[End, End]:
    got = {"called": 10.0, "returned": 12.0, "verified": verified, "engine": engine}
    publisher = End({"first_bytes": {2}, "publish": (9.0, 0.001)})
    return publisher, End({"first_bytes": {here}, "replicate": got})


def test_pull_is_timed_from_its_call() -> None:
    """A sealed pull waits for the seal before it asks; both clocks end at the return of replicate."""
    publisher, reader = ends()
    pull = Puller(publisher, reader, "large", "tcp").sealed()  # type: ignore[arg-type]
    assert (pull.seconds, pull.installed_seconds) == (2.0, 3.0)
    assert publisher.called == ["train", "publish", "wait_sealed", "first_bytes", "unpublish"]


@pytest.mark.parametrize(
    "wrong", [{"here": 1}, {"verified": False}, {"engine": "local"}], ids=["bytes", "digest", "engine"]
)
def test_pull_of_something_else_is_no_result(wrong: dict[str, Any]) -> None:
    """Other bytes, no verification, or another engine than is measured: no figure comes of it."""
    publisher, reader = ends(**wrong)
    with pytest.raises(RuntimeError, match="version 1 is no result"):
        Puller(publisher, reader, "large", "tcp").fresh()  # type: ignore[arg-type]


def test_ratio_needs_both_sides() -> None:
    """Rates of what ran; a ratio only where both of its sides did, else it is skipped by name."""
    report = Report("pull")
    wanted = [pull_engines.Rate("ours_over_peer", "ours", "peer", 2.0), pull_engines.Rate("a_over_b", "ours", "b")]
    pull_engines.compare(report, {"ours": lambda: 1.0, "peer": lambda: 3.0}, 3, wanted)
    assert set(report.results) == {"ours", "peer"}
    (found,) = report.ratios
    assert (found.name, found.value, found.holds) == ("ours_over_peer", 3.0, True)
    assert list(report.skipped) == ["a_over_b"]


def test_mooncake_plans_cover_every_byte_once() -> None:
    """Slices and whole reads move the same bytes: each of every array, once, to the same offset."""
    state: State = {}
    sizes = [mooncake.SLICE_BYTES * 2 + 5, 7]
    pair.allocate(state, sizes, 0)
    mooncake.connect(state, "peer", [(1 << 40, sizes[0]), (1 << 41, sizes[1])])
    for form in mooncake.FORMS:
        here, there, nbytes = state["plans"][form]
        assert sum(nbytes) == sum(sizes)
        for array, base in zip(state["arrays"], (1 << 40, 1 << 41), strict=True):
            seen = np.zeros(array.nbytes, int)
            for mine, theirs, length in zip(here, there, nbytes, strict=True):
                if 0 <= theirs - base < array.nbytes:
                    assert mine - array.ctypes.data == theirs - base
                    seen[theirs - base : theirs - base + length] += 1
            assert (seen == 1).all()


def test_percentile_is_one_of_the_values() -> None:
    """The 99th of a hundred values is the 99th; of one value, that one."""
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0
    assert percentile([float(value) for value in range(1, 11)], 0.99) == 10.0
    assert percentile([5.0], 0.99) == 5.0


def test_shares_add_up(tmp_path: Path) -> None:
    """Steps and the rest make up the process's CPU time; calls are counted where they are decoded; errors pass."""
    shares = timed_server.Shares()
    decode = shares.count("decode", json.loads)
    assert [decode("1"), decode("2")] == [1, 2]
    with pytest.raises(ValueError, match="Expecting"):
        decode("{")
    began = shares.began
    assert began is not None
    found = shares.found()
    assert found["calls"] == 3
    steps = sum(found[step] for step in ("decode", "machine", "encode"))
    assert 0 < steps <= steps + found["transport"] <= time.process_time() - began


def test_counted_steps_exist() -> None:
    """What is wrapped is what servers call: a renamed function would count as transport."""
    for module_name, path in timed_server.STEPS:
        if module_name.endswith("grpc_service"):
            pytest.importorskip("grpc", reason="gRPC is not installed: pip install '.[grpc]'")
        owner: Any = __import__(module_name, fromlist=["_"])
        for part in path.split("."):
            owner = getattr(owner, part)
        assert callable(owner)
