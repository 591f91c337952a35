"""Looks at a replication from outside, again and again: the server's status and the progress blocks that readers see.

It holds three promises: no chain of sources ever closes to a cycle, no watermark of a generation ever falls, and no
chain is longer than the server says it may be. It also remembers who was given whom, and who was reported.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub import messages as m
from tensorhub.client.session import Session
from tensorhub.pipeline.exposure import HEADER_BYTES, Exposure, Header
from tensorhub.server.settings import DEPTH_MAX
from tensorhub.types import NO_GENERATION, Generation
from tests.sim.process import BUFFERS, OPEN_S, Place, Process

if TYPE_CHECKING:
    from tests.sim.world import World

#: Between two looks: a shard takes an eighth of a second, so that hardly a reader is there unseen.
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """A reader told the server that its source failed it."""

    reader: str
    source: str
    reason: str


class Watch:
    """One observer of one world. Violations go to the world's checkers."""

    def __init__(self, world: World, place: Place) -> None:
        self._world = world
        process = Process(world, place, 0)
        self._session: Session = process.session
        #: {generation: the last watermark seen}.
        self._watermarks: dict[Generation, int] = {}
        #: {generation of a source: its seat}, of all that were ever granted.
        self._seats: dict[Generation, str] = {}
        #: Longest chain of readers ever shown: 1 for those that read from a complete copy.
        self.depth = 0
        #: Most fillings shown at one instant.
        self.fillings = 0
        #: (reader, source) of every grant, in order.
        self.grants: list[tuple[str, str]] = []
        self.reports: list[Report] = []
        self._hear, world.network.tap = world.network.tap, self._tap

    async def run(self) -> None:
        """Look until cancelled."""
        await self._session.open(OPEN_S)
        try:
            while True:
                self._look_at_blocks()
                view = await self._session.call(m.Status(None), OPEN_S)
                assert isinstance(view, m.StatusView), view
                self._look_at_graph(view)
                await asyncio.sleep(LOOK_S)
        finally:
            await self._session.close(OPEN_S)

    def granted(self, reader: str) -> list[str]:
        """The sources that a replica's reader was given, in order."""
        return [source for who, source in self.grants if who == reader]

    def blamed(self) -> set[str]:
        """Sources that anybody reported."""
        return {report.source for report in self.reports}

    def _look_at_graph(self, view: m.StatusView) -> None:
        upstream = {str(row.seat): row.upstream for row in view.holdings if row.upstream}
        self.fillings = max(self.fillings, len(upstream))
        depths: dict[str, int] = {}
        for seat in upstream:
            path = list(_path(seat, upstream))
            if path[-1] in upstream:
                self._violated("Survives", f"sources form a cycle: {' <- '.join(path)}")
                return
            depths[seat] = len(path) - 1
        self.depth = max(self.depth, *depths.values(), 0) if depths else self.depth
        if self.depth > DEPTH_MAX:
            self._violated("Bounded", f"a chain of {self.depth} readers; the server's limit is {DEPTH_MAX}")

    def _look_at_blocks(self) -> None:
        for process in self._world.processes.values():
            slot = None if process.dead else process.member.slots.get(BUFFERS)
            if slot is None:
                continue
            header = Header.unpack(ctypes.string_at(Exposure.unpack(slot.holding.exposure).block, HEADER_BYTES))
            if header is None:
                self._violated("No false progress", f"{process.name} shows a torn progress block")
            elif header.generation != NO_GENERATION:
                before = self._watermarks.get(header.generation, 0)
                if header.watermark < before:
                    self._violated("No false progress", f"{process.name} fell from {before} to {header.watermark}")
                self._watermarks[header.generation] = header.watermark

    def _tap(self, process: Process, message: m.Request | m.Reply | m.Notice) -> None:
        match message:
            case m.Granted(source=source):
                self._seats[source.generation] = str(source.seat.replica)
                self.grants.append((str(process.seat.replica), str(source.seat.replica)))
            case m.Reroute(source=generation, reason=reason):
                source = self._seats.get(generation, "?")
                self.reports.append(Report(str(process.seat.replica), source, reason))
        self._hear(process, message)

    def _violated(self, guarantee: str, story: str) -> None:
        self._world.trace.add("VIOLATION", f"{guarantee}: {story}")
        self._world.checkers.violations.append(f"{guarantee} violated: {story}")


def _path(seat: str, upstream: dict[str, str]) -> Iterator[str]:
    """A seat and its sources upwards, to one without a source or to the first that comes twice."""
    seen: set[str] = set()
    while seat not in seen:
        yield seat
        seen.add(seat)
        if seat not in upstream:
            return
        seat = upstream[seat]
    yield seat
