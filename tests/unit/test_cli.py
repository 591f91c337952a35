"""The command line: exit codes, one-line errors, JSON that programs can read, over views made by hand."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import tensorhub
from tensorhub.cli import __main__ as command_line
from tensorhub.cli import fleet
from tensorhub.cli.__main__ import main
from tensorhub.cli.demo_worker import Member
from tensorhub.errors import BadRequest, ServerUnavailable, Where
from tensorhub.messages import HoldingView, SessionView, StatusView, VersionView, WaitView
from tensorhub.transport.router import engine_names
from tensorhub.types import Epoch, Location, ModelKey, ReplicaId, Seat, SessionId, Version
from tensorhub.views import PulledView

MODEL = ModelKey("default", "actor")
SEAT = Seat(MODEL, ReplicaId("rollout-0"), 1)
VERSION = VersionView(MODEL, Version("main", 7), "readable", 2, 90_900_000, ("trainer",), ("rollout-0",), 1, True)
STATUS = StatusView(
    epoch=Epoch(b"\x01" * 16),
    sessions=(SessionView(SessionId(b"\xab" * 16), "h9", 4711, (SEAT,), 9_000_000_000),),
    versions=(VERSION,),
    holdings=(
        HoldingView(
            SEAT,
            2,
            "a",
            Version("main", 7),
            "filling",
            3,
            9,
            45,
            "trainer#1",
            (),
            True,
            Location(("dc1", "r3")),
            "tcp",
            (PulledView(Seat(MODEL, ReplicaId("trainer"), 1), 15, "tcp", 2_000_000_000, 1_000_000_000),),
        ),
    ),
    waiting=(WaitView("rollout-1#0", "latest of actor", 1_000_000_000),),
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The two calls that need no hub, answered by hand; what they were asked is returned."""
    asked: dict[str, Any] = {}

    def status(**named: Any) -> StatusView:
        asked.update(named)
        return STATUS

    def versions(**named: Any) -> tuple[VersionView, ...]:
        asked.update(named)
        return (VERSION,)

    monkeypatch.setattr(tensorhub, "server_status", status, raising=False)
    monkeypatch.setattr(tensorhub, "server_versions", versions, raising=False)
    return asked


def test_status_json_is_one_document_with_hex_ids(server: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`status --json` prints the whole view as one JSON document; ids are hex."""
    assert main(["status", "--json", "--server", "local", "--model", "actor", "--timeout", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["epoch"] == "01" * 16
    assert document["sessions"][0]["session"] == "ab" * 16
    assert document["holdings"][0]["seat"] == {
        "model": {"job": "default", "name": "actor"},
        "replica": "rollout-0",
        "shard": 1,
    }
    assert document["holdings"][0]["location"] == "dc1/r3"
    assert server == {"server": "local", "model": "actor", "timeout": 3.0}


def test_status_tables_name_who_reads_what(server: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The tables show the seat, its upstream, its watermark, the process and the wait."""
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    for part in ("actor", "rollout-0#1/2", "trainer#1", "3/9", "4711", "latest of actor", "90.9 MB", "dc1/r3 spot"):
        assert part in shown


def test_nothing_held_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty server shows no empty frames."""
    empty = dataclasses.replace(STATUS, versions=(), holdings=(), waiting=())
    monkeypatch.setattr(tensorhub, "server_status", lambda **_: empty, raising=False)
    monkeypatch.setattr(tensorhub, "server_versions", lambda **_: (), raising=False)
    assert main(["versions"]) == 0
    assert capsys.readouterr().out == "no version is held\n"
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("no version is held\n")
    assert "holdings" not in shown


def test_versions_json_and_table(server: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`versions` prints a table, `versions --json` the same rows as a document."""
    assert main(["versions"]) == 0
    assert "readable" in capsys.readouterr().out
    assert main(["versions", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["versions"]
    assert (row["version"], row["complete"], row["verified"]) == (
        {"lineage": "main", "number": 7},
        ["trainer"],
        True,
    )


def test_graph_shows_who_pulled_from_whom(server: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`graph` prints a tree with its numbers; `--json` the same as nodes and edges; shards on request."""
    assert main(["graph", "--server", "local", "--model", "actor", "--job", "default"]) == 0
    shown = capsys.readouterr().out
    assert "actor version 7: 1 reader, depth 1, widest 1, trainer served 1" in shown
    assert "└ rollout-0  ███░░░░░░░  33%  15 B over tcp for 1.00 s  dc1/r3 spot" in shown
    assert server == {"server": "local", "model": "actor", "job": "default", "timeout": 10.0}
    assert main(["graph", "--json", "--shards"]) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert [node["name"] for node in graph["nodes"]] == ["trainer#1", "rollout-0#1"]
    (edge,) = graph["edges"]
    assert (edge["source"], edge["reader"], edge["nbytes"], edge["live"]) == ("trainer#1", "rollout-0#1", 15, True)
    assert graph["summary"]["depth"] == 1


def test_graph_writes_pictures(
    server: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--svg` and `--png` write files, named on stderr; what cannot be written or made is one line."""
    renderer = types.ModuleType("resvg_py")
    renderer.svg_to_bytes = lambda **_: b"picture"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "resvg_py", renderer)
    svg, png = tmp_path / "graph.svg", tmp_path / "graph.png"
    assert main(["graph", "--svg", str(svg), "--png", str(png)]) == 0
    assert capsys.readouterr() == ("", f"wrote {svg}\nwrote {png}\n")
    assert svg.read_text(encoding="utf-8").startswith("<svg ")
    assert png.read_bytes() == b"picture"
    assert main(["graph", "--svg", str(tmp_path / "no" / "graph.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    assert main(["graph", "--png", str(png)]) == 2
    assert "pip install '.[graph]' in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "graph"])
def test_watch_looks_until_interrupted(
    command: str, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--watch` draws again after each pause; Ctrl-C ends it with a shell's code for that."""
    pauses = iter([None, None])

    def pause(_seconds: float) -> None:
        try:
            next(pauses)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(time, "sleep", pause)
    assert main([command, "--watch"]) == 130
    assert "rollout-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServerUnavailable("nobody\nanswers", Where(model="actor")), 1),
        (BadRequest("server 'x' is no address"), 2),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors go to stderr as one line with their name, what and where; stdout stays empty."""

    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(tensorhub, "server_status", fail, raising=False)
    assert main(["status", "--json"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tensorhub: {type(error).__name__}: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "versions", "graph"])
def test_looking_starts_no_server(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no local server runs, one line says so, at once, and afterwards there is still none."""
    monkeypatch.setenv("TENSORHUB_RUNTIME_DIR", str(tmp_path))
    assert main([command, "--server", "local:nobody", "--timeout", "3000"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tensorhub: NoServer: no local server 'nobody' runs ")
    assert captured.err.count("\n") == 1
    assert not list((tmp_path / "nobody").iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--replicas", "0"],
        ["demo", "--model-mib", "2", "--replicas", "99"],
        ["demo", "--weights", "/does/not/exist"],
        ["status", "--json", "--watch"],
        ["graph", "--json", "--watch"],
        ["graph", "--svg", "graph.svg", "--watch"],
        ["graph", "--version", "8"],
        ["no-such-command"],
    ],
)
def test_malformed_requests_exit_2(
    arguments: list[str], server: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be done as asked exits with 2 and a word on stderr."""
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_the_demo_asks_a_server_before_it_starts_a_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody listens: one message, code 1, and no worker was started to find the same."""

    def fail(**named: Any) -> None:
        raise ServerUnavailable(f"{named['server']} is silent")

    monkeypatch.setattr(tensorhub, "server_status", fail, raising=False)
    monkeypatch.setattr(fleet.ProcessFleet, "__enter__", lambda _: pytest.fail("workers were started"))
    assert main(["demo", "--model-mib", "1", "--server", "grpc://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == "tensorhub: ServerUnavailable: grpc://127.0.0.1:1 is silent\n"


def test_an_interrupted_demo_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C: a line, and a shell's code for it."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(fleet.ProcessFleet, "__enter__", interrupt)
    assert main(["demo", "--model-mib", "1", "--server", "local"]) == 130
    assert capsys.readouterr().err == "tensorhub: interrupted; the demo's processes have ended\n"


def test_the_same_failure_of_several_workers_is_told_once() -> None:
    """Workers that fail alike share one reason; others keep theirs."""
    alike = {Member("trainer", 0): "no server", Member("rollout-0", 0): "no server", Member("rollout-1", 0): "died"}
    assert fleet._told_once(alike) == "rollout-0#0, trainer#0: no server; rollout-1#0: died"


def test_help_of_the_demo_names_every_engine() -> None:
    """The words of `--engine` are those that the router takes."""
    for name in engine_names("auto"):
        assert name in command_line.ENGINES


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` names every command and exits with 0."""
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in ("demo", "graph", "status", "versions", "serve"):
        assert command in shown
