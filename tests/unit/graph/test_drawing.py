"""Pictures of graphs: nothing overlaps, every edge is drawn, the same graph gives the same bytes, any name is safe.

`python -m tests.unit.graph.test_drawing` writes the golden files anew; read the difference.
"""

from __future__ import annotations

import io
import itertools
import pathlib
import struct
import sys
import types
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from tensorhub.cli import graph as g
from tensorhub.cli import graph_svg
from tensorhub.cli.graph_layout import NODE_HEIGHT, Box, Layout, lay_out
from tensorhub.cli.graph_text import Drawing, bar, lines, paths
from tensorhub.cli.units import ago
from tensorhub.errors import BadRequest
from tests.unit.graph.examples import SMALL, holding, status, tree

GOLDEN = pathlib.Path(__file__).parent
SVG = "{http://www.w3.org/2000/svg}"
WIDTHS = (20, 40, 80, 200)


def example() -> g.Graph:
    """The graph of the small example."""
    return g.from_status(SMALL)[0]


def texts() -> dict[str, str]:
    """{golden file: what it must hold}"""
    return {
        "small.txt": "\n".join(line.plain for line in lines(example())) + "\n",
        "small.svg": graph_svg.svg(example()),
    }


@pytest.mark.parametrize("name", sorted(texts()))
def test_golden(name: str) -> None:
    """How the example looks is decided here, and changes only on purpose."""
    assert texts()[name] == (GOLDEN / name).read_text(encoding="utf-8")


# ---------------------------------------------------------------- layout


def overlap(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    """Whether two rectangles (x, y, width, height) share more than an edge."""
    return (
        left[0] < right[0] + right[2]
        and right[0] < left[0] + left[2]
        and left[1] < right[1] + right[3]
        and right[1] < left[1] + left[3]
    )


def inside(inner: tuple[float, ...], outer: tuple[float, ...]) -> bool:
    """Whether one rectangle lies within another."""
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and inner[0] + inner[2] <= outer[0] + outer[2]
        and inner[1] + inner[3] <= outer[1] + outer[3]
    )


def frame(box: Box) -> tuple[float, ...]:
    """The rectangle of a box."""
    return (box.x, box.y, box.width, box.height)


def frames(layout: Layout) -> dict[str, tuple[float, ...]]:
    """{node: its rectangle}"""
    return {each.node.name: (each.x, each.y, layout.node_width, NODE_HEIGHT) for each in layout.nodes}


LAID_OUT = [*(tree(readers, seed) for readers in (0, 1, 7, 64) for seed in range(4)), example()]


@pytest.mark.parametrize("graph", LAID_OUT, ids=lambda graph: f"{len(graph.nodes)} nodes")
def test_nothing_overlaps(graph: g.Graph) -> None:
    """No two nodes, no two boxes of a level; each node lies in the boxes of its place and in no other."""
    layout = lay_out(graph)
    placed = frames(layout)
    assert sorted(placed) == sorted(node.name for node in graph.nodes)
    assert not any(overlap(left, right) for left, right in itertools.combinations(placed.values(), 2))
    for left, right in itertools.combinations(layout.boxes, 2):
        if left.level == right.level:
            assert not overlap(frame(left), frame(right))
        elif right.label.startswith(left.label + "/"):
            assert inside(frame(right), frame(left))
    for node, box in itertools.product(graph.nodes, layout.boxes):
        belongs = "/".join(node.location[: box.level + 1]) == box.label
        assert inside(placed[node.name], frame(box)) if belongs else not overlap(placed[node.name], frame(box))
    whole = (0.0, 0.0, layout.width, layout.height)
    assert all(inside(each, whole) for each in [*placed.values(), *map(frame, layout.boxes)])


@pytest.mark.parametrize("graph", LAID_OUT, ids=lambda graph: f"{len(graph.nodes)} nodes")
def test_every_edge_is_drawn_between_its_nodes(graph: g.Graph) -> None:
    """One wire per edge, from a side of its source to the left side of its reader; columns are depths."""
    layout = lay_out(graph)
    placed = frames(layout)
    assert sorted((wire.edge.source, wire.edge.reader) for wire in layout.wires) == sorted(
        (edge.source, edge.reader) for edge in graph.edges
    )
    for wire in layout.wires:
        x, y, width, height = placed[wire.edge.source]
        assert wire.start == (x if wire.turns else x + width, y + height / 2)
        x, y, _, height = placed[wire.edge.reader]
        assert wire.end[0] == x
        assert y < wire.end[1] < y + height
    columns = sorted({(node.depth, placed[node.name][0]) for node in graph.nodes})
    assert len(columns) == len({depth for depth, _ in columns})
    assert [x for _, x in columns] == sorted(x for _, x in columns)


# ---------------------------------------------------------------- SVG and PNG


@pytest.mark.parametrize("graph", [tree(64, 3), example()], ids=["64", "small"])
def test_svg_is_xml_with_every_name_and_edge(graph: g.Graph) -> None:
    """The document parses; each node is a group with its name, each edge a path with an arrow."""
    root = ElementTree.fromstring(graph_svg.svg(graph))
    names = [group.findall(f"{SVG}text")[0].text for group in root.iter(f"{SVG}g")]
    assert names == [node.name for node in graph.nodes]
    arrows = [path for path in root.iter(f"{SVG}path") if path.get("marker-end")]
    assert len(arrows) == len(graph.edges)
    assert graph_svg.svg(graph) == graph_svg.svg(graph)


def test_any_name_is_safe_in_svg() -> None:
    """Names are text: markup, quotes and control characters neither break nor enter the document."""
    name = "<b>&\"'\x07" + "x" * 60
    root = ElementTree.fromstring(graph_svg.svg(g.build(name, "7", [g.Holder(name, 0, "complete", 1.0, 1, (name,))])))
    (group,) = root.iter(f"{SVG}g")
    assert (group.findall(f"{SVG}text")[0].text or "").startswith("<b>&\"'?xxx")
    assert not list(root.iter(f"{SVG}b"))


def test_png_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named, and a way without it."""
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(BadRequest, match=r"pip install '\.\[graph\]'.*--svg"):
        graph_svg.png("<svg/>")


def test_png_is_a_png() -> None:
    """With the extra installed, the picture is a PNG of the document's size times the scale."""
    pytest.importorskip("resvg_py", reason="the extra 'graph' is not installed")
    made = graph_svg.png(graph_svg.svg(example()))
    assert made[:8] == b"\x89PNG\r\n\x1a\n"
    layout = lay_out(example())
    width, height = struct.unpack(">II", made[16:24])
    assert (width, height) == (round(layout.width) * graph_svg.PNG_SCALE, round(layout.height) * graph_svg.PNG_SCALE)


def test_png_is_what_the_renderer_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer gets the document and a scale; its bytes, or list of bytes, are the file."""
    fake = types.ModuleType("resvg_py")
    asked: dict[str, object] = {}

    def svg_to_bytes(**named: object) -> list[int]:
        asked.update(named)
        return [0x89, 0x50]

    fake.svg_to_bytes = svg_to_bytes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "resvg_py", fake)
    assert graph_svg.png("<svg/>") == b"\x89P"
    assert asked == {"svg_string": "<svg/>", "zoom": graph_svg.PNG_SCALE}


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("width", WIDTHS)
def test_text_fits_any_terminal(width: int) -> None:
    """One line per node and one title; a line is cut, never wrapped, whatever the width."""
    graph = tree(64, 2)
    stream = io.StringIO()
    Console(file=stream, width=width).print(Drawing(graph))
    shown = stream.getvalue().splitlines()
    assert len(shown) == len(graph.nodes) + 1
    assert max(map(len, shown)) <= width


def test_text_in_ascii() -> None:
    """A terminal without box characters gets none."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=200).print(Drawing(example()))
    stream.seek(0)
    shown = stream.read()
    assert "|-roll-0" in shown
    assert "##........  20%" in shown


def test_brief_text_leaves_figures_out() -> None:
    """Beside other things only names and states are shown."""
    shown = [line.plain for line in lines(example(), brief=True)]
    assert shown[0] == str(example().summary)
    assert shown[2] == "├ roll-0  complete"


def test_paths_are_bounded() -> None:
    """Every way down to a reader in one line; of very many, the first and a count."""
    assert paths(example()) == "trainer -> roll-0 -> roll-2, trainer -> roll-0 -> roll-10, trainer -> roll-1 -> spot-3"
    star = g.from_status(status(*(holding(f"roll-{i}", ("trainer", 50)) for i in range(20))))[0]
    assert paths(star).endswith("trainer -> roll-7, and 12 more")
    assert paths(g.from_status(status(holding("trainer", state="published")))[0]) == ""


@pytest.mark.parametrize(("done", "shown"), [(0.0, "....   0%"), (0.999, "###.  99%"), (1.0, "#### 100%")])
def test_bars_are_full_only_at_the_end(done: float, shown: str) -> None:
    """99.9 % is not 100 %."""
    assert bar(done, "#", ".")[-9:] == shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (119, "119 s"), (600, "10 min"), (1e4, "3 h"), (1e6, "12 days")]
)
def test_ages_are_for_people(seconds: float, text: str) -> None:
    """The largest unit that still says something."""
    assert ago(seconds) == f"{text} ago"


if __name__ == "__main__":
    for name, text in texts().items():
        (GOLDEN / name).write_text(text, encoding="utf-8")
    sys.exit(0)
