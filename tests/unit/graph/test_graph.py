"""The graph of a version: which nodes and edges there are, who is below whom, and the numbers in its summary."""

from __future__ import annotations

import random

import pytest

from tensorhub.cli import graph as g
from tensorhub.errors import BadRequest
from tensorhub.types import ModelKey
from tests.unit.graph.examples import MB, SMALL, holding, status, tree


def test_the_example_has_every_edge_and_every_state() -> None:
    """Sources that are gone stay; what fills pulls live; a reader stands below the source that gave it most."""
    (graph,) = g.from_status(SMALL)
    assert [(node.name, node.state, node.depth) for node in graph.nodes] == [
        ("trainer", "gone", 0),
        ("roll-0", "complete", 1),
        ("roll-2", "complete", 2),
        ("roll-10", "complete", 2),
        ("roll-1", "complete", 1),
        ("spot-3", "filling", 2),
    ]
    assert [(edge.source, edge.reader, edge.nbytes // MB, edge.main, edge.live) for edge in graph.edges] == [
        ("trainer", "roll-0", 50, True, False),
        ("roll-0", "roll-2", 38, True, False),
        ("trainer", "roll-2", 12, False, False),
        ("roll-0", "roll-10", 50, True, False),
        ("trainer", "roll-1", 50, True, False),
        ("roll-1", "spot-3", 10, True, True),
    ]
    assert {edge.engine for edge in graph.edges} == {"tcp"}
    assert str(graph.summary) == "5 readers, depth 2, widest 3, trainer served 3"
    assert graph.nodes[-1].done == 0.2


def test_order_of_rows_does_not_matter() -> None:
    """The same holders in any order give the same graph: pictures of one state are equal."""
    holders = [g.holder_of(row) for row in SMALL.holdings]
    expected = g.build("actor", "7", holders)
    for seed in range(5):
        random.Random(seed).shuffle(holders)
        assert g.build("actor", "7", holders) == expected


def test_shards_of_a_replica_are_one_edge_or_one_each() -> None:
    """Many shards collapse into one edge that counts them and sums their bytes; `by_shard` keeps them apart."""
    view = status(
        *(holding(f"trainer#{shard}", state="published", where=f"dc/r1/h{shard}") for shard in range(3)),
        *(holding(f"roll#{shard}", ("trainer#" + str(shard), 50)) for shard in range(2)),
        holding("roll#2", ("other#2", 5), state="filling", watermark=1),
    )
    (graph,) = g.from_status(view)
    assert [(edge.source, edge.reader, edge.shards, edge.nbytes // MB) for edge in graph.edges] == [
        ("other", "roll", 1, 5),
        ("trainer", "roll", 2, 100),
    ]
    roll = next(node for node in graph.nodes if node.name == "roll")
    assert (roll.state, roll.shards, round(roll.done, 3)) == ("filling", 3, 0.7)
    assert next(node for node in graph.nodes if node.name == "trainer").location == ("dc", "r1")
    (shards,) = g.from_status(view, by_shard=True)
    assert [(edge.source, edge.reader) for edge in shards.edges] == [
        ("other#2", "roll#2"),
        ("trainer#0", "roll#0"),
        ("trainer#1", "roll#1"),
    ]


def test_a_source_that_gave_nothing_is_no_edge_unless_it_is_the_last() -> None:
    """Sources that failed before their first byte pulled nothing into anybody."""
    (graph,) = g.from_status(status(holding("roll", ("a", 0), ("b", 50)), holding("late", ("a", 0), state="filling")))
    assert [(edge.source, edge.reader) for edge in graph.edges] == [("a", "late"), ("b", "roll")]


def test_cycles_over_time_end() -> None:
    """B read from A and later A from B: each stands somewhere once, every edge is kept, a way in is used."""
    two = status(holding("a", ("b", 30)), holding("b", ("a", 30)))
    (graph,) = g.from_status(two)
    assert [(node.name, node.depth) for node in graph.nodes] == [("a", 0), ("b", 1)]
    assert [(edge.source, edge.main) for edge in graph.edges] == [("b", False), ("a", True)]
    fed = status(holding("a", ("trainer", 10), ("b", 30)), holding("b", ("a", 30)))
    (graph,) = g.from_status(fed)
    assert [(node.name, node.depth) for node in graph.nodes] == [("trainer", 0), ("a", 1), ("b", 2)]
    assert len(graph.edges) == 3


@pytest.mark.parametrize("seed", range(8))
def test_every_reader_is_one_below_its_main_source(seed: int) -> None:
    """In trees of any shape: one main edge per reader, depths fit it, the order puts a source before its readers."""
    graph = tree(60, seed)
    depths = {node.name: node.depth for node in graph.nodes}
    main = [edge for edge in graph.edges if edge.main]
    assert sorted(edge.reader for edge in main) == sorted({edge.reader for edge in graph.edges})
    assert all(depths[edge.reader] == depths[edge.source] + 1 for edge in main)
    place = {node.name: index for index, node in enumerate(graph.nodes)}
    assert all(place[edge.source] < place[edge.reader] for edge in main)
    assert graph.summary.readers == 60
    assert graph.summary.depth == max(depths.values())


def test_a_chain_may_be_longer_than_the_stack() -> None:
    """A chain of thousands is laid out without recursion."""
    rows = [holding(f"roll-{i}", (f"roll-{i - 1}" if i else "trainer", 50)) for i in range(3000)]
    (graph,) = g.from_status(status(*rows))
    assert graph.summary.depth == 3000


def test_versions_models_and_jobs_are_chosen() -> None:
    """The newest version of each model by default; a number, a model's job; what nobody holds is refused by name."""
    other = ModelKey("other", "draft")
    view = status(holding("a", number=6), holding("b", number=7), holding("c", number=3, model=other))
    assert [(graph.model, graph.version) for graph in g.from_status(view)] == [("actor", "7"), ("other/draft", "3")]
    assert [graph.version for graph in g.from_status(view, version="6")] == ["6"]
    assert [graph.model for graph in g.from_status(view, job="other")] == ["other/draft"]
    with pytest.raises(BadRequest, match="nobody holds version '9'; held are: actor: 7, 6; other/draft: 3"):
        g.from_status(view, version="9")
    assert g.from_status(status()) == ()
    with pytest.raises(BadRequest, match="no version is held"):
        g.only_one(())
    with pytest.raises(BadRequest, match="choose by --model or --job: actor, other/draft"):
        g.only_one(g.from_status(view))


def test_names_sort_as_people_count() -> None:
    """rollout-2 stands before rollout-10; any name has a place."""
    names = ["rollout-10", "rollout-2", "a", "", "7", "rollout-x"]
    assert sorted(names, key=g.natural) == ["", "7", "a", "rollout-2", "rollout-10", "rollout-x"]
