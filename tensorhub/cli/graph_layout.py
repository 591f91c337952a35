"""Where the parts of a graph's picture lie: nodes in columns by depth, in lanes by location, boxes round the lanes.

Pure arithmetic in pixels; it draws nothing. No two nodes, and no two boxes of one level, ever overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub.cli.graph import Edge, Graph, Node, natural

MARGIN = 24
#: Title and summary above, legend below.
HEAD = 68
FOOT = 48
NODE_HEIGHT = 44
#: Room for the lines of text above and below an arrow's end.
ROW = NODE_HEIGHT + 24
#: Room for the text at an arrow's end, and for its curve.
COLUMN_GAP = 170
#: Between the ends of two arrows at one reader, and how many are told apart.
SPREAD = 6
SPREAD_MAX = 3
#: Straight end of an arrow, which the text stands over.
RUN = 86
#: Per letter of a name at its font size; wide enough for capitals.
LETTER = 7.6
NAME_LETTERS_MAX = 26
NODE_WIDTH_MIN = 130
#: Round a lane within its box, and above it for the box's name.
PAD = 14
LABEL = 20
#: Location levels that get a box: data centre and rack. The host is in the node's own text.
BOX_LEVELS = 2
#: Between lanes.
LANE_GAP = 16
#: Title, legend and summary fit.
WIDTH_MIN = 560


@dataclass(frozen=True, slots=True)
class Placed:
    """A node and its upper left corner."""

    node: Node
    x: float
    y: float

    @property
    def middle(self) -> float:
        return self.y + NODE_HEIGHT / 2


@dataclass(frozen=True, slots=True)
class Box:
    """A place (`level` 0: data centre, 1: rack) round everything in it."""

    label: str
    level: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Wire:
    """An edge to the left side of its reader; `slot` counts those of one reader. It starts at the right side of its
    source, or at the left one (`turns`) where both are in one column.
    """

    edge: Edge
    slot: int
    turns: bool
    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything to draw, from back to front: boxes, wires (main ones last), nodes."""

    width: float
    height: float
    node_width: float
    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    nodes: tuple[Placed, ...]


def lay_out(graph: Graph) -> Layout:
    """The same graph, the same picture."""
    longest = max((min(len(node.name), NAME_LETTERS_MAX) for node in graph.nodes), default=0)
    node_width = max(NODE_WIDTH_MIN, longest * LETTER + 20)
    lanes = _lanes(graph)
    placed: dict[str, Placed] = {}
    boxes: list[Box] = []
    top = float(HEAD)
    step = node_width + COLUMN_GAP
    for index, (place, names) in enumerate(lanes):
        before = lanes[index - 1][0] if index else ()
        opened = [level for level in range(len(place)) if place[: level + 1] != before[: level + 1]]
        top += LABEL * len(opened) + (PAD if opened else 0)
        rows = _rows(graph, names)
        for node in graph.nodes:
            if node.name in rows:
                x = MARGIN + BOX_LEVELS * PAD + node.depth * step
                placed[node.name] = Placed(node, x, top + rows[node.name] * ROW)
        top += (max(rows.values()) + 1) * ROW - (ROW - NODE_HEIGHT) + PAD + LANE_GAP
    for level in reversed(range(BOX_LEVELS)):
        boxes += _boxes(lanes, placed, level, node_width, boxes)
    boxes.reverse()
    nodes = tuple(placed[node.name] for node in graph.nodes)
    right = max((each.x + node_width for each in nodes), default=0.0) + BOX_LEVELS * PAD + MARGIN
    height = top + FOOT
    return Layout(max(right, WIDTH_MIN), height, node_width, tuple(boxes), _wires(graph, placed, node_width), nodes)


def _lanes(graph: Graph) -> list[tuple[tuple[str, ...], list[str]]]:
    """(location prefix, names), one lane per rack: data centres and racks whose nodes are nearer to the start first."""
    found: dict[tuple[str, ...], list[Node]] = {}
    for node in graph.nodes:
        found.setdefault(node.location[:BOX_LEVELS], []).append(node)
    nearest: dict[tuple[str, ...], int] = {}
    for place, nodes in found.items():
        for prefix in (place[:1], place):
            nearest[prefix] = min(nearest.get(prefix, len(graph.nodes)), *(node.depth for node in nodes))

    order = sorted(found, key=lambda each: (nearest[each[:1]], [*map(natural, each[:1])], nearest[each], each))
    return [(place, [node.name for node in found[place]]) for place in order]


def _rows(graph: Graph, names: Sequence[str]) -> dict[str, float]:
    """{node of a lane: row}: leaves one below the other, a source in the middle of its readers in the lane.

    Each subtree has rows of its own, so nodes of one column never share one. Trees of a lane that meet in no column
    stand side by side.
    """
    inside = set(names)
    below = {name: [reader for reader in readers if reader in inside] for name, readers in graph.children().items()}
    rows: dict[str, float] = {}
    leaves = (name for name in names if not below[name])
    rows.update((name, float(row)) for row, name in enumerate(leaves))
    for name in reversed(names):  # in the order of the graph, readers come after their source
        if below[name]:
            rows[name] = (rows[below[name][0]] + rows[below[name][-1]]) / 2
    depths = {node.name: node.depth for node in graph.nodes}
    free: dict[int, float] = {}
    for tree in _trees(names, below):
        shift = max(free.get(depths[name], 0.0) - rows[name] for name in tree)
        for name in tree:
            rows[name] += shift
            free[depths[name]] = max(free.get(depths[name], 0.0), rows[name] + 1)
    return rows


def _trees(names: Sequence[str], below: dict[str, list[str]]) -> list[list[str]]:
    """The names by the tree they stand in, in order."""
    trees: dict[str, list[str]] = {}
    root: dict[str, str] = {}
    for name in names:
        mine = root.setdefault(name, name)
        trees.setdefault(mine, []).append(name)
        root.update(dict.fromkeys(below[name], mine))
    return list(trees.values())


def _boxes(
    lanes: Sequence[tuple[tuple[str, ...], Sequence[str]]],
    placed: dict[str, Placed],
    level: int,
    node_width: float,
    inner: Sequence[Box],
) -> list[Box]:
    """Boxes of one level, each round its nodes and the boxes within it."""
    members: dict[tuple[str, ...], list[Placed]] = {}
    for place, names in lanes:
        if len(place) > level:
            members.setdefault(place[: level + 1], []).extend(placed[name] for name in names)
    boxes = []
    for prefix, nodes in members.items():
        within = [box for box in inner if box.label.startswith("/".join(prefix) + "/")]
        left = min([node.x for node in nodes] + [box.x for box in within]) - PAD
        right = max([node.x + node_width for node in nodes] + [box.x + box.width for box in within]) + PAD
        upper = min([node.y - LABEL for node in nodes] + [box.y - LABEL for box in within])
        lower = max([node.y + NODE_HEIGHT + PAD for node in nodes] + [box.y + box.height for box in within])
        lower += 4 if within else 0
        boxes.append(Box("/".join(prefix), level, left, upper, right - left, lower - upper))
    return boxes


def _wires(graph: Graph, placed: dict[str, Placed], node_width: float) -> tuple[Wire, ...]:
    wires = []
    for edges in graph.incoming().values():
        for slot, edge in enumerate(edges):
            source, reader = placed[edge.source], placed[edge.reader]
            turns = source.x == reader.x
            start = (source.x if turns else source.x + node_width, source.middle)
            end = (reader.x, reader.middle + SPREAD * min(slot, SPREAD_MAX))
            wires.append(Wire(edge, slot, turns, start, end))
    return tuple(sorted(wires, key=lambda wire: wire.edge.main))
