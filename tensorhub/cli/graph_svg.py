"""A graph's layout as an SVG document, and that as PNG. Decides only colours, texts and strokes.

Colours are Okabe and Ito's, which the colour-blind tell apart; every state is a word, too, and no picture needs them.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator

from tensorhub.cli.graph import Edge, Graph, Node
from tensorhub.cli.graph_layout import (
    FOOT,
    LABEL,
    MARGIN,
    NAME_LETTERS_MAX,
    NODE_HEIGHT,
    RUN,
    Box,
    Layout,
    Placed,
    Wire,
    lay_out,
)
from tensorhub.cli.graph_text import pulled
from tensorhub.cli.units import size
from tensorhub.errors import BadRequest

#: {state: (line, fill)}
COLOURS = {
    "publishing": ("#56b4e9", "#eaf5fc"),
    "published": ("#0072b2", "#d9eaf4"),
    "complete": ("#009e73", "#d9f0ea"),
    "filling": ("#e69f00", "#fdf3dd"),
    "draining": ("#cc79a7", "#f8ebf2"),
    "gone": ("#8c8c8c", "#f4f4f4"),
}
LIVE = "#d55e00"
PAST = "#5a5a5a"
BESIDE = "#a0a0a0"
#: Line and fill of boxes, by level.
BOXES = (("#b8b8b8", "#fafafa"), ("#d0d0d0", "#f1f1f1"))
FONT = "DejaVu Sans, Helvetica, Arial, sans-serif"
#: Edges of one reader that have a text: one above its arrow, one below; the pointer shows all.
TEXTS_PER_READER = 2
#: Pixels of a PNG per pixel of the SVG: letters stay crisp on dense screens.
PNG_SCALE = 2
PNG_PACKAGE = "resvg-py"


def svg(graph: Graph) -> str:
    """The picture as a document; the same graph gives the same bytes."""
    layout = lay_out(graph)
    parts = [*_head(graph, layout)]
    for box in layout.boxes:
        parts += _box(box)
    for wire in layout.wires:
        parts += _wire(wire)
    for placed in layout.nodes:
        parts += _node(placed, layout.node_width)
    # Texts of arrows last: nothing is drawn over them.
    for wire in layout.wires:
        parts += _wire_text(wire)
    parts += _legend(graph, layout)
    return "\n".join([*parts, "</svg>"]) + "\n"


def png(document: str) -> bytes:
    """The picture as PNG, with the fonts of this machine; `BadRequest` says what to install."""
    try:
        renderer = importlib.import_module("resvg_py")
    except ImportError:
        hint = f"pip install '.[graph]' in a checkout (it brings {PNG_PACKAGE}), or write an SVG with --svg"
        raise BadRequest(f"--png needs a package that is not installed: {hint}") from None
    return bytes(renderer.svg_to_bytes(svg_string=document, zoom=PNG_SCALE))


def _head(graph: Graph, layout: Layout) -> Iterator[str]:
    width, height = f"{layout.width:.0f}", f"{layout.height:.0f}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="11">'
    )
    title = f"{graph.model} version {graph.version}: who pulled what from whom"
    yield f"<title>{_text(title)}</title>"
    yield "<defs>"
    for name, colour in (("live", LIVE), ("past", PAST), ("beside", BESIDE)):
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield f'<text x="{MARGIN}" y="30" font-size="17" font-weight="bold" fill="#111111">{_text(title)}</text>'
    yield f'<text x="{MARGIN}" y="50" font-size="12" fill="#444444">{_text(str(graph.summary))}</text>'


def _box(box: Box) -> Iterator[str]:
    line, fill = BOXES[box.level]
    yield (
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="6" '
        f'fill="{fill}" stroke="{line}"/>'
    )
    yield f'<text x="{box.x + 8:.1f}" y="{box.y + LABEL - 6:.1f}" fill="#666666">{_text(box.label)}</text>'


def _kind(edge: Edge) -> tuple[str, str, str]:
    """(marker, colour, more attributes)"""
    if edge.live:
        return "live", LIVE, ' stroke-width="2"'
    if edge.main:
        return "past", PAST, ' stroke-width="1.4"'
    return "beside", BESIDE, ' stroke-width="1.2" stroke-dasharray="5 3"'


def _wire(wire: Wire) -> Iterator[str]:
    (x0, y0), (x1, y1) = wire.start, wire.end
    middle = x1 - RUN
    bend = -RUN if wire.turns else max(40.0, abs(middle - x0) / 2)
    curve = f"C{x0 + bend:.1f} {y0:.1f} {middle - abs(bend):.1f} {y1:.1f} {middle:.1f} {y1:.1f}"
    marker, colour, more = _kind(wire.edge)
    yield (
        f'<path d="M{x0:.1f} {y0:.1f}{curve}L{x1:.1f} {y1:.1f}" fill="none" '
        f'stroke="{colour}"{more} marker-end="url(#{marker})">'
        f"<title>{_text(_story(wire.edge))}</title></path>"
    )


def _story(edge: Edge) -> str:
    shards = f", {edge.shards} shards" if edge.shards > 1 else ""
    return f"{edge.source} to {edge.reader}: {pulled(edge, named=False)}{shards}"


def _wire_text(wire: Wire) -> Iterator[str]:
    if wire.slot >= TEXTS_PER_READER:
        return
    edge, (x, y) = wire.edge, wire.end
    shards = f" in {edge.shards}" if edge.shards > 1 else ""
    text = size(edge.nbytes) + shards + (f" {edge.engine}" if edge.engine else "")
    y += -6 if wire.slot == 0 else 12
    halo = 'stroke="#ffffff" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
    yield (
        f'<text x="{x - 10:.1f}" y="{y:.1f}" font-size="10" text-anchor="end" fill="#222222" {halo}>'
        f"{_text(text)}</text>"
    )


def _node(placed: Placed, width: float) -> Iterator[str]:
    node, x, y = placed.node, placed.x, placed.y
    line, fill = COLOURS[node.state]
    dash = ' stroke-dasharray="4 3"' if node.state in ("gone", "draining") else ""
    yield f"<g><title>{_text(_whole(node))}</title>"
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{NODE_HEIGHT}" rx="5" fill="{fill}" '
        f'stroke="{line}" stroke-width="1.6"{dash}/>'
    )
    name = node.name if len(node.name) <= NAME_LETTERS_MAX else node.name[: NAME_LETTERS_MAX - 1] + "…"
    bold = 'font-size="12" font-weight="bold" fill="#111111"'
    yield f'<text x="{x + 9:.1f}" y="{y + 18:.1f}" {bold}>{_text(name)}</text>'
    state = f"{node.state} {node.done * 100:.0f}%" if node.state == "filling" else node.state
    shards = f", {node.shards} shards" if node.shards > 1 else ""
    yield f'<text x="{x + 9:.1f}" y="{y + 33:.1f}" fill="#333333">{_text(state + shards)}</text>'
    if node.state == "filling":
        bar = f'x="{x + 9:.1f}" y="{y + 37:.1f}" height="3"'
        yield f'<rect {bar} width="{width - 18:.1f}" fill="#ffffff"/>'
        yield f'<rect {bar} width="{(width - 18) * node.done:.1f}" fill="{line}"/>'
    yield "</g>"


def _whole(node: Node) -> str:
    """What the pointer shows of a node: all of it."""
    where = "/".join(node.location) or "unknown place"
    return f"{node.name}: {node.state}, {size(node.nbytes)}, {where}" + (", spot" if node.spot else "")


def _legend(graph: Graph, layout: Layout) -> Iterator[str]:
    """Only what is in the picture."""
    x, y = float(MARGIN), layout.height - FOOT / 2
    present = {node.state for node in graph.nodes}
    for state, (line, fill) in COLOURS.items():
        if state in present:
            yield f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="14" height="11" rx="2" fill="{fill}" stroke="{line}"/>'
            yield f'<text x="{x + 20:.1f}" y="{y:.1f}" fill="#333333">{state}</text>'
            x += 34 + 7 * len(state)
    kinds = {_kind(edge): text for edge in graph.edges for text in (_meaning(edge),)}
    for (_, colour, more), text in sorted(kinds.items()):
        yield f'<path d="M{x:.1f} {y - 4:.1f}h24" stroke="{colour}"{more}/>'
        yield f'<text x="{x + 30:.1f}" y="{y:.1f}" fill="#333333">{text}</text>'
        x += 44 + 7 * len(text)


def _meaning(edge: Edge) -> str:
    if edge.live:
        return "pulls now"
    return "pulled" if edge.main else "pulled, too"


def _text(text: str) -> str:
    """Safe in XML, which has no control characters at all."""
    return html.escape("".join(letter if letter.isprintable() else "?" for letter in text))
