"""Who pulled what from whom: the graph of one version, out of what the server shows, with its layers and numbers.

Pure: it knows no server, terminal or file. `graph_text.py`, `graph_layout.py` and `graph_svg.py` draw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tensorhub.errors import BadRequest
from tensorhub.messages import HoldingView, StatusView
from tensorhub.types import ModelKey, Version

#: A node that stands for several shards shows the first of these that one of them is in; "gone" holds it no more.
STATES = ("draining", "filling", "publishing", "published", "complete", "gone")
SECOND_NS = 1e9
NOTHING = "no version is held"


@dataclass(frozen=True, slots=True)
class Origin:
    """Bytes that one shard of a replica got from the same shard of another. `live`: it still reads from there."""

    replica: str
    nbytes: int
    engine: str = ""
    age_s: float = 0.0
    took_s: float = 0.0
    live: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """One shard that holds the version, or is being filled with it; `done` is the part that is verified, 0 to 1."""

    replica: str
    shard: int
    state: str
    done: float
    nbytes: int
    location: tuple[str, ...] = ()
    spot: bool = False
    origins: tuple[Origin, ...] = ()


@dataclass(frozen=True, slots=True)
class Node:
    """A replica, or one shard of it. `depth` counts the hops from a node that pulled from nobody."""

    name: str
    state: str
    done: float
    nbytes: int
    shards: int
    location: tuple[str, ...]
    spot: bool
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Edge:
    """Bytes that went from `source` to `reader`, names of nodes, for `shards` shards together.

    Each reader has one `main` edge, from the depth above: the live one, else the one that gave most. Times are those
    of the shard that began last.
    """

    source: str
    reader: str
    nbytes: int
    shards: int
    engine: str
    age_s: float
    took_s: float
    live: bool
    main: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """`widest`: most readers of one node. `first`: who pulled from nobody; `served`: how many readers those had."""

    readers: int
    depth: int
    widest: int
    first: tuple[str, ...]
    served: int

    def __str__(self) -> str:
        if not self.readers:
            return "no readers yet"
        who = self.first[0] if len(self.first) == 1 else f"{len(self.first)} first holders"
        readers = "1 reader" if self.readers == 1 else f"{self.readers} readers"
        return f"{readers}, depth {self.depth}, widest {self.widest}, {who} served {self.served}"


@dataclass(frozen=True, slots=True)
class Graph:
    """One version of one model. Nodes in the order of the tree of main edges, readers below their source."""

    model: str
    version: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    summary: Summary

    def children(self) -> dict[str, list[str]]:
        """{node: its readers over main edges}, in order; every node is a key."""
        below: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        above = {edge.reader: edge.source for edge in self.edges if edge.main}
        for node in self.nodes:
            if node.name in above:
                below[above[node.name]].append(node.name)
        return below

    def incoming(self) -> dict[str, list[Edge]]:
        """{node: edges to it}, the main one first; every node is a key."""
        found: dict[str, list[Edge]] = {node.name: [] for node in self.nodes}
        for edge in self.edges:
            found[edge.reader].append(edge)
        return found


# ---------------------------------------------------------------- from the server's view


def from_status(
    view: StatusView, *, job: str | None = None, version: str | None = None, by_shard: bool = False
) -> tuple[Graph, ...]:
    """One graph per model: of its newest version, or of the one named ("7", or "7@run-2" of another lineage).

    `BadRequest` when a version is named that nobody holds.
    """
    held: dict[ModelKey, list[Version]] = {}
    for row in view.versions:
        if job is None or row.model.job == job:
            held.setdefault(row.model, []).append(row.version)
    graphs = []
    for model, versions in held.items():
        chosen = next((each for each in versions if version is None or version in (str(each), str(each.number))), None)
        if chosen is not None:
            rows = [row for row in view.holdings if (row.seat.model, row.version) == (model, chosen)]
            graphs.append(build(str(model), str(chosen), [holder_of(row) for row in rows], by_shard=by_shard))
    if version is not None and not graphs:
        known = "; ".join(f"{model}: {', '.join(map(str, versions))}" for model, versions in held.items())
        raise BadRequest(f"nobody holds version {version!r}; held are: {known or 'none'}")
    return tuple(graphs)


def only_one(graphs: Sequence[Graph]) -> Graph:
    """A picture shows one graph; `BadRequest` unless there is exactly one."""
    if len(graphs) != 1:
        found = ", ".join(graph.model for graph in graphs)
        raise BadRequest(f"a picture shows one model; {f'choose by --model or --job: {found}' if found else NOTHING}")
    return graphs[0]


def holder_of(row: HoldingView) -> Holder:
    """A row of the server's view in this module's words. Its last source is live while it is the row's upstream."""
    live = row.upstream if row.state == "filling" else ""
    last = len(row.pulled) - 1
    origins = tuple(
        Origin(
            pull.source.replica,
            pull.nbytes,
            pull.route.partition(" ")[0],
            pull.age_ns / SECOND_NS,
            pull.took_ns / SECOND_NS,
            index == last and live == str(pull.source),
        )
        for index, pull in enumerate(row.pulled)
        if pull.nbytes or index == last
    )
    done = row.watermark / row.chunks if row.state == "filling" and row.chunks else float(row.state != "filling")
    return Holder(row.seat.replica, row.seat.shard, row.state, done, row.nbytes, row.location.parts, row.spot, origins)


# ---------------------------------------------------------------- the graph


def build(model: str, version: str, holders: Iterable[Holder], *, by_shard: bool = False) -> Graph:
    """The graph of these holders; the same holders, in any order, give the same graph."""
    ordered = sorted(holders, key=lambda holder: (natural(holder.replica), holder.shard))
    groups: dict[str, list[Holder]] = {}
    for holder in ordered:
        groups.setdefault(_name(holder.replica, holder.shard, by_shard), []).append(holder)
    nodes = {name: _node(name, group) for name, group in groups.items()}
    edges = _edges(ordered, by_shard)
    for edge in edges:
        if edge.source not in nodes:
            nodes[edge.source] = Node(edge.source, "gone", 0.0, 0, edge.shards, (), False)
    edges, depths = _layers(sorted(nodes, key=natural), edges)
    placed = {name: replace(node, depth=depths[name]) for name, node in nodes.items()}
    order = _tree_order(placed, edges)
    rank = {name: index for index, name in enumerate(order)}
    edges.sort(key=lambda edge: (rank[edge.reader], not edge.main, rank[edge.source]))
    return Graph(model, version, tuple(placed[name] for name in order), tuple(edges), _summary(order, depths, edges))


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts rollout-2 before rollout-10."""
    parts: list[tuple[int, int, str]] = []
    for is_number, text in _runs(name):
        parts.append((0, int(text), text) if is_number else (1, 0, text))
    return tuple(parts)


def _runs(name: str) -> list[tuple[bool, str]]:
    runs: list[tuple[bool, str]] = []
    for letter in name:
        is_number = letter in "0123456789"
        if runs and runs[-1][0] == is_number:
            runs[-1] = (is_number, runs[-1][1] + letter)
        else:
            runs.append((is_number, letter))
    return runs


def _name(replica: str, shard: int, by_shard: bool) -> str:
    return f"{replica}#{shard}" if by_shard else replica


def _node(name: str, group: Sequence[Holder]) -> Node:
    nbytes = sum(holder.nbytes for holder in group)
    done = sum(holder.done * holder.nbytes for holder in group) / nbytes if nbytes else group[0].done
    state = min((holder.state for holder in group), key=STATES.index)
    shards = len({holder.shard for holder in group})
    # Shards of a replica may lie on different hosts: what they share is where the replica is.
    shared = group[0].location
    for holder in group[1:]:
        agree = (mine == theirs for mine, theirs in zip(shared, holder.location, strict=False))
        length = next((index for index, same in enumerate(agree) if not same), min(len(shared), len(holder.location)))
        shared = shared[:length]
    return Node(name, state, done, nbytes, shards, shared, any(holder.spot for holder in group))


def _edges(holders: Iterable[Holder], by_shard: bool) -> list[Edge]:
    found: dict[tuple[str, str], list[tuple[int, Origin]]] = {}
    for holder in holders:
        reader = _name(holder.replica, holder.shard, by_shard)
        for origin in holder.origins:
            source = _name(origin.replica, holder.shard, by_shard)
            if source != reader:
                found.setdefault((source, reader), []).append((holder.shard, origin))
    edges = []
    for (source, reader), pulls in found.items():
        newest = min((origin for _, origin in pulls), key=lambda origin: origin.age_s)
        edges.append(
            Edge(
                source,
                reader,
                sum(origin.nbytes for _, origin in pulls),
                len({shard for shard, _ in pulls}),
                "+".join(sorted({origin.engine for _, origin in pulls if origin.engine})),
                newest.age_s,
                newest.took_s,
                any(origin.live for _, origin in pulls),
            )
        )
    return edges


def _layers(names: Sequence[str], edges: Sequence[Edge]) -> tuple[list[Edge], dict[str, int]]:
    """Mark each reader's main edge; {node: depth}. A reader is one below the source of its main edge.

    Over time there are cycles (B read from A, later A from B): where one is left, its best edge from outside is taken
    for main, or its first node for one that pulled from nobody.
    """
    ranked: dict[str, list[Edge]] = {}
    for edge in sorted(edges, key=lambda edge: (not edge.live, -edge.nbytes, natural(edge.source))):
        ranked.setdefault(edge.reader, []).append(edge)
    depths = {name: 0 for name in names if name not in ranked}
    main: dict[str, str] = {}
    left = [name for name in names if name in ranked]
    while left:
        ready = {name: ranked[name][0] for name in left if ranked[name][0].source in depths}
        if not ready:
            outside = ((name, edge) for name in left for edge in ranked[name] if edge.source in depths)
            name, best = next(outside, (left[0], None))
            ready = {name: best} if best is not None else {}
            depths.setdefault(name, 0)
        for name, edge in ready.items():
            depths[name], main[name] = depths[edge.source] + 1, edge.source
        left = [name for name in left if name not in depths]
    return [replace(edge, main=main.get(edge.reader) == edge.source) for edge in edges], depths


def _tree_order(nodes: dict[str, Node], edges: Iterable[Edge]) -> list[str]:
    """Depth first along main edges, without recursion: a chain may be long."""
    below: dict[str, list[str]] = {}
    above = {edge.reader: edge.source for edge in edges if edge.main}
    for reader, source in above.items():
        below.setdefault(source, []).append(reader)
    stack = sorted((name for name in nodes if name not in above), key=natural, reverse=True)
    order = []
    while stack:
        name = stack.pop()
        order.append(name)
        stack += sorted(below.get(name, ()), key=natural, reverse=True)
    return order


def _summary(names: Sequence[str], depths: dict[str, int], edges: Sequence[Edge]) -> Summary:
    served = dict.fromkeys(names, 0)
    for edge in edges:
        served[edge.source] += 1
    readers = {edge.reader for edge in edges}
    first = tuple(name for name in names if name not in readers and served[name])
    total = sum(served[name] for name in first)
    return Summary(len(readers), max(depths.values(), default=0), max(served.values(), default=0), first, total)
