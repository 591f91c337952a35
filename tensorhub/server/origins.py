"""Whom a holding was filled from: it keeps, for each source in turn, how many bytes were verified from it and for how
long. For people only: nothing decides by it, and it outlives the sources that it names.
"""

from __future__ import annotations

from tensorhub.server.settings import ORIGINS_MAX
from tensorhub.server.state import Holding, Origin


def begin(reader: Holding, source: Holding, now_ns: int) -> None:
    """The reader reads from the source from now on. A source it comes back to is a new entry: the order is kept.

    Above the limit the entry that gave least goes; which sources count are those that gave bytes.
    """
    if len(reader.origins) >= ORIGINS_MAX:
        reader.origins.remove(min(reader.origins, key=lambda origin: origin.nbytes))
    # A reader tells its route only when it changes.
    reader.origins.append(Origin(source.member.seat, now_ns, route=reader.route))


def end(reader: Holding, now_ns: int) -> None:
    """The reader reads from its source, the last of these, no more; what it still reports was read before."""
    reader.origins[-1].ended_ns = now_ns


def count(reader: Holding, bytes_done: int) -> None:
    """The reader has verified so many bytes in all: those that are new came from the source it was last given."""
    grown = bytes_done - reader.bytes_done
    if grown <= 0:
        return
    reader.bytes_done = bytes_done
    if reader.origins:
        reader.origins[-1].nbytes += grown


def note_route(reader: Holding, route: str) -> None:
    """The engine it reads over, and why that one."""
    reader.route = route
    if reader.origins:
        reader.origins[-1].route = route
