"""A graph as a tree of text lines, for a terminal or a pipe. Decides only how it looks.

Guides are two columns wide: a chain of thirty readers must fit. A line that is too long is cut, never wrapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from tensorhub.cli.graph import NOTHING, Edge, Graph, Node
from tensorhub.cli.units import ago, size

#: Columns that a drawing can be cut down to.
MIN_COLUMNS = 24
#: Cells of the bar of a reader that fills.
BAR_CELLS = 10
#: Root-to-leaf paths in one line of `paths`; more are counted.
PATHS_SHOWN = 8
STYLES = {
    "publishing": "cyan",
    "published": "blue",
    "complete": "green",
    "filling": "yellow",
    "draining": "magenta",
    "gone": "dim",
}
#: (branch, last branch, trunk, nothing; a full and an empty cell of a bar)
BOX = ("├ ", "└ ", "│ ", "  ", "█", "░")
ASCII = ("|-", "`-", "| ", "  ", "#", ".")


class Drawing:
    """A rich renderable of a graph; in plain ASCII where the terminal has nothing else. `brief` leaves figures out."""

    def __init__(self, graph: Graph, *, brief: bool = False) -> None:
        self.graph = graph
        self.brief = brief

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from lines(self.graph, brief=self.brief, ascii_only=options.ascii_only)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(line.cell_len for line in lines(self.graph, brief=self.brief))
        return Measurement(min(MIN_COLUMNS, longest), longest).with_maximum(options.max_width)


def drawings(graphs: Iterable[Graph]) -> RenderableType:
    """All graphs, one below the other."""
    shown = [Drawing(graph) for graph in graphs]
    return Group(*shown) if shown else Text(NOTHING)


def lines(graph: Graph, *, brief: bool = False, ascii_only: bool = False) -> list[Text]:
    """The title, then one line per node, readers below their source."""
    marks = ASCII if ascii_only else BOX
    title = _line("") if brief else _line(f"{graph.model} version {graph.version}: ", "bold")
    title.append(str(graph.summary))
    nodes = {node.name: node for node in graph.nodes}
    incoming = graph.incoming()
    shown = [title]
    for name, guides in _walk(graph, marks):
        line = _line(guides, "dim")
        _describe(line, nodes[name], incoming[name], marks, brief)
        shown.append(line)
    return shown


def paths(graph: Graph) -> str:
    """ "trainer -> rollout-0 -> rollout-2, trainer -> rollout-1": every way down to a reader, the first few of many."""
    below, found = graph.children(), []
    stack = [(node.name, node.name) for node in reversed(graph.nodes) if node.depth == 0]
    while stack:
        name, path = stack.pop()
        if not below[name] and path != name:
            found.append(path)
        stack += [(reader, f"{path} -> {reader}") for reader in reversed(below[name])]
    more = len(found) - PATHS_SHOWN
    return ", ".join(found[:PATHS_SHOWN]) + (f", and {more} more" if more > 0 else "")


def bar(done: float, full: str = BOX[4], empty: str = BOX[5]) -> str:
    """How far a filling is; full only when it is."""
    cells = min(int(done * BAR_CELLS), BAR_CELLS)
    return f"{full * cells}{empty * (BAR_CELLS - cells)} {int(done * 100):3d}%"


def _line(text: str, style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis", end="\n")
    line.append(text, style)
    return line


def _walk(graph: Graph, marks: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(node, the guides before it) in the order of the graph's tree."""
    branch, last, trunk, nothing = marks[:4]
    below = graph.children()
    stack = [(node.name, "", "") for node in reversed(graph.nodes) if node.depth == 0]
    while stack:
        name, guides, under = stack.pop()
        yield name, guides
        readers = below[name]
        rows = [(reader, under + branch, under + trunk) for reader in readers[:-1]]
        rows += [(reader, under + last, under + nothing) for reader in readers[-1:]]
        stack += reversed(rows)


def _describe(line: Text, node: Node, edges: list[Edge], marks: tuple[str, ...], brief: bool) -> None:
    line.append(node.name, "bold")
    if node.shards > 1 and not brief:
        line.append(f" ({node.shards} shards)")
    filling = node.state == "filling"
    line.append("  ")
    line.append(bar(node.done, marks[4], marks[5]) if filling else node.state, STYLES[node.state])
    if brief:
        return
    if not edges:
        line.append(f"  {size(node.nbytes)}" if node.nbytes else "")
    for index, edge in enumerate(edges):
        line.append("  " if index == 0 else ", ")
        line.append(pulled(edge, named=index > 0))
    where = "/".join(node.location) + (" spot" if node.spot else "")
    line.append(f"  {where.strip()}" if where.strip() else "", "dim")


def pulled(edge: Edge, *, named: bool) -> str:
    """ "45.0 MB over local in 0.12 s, 3 s ago"; with the source's name where the tree does not show it."""
    text = f"{size(edge.nbytes)} from {edge.source}" if named else size(edge.nbytes)
    if edge.engine:
        text += f" over {edge.engine}"
    if edge.live:
        return f"{text} for {edge.took_s:.2f} s"
    return f"{text} in {edge.took_s:.2f} s, {ago(edge.age_s)}"
