"""`tensorhub graph` over a real server: what it draws is what the readers report that they pulled, and from whom."""

from __future__ import annotations

import json

import pytest

import tensorhub
from tensorhub.cli import graph as graphs
from tensorhub.cli.__main__ import main
from tests.integration.conftest import Opener, blank, same, weights

READERS = ("rollout-0", "rollout-1", "rollout-2")


def test_the_graph_is_what_the_readers_report(
    hub: Opener, model: str, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer and three replicas: every reader's source and bytes, as its own `Replication` has them; the trainer is
    in the graph as gone after it has unpublished.
    """
    ours = weights(8)
    trainer = hub("trainer", ours)
    trainer.publish(version=3, digest="now")
    reported = {}
    for name in READERS:
        theirs = blank(ours)
        got = hub(name, theirs).replicate(3, timeout=20)
        assert same(ours, theirs)
        reported[name] = [(use.replica, use.nbytes) for use in got.sources if use.nbytes]
    trainer.unpublish(timeout=20)
    (graph,) = graphs.from_status(tensorhub.server_status(server=server, model=model))
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in READERS}
    for edge in graph.edges:
        found[edge.reader].append((edge.source, edge.nbytes))
    assert found == reported
    states = {node.name: node.state for node in graph.nodes}
    assert states == {"trainer": "gone", **dict.fromkeys(READERS, "complete")}
    assert {edge.engine for edge in graph.edges} <= {"memory", "local"}
    assert main(["graph", "--server", server, "--model", model, "--json", "--shards"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["graphs"]
    assert {node["name"] for node in document["nodes"]} == {f"{name}#0" for name in ("trainer", *READERS)}
    assert document["version"] == "3"
