"""How a batch of ranges becomes few, large requests that land side by side in slabs.

Arithmetic only. Ranges that share a region at the source (`registrations.py`) because they lie close together are
asked for together, gaps included; what was asked for too much stays in the slab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tensorhub.ports import U64, Ranges
from tensorhub.transport.ranges import slices

#: Requests that share a slab: a library bounds what it queues per peer, and refuses the rest.
REQUESTS_MAX = 32


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """What lands in one slab: request i brings `nbytes[i]` bytes from `remote[i]` to offset `offsets[i]` of it."""

    remote: list[int]
    offsets: list[int]
    nbytes: list[int]
    #: The ranges that are wanted of it, by offset in the slab, and where they belong.
    at: U64
    ranges: Ranges
    #: Bytes of the batch that have landed, in its order, once this window and all before it have.
    through: int


def windows(ranges: Ranges, slab_bytes: int, grain: int = 1) -> Iterator[Window]:
    """Every byte of the batch, each in exactly one window, nearly in order. `grain`: that of the source's regions."""
    through = 0
    for piece in slices(ranges, slab_bytes):
        ready = through
        through += piece.total_bytes
        if len(piece.nbytes) == 1:
            remote, nbytes = piece.remote.tolist(), piece.nbytes.tolist()
            yield Window(remote, [0], nbytes, np.zeros(1, dtype=np.uint64), piece, through)
            continue
        order = np.argsort(piece.remote, kind="stable")
        ordered = Ranges(piece.remote[order], piece.local[order], piece.nbytes[order])
        bridged, costs = _bridged(ordered, grain)
        ends = np.cumsum(costs, dtype=np.uint64)
        opened = np.cumsum(~bridged)
        first, count = 0, len(order)
        while first < count:
            base = ends[first] - ordered.nbytes[first]
            stop = min(
                int(np.searchsorted(ends, base + np.uint64(slab_bytes), "right")),
                int(np.searchsorted(opened, opened[first] + REQUESTS_MAX, "left")),
            )
            part = Ranges(ordered.remote[first:stop], ordered.local[first:stop], ordered.nbytes[first:stop])
            at = ends[first:stop] - part.nbytes - base
            yield _window(part, at, bridged[first:stop], through if stop == count else ready)
            first = stop


def apart(window: Window) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """The window's requests as (remote, offsets, nbytes), one for each range alone, a few at a time."""
    for first in range(0, len(window.at), REQUESTS_MAX):
        part = slice(first, first + REQUESTS_MAX)
        yield window.ranges.remote[part].tolist(), window.at[part].tolist(), window.ranges.nbytes[part].tolist()


def _bridged(ordered: Ranges, grain: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], U64]:
    """Which ranges are asked for together with the one before, and the slab bytes of each with the gap before it."""
    starts, ends = ordered.remote[1:].astype(np.int64), (ordered.remote + ordered.nbytes)[:-1].astype(np.int64)
    gaps = starts - ends
    bridged = np.zeros(len(ordered.remote), dtype=np.bool_)
    bridged[1:] = (gaps >= 0) & (starts // grain <= (ends - 1) // grain + 1)
    costs = ordered.nbytes.copy()
    costs[1:] += np.where(bridged[1:], gaps, 0).astype(np.uint64)
    return bridged, costs


def _window(part: Ranges, at: U64, bridged: np.ndarray[tuple[int], np.dtype[np.bool_]], through: int) -> Window:
    opens = ~bridged
    opens[0] = True
    starts = np.flatnonzero(opens)
    lasts = np.append(starts[1:] - 1, len(at) - 1)
    sizes = at[lasts] + part.nbytes[lasts] - at[starts]
    return Window(part.remote[starts].tolist(), at[starts].tolist(), sizes.tolist(), at, part, through)
