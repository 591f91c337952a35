"""What nobody may lose when the server dies and comes back empty: bytes that were read, decisions, the newest version.

It watches what calls returned, what was read, and who was back when; it looks into no server. What two servers at once
do to `latest` and to a drain is not judged here: neither can know of the other.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorhub import messages as m
from tensorhub.client.slot import State
from tensorhub.errors import BadRequest, LeaseLost, OutcomeUnknown, ServerUnavailable, TensorHubError
from tensorhub.pipeline.manifest import Manifest
from tensorhub.types import ModelKey
from tests.sim.marks import Mark
from tests.sim.server import SETTINGS
from tests.sim.trace import told

if TYPE_CHECKING:
    from tests.sim.checkers import Watch
    from tests.sim.process import Process
    from tests.sim.world import World

DIGEST_BYTES = 8
#: A source that somebody reported is offered to nobody for a while; what it holds may then be missed.
QUARANTINE_S = SETTINGS.quarantine_ns / 1e9 + 2.0

#: How a replicate ends that a loss of the server has interrupted, when its own time is not over.
INTERRUPTIONS = (ServerUnavailable, LeaseLost, OutcomeUnknown, BadRequest)
MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """A call that was under way when the server died; `target` is what its process was being filled with then."""

    target: int | None


@dataclass(frozen=True, slots=True)
class Shown:
    """A version that a process holds and shows, since when, and how long it had stood still by then."""

    version: int
    since_s: float
    frozen_s: float


@dataclass(slots=True)
class Return:
    """Who is back with a new server: when it was born, and when the first of whom holds something older, and of whom
    holds the newest version there was."""

    newest: int
    older_s: float | None = None
    newest_s: float | None = None


class Lives:
    """The checkers of a world that think of its server's lives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._crossings: dict[Watch, Crossing] = {}
        #: {(model, replica): what some of its shards, not all, were being filled with when the server died}.
        self._half: dict[tuple[ModelKey, str], int] = {}
        self._shown: dict[Process, Shown] = {}
        #: {controller: the newest version that it was given as the latest}.
        self._seen: dict[tuple[ModelKey, str], int] = {}
        self._returns: dict[ModelKey, Return] = {}
        #: Processes to whom something happened: what they hold, the server may have lost sight of.
        self._disturbed: set[Process] = set()
        self._reported_s = -QUARANTINE_S
        self._was_split = False

    # ------------------------------------------------------------ what happens

    def died(self) -> None:
        """The server dies now: what is under way crosses from one life to the next."""
        processes = self._world.processes.values()
        for watch in self._world.checkers.running:
            self._crossings[watch] = Crossing(_target(watch.process))
        for key in {(process.seat.model, str(process.seat.replica)) for process in processes}:
            shards = [process for process in processes if (process.seat.model, str(process.seat.replica)) == key]
            targets = {_target(process) for process in shards}
            if len(targets) == 2 and None in targets:
                self._half[key] = next(target for target in targets if target is not None)
        for model in {process.seat.model for process in processes}:
            held = [shown.version for process, shown in self._shown.items() if process.seat.model == model]
            self._returns[model] = Return(max(held, default=0))

    def split(self) -> None:
        self._was_split = True

    def disturbed(self, process: Process) -> None:
        self._disturbed.add(process)

    def heard(self, process: Process, message: m.Request | m.Reply | m.Notice) -> None:
        match message:
            case m.Reroute():
                self._reported_s = self._world.now_s()
            case m.Welcome():
                back, shown = self._returns.get(process.seat.model), self._shown.get(process)
                if back is not None and shown is not None and shown.version == back.newest:
                    back.newest_s = back.newest_s or self._world.now_s()
                elif back is not None and shown is not None:
                    back.older_s = back.older_s or self._world.now_s()

    def published(self, process: Process, version: int) -> None:
        self._show(process, version)

    def hides(self, process: Process) -> None:
        """It is about to hold something else, or nothing."""
        self._shown.pop(process, None)

    # ------------------------------------------------------------ what calls returned

    def replicated(self, process: Process, watch: Watch, version: int, *, is_whole: bool) -> None:
        """A replicate has returned; `is_whole` says that it moved all of the version's tensors."""
        if is_whole:
            self._show(process, version)
        crossing = self._crossings.pop(watch, None)
        if crossing is None:
            return
        if crossing.target is None:
            if is_whole:
                self._world.marks.hit(Mark.WAITED_THROUGH_RESTART)
            return
        if crossing.target != version:
            self._violated(process, f"was filled with version {crossing.target} and returned {version}")
        if is_whole:
            self._judge_bytes(process, watch)

    def _judge_bytes(self, process: Process, watch: Watch) -> None:
        """Nothing is read again because of the restart. Where a source failed, its last batches are."""
        plane = self._world.plane
        asked = plane.asked.get(process, 0) - watch.asked
        again = asked - _stream_bytes(process.buffers.manifest)
        if again <= 0:
            self._world.marks.hit(Mark.FLOWED_THROUGH_RESTART)
        elif plane.wasted.get(process, 0) == watch.wasted and self._reported_s < watch.began_s:
            self._violated(process, f"read {again} bytes again, and no source had failed it")

    def failed(self, process: Process, watch: Watch, error: TensorHubError) -> None:
        """The server's death interrupts nothing that is in flight, if nothing else had happened to anybody."""
        crossing = self._crossings.pop(watch, None)
        if crossing is None or crossing.target is None or self._disturbed or self._was_split or self._reported_s > 0:
            return
        took_s = self._world.now_s() - watch.began_s
        if isinstance(error, INTERRUPTIONS) and took_s < watch.timeout_s - MARGIN_S:
            self._violated(
                process, f"filling was interrupted after {took_s:.2f} of {watch.timeout_s:g} s: {told(error)}"
            )

    def unpublished(self, watch: Watch) -> None:
        """An unpublish that waits for its readers has returned well."""
        if self._crossings.pop(watch, None) is not None:
            self._world.marks.hit(Mark.DRAINED_THROUGH_RESTART)

    def group(self, versions: dict[str, int]) -> None:
        """All shards that asked have returned."""
        processes = [self._world.processes[name] for name in versions]
        if processes:
            seat = processes[0].seat
            target = self._half.pop((seat.model, str(seat.replica)), None)
            if target is not None and len(versions) == processes[0].place.shards and set(versions.values()) == {target}:
                self._world.marks.hit(Mark.DECISION_KEPT)

    def latest(self, process: Process, watch: Watch, version: int) -> None:
        """`latest` never goes backwards while what was the latest before is still held, whole and undisturbed."""
        key = process.seat.model, str(process.seat.replica)
        seen = self._seen.get(key, 0)
        self._seen[key] = max(seen, version)
        if version < seen and self._is_readable(process, seen, watch.began_s):
            self._violated(process, f"got version {version} as the latest; had seen {seen}, which is still held")
        back = self._returns.get(process.seat.model)
        if back is None or back.older_s is None or version < back.newest:
            return
        if watch.began_s < (back.newest_s or watch.began_s) and back.older_s < (back.newest_s or 0.0):
            self._world.marks.hit(Mark.LATEST_HELD)

    def _is_readable(self, reader: Process, version: int, since_s: float) -> bool:
        """Whether others have held every shard since then, in plain sight."""
        if self._was_split or self._world.now_s() - self._reported_s < QUARANTINE_S:
            return False
        loop_s = asyncio.get_running_loop().time()
        holders = {
            process.seat.shard
            for process, shown in self._shown.items()
            if (process.seat.model, shown.version) == (reader.seat.model, version)
            and process.seat.replica != reader.seat.replica
            and shown.since_s < since_s
            and not (process.dead or process.replaced or process in self._disturbed)
            and process.strand.frozen_s(loop_s) == shown.frozen_s
            and process.state in (State.PUBLISHED, State.COMPLETE)
        }
        return len(holders) == reader.place.shards

    def _show(self, process: Process, version: int) -> None:
        frozen_s = process.strand.frozen_s(asyncio.get_running_loop().time())
        self._shown[process] = Shown(version, self._world.now_s(), frozen_s)

    def _violated(self, process: Process, story: str) -> None:
        self._world.checkers.violated("Survives", process, f"{story}, over the server's death")


def _target(process: Process) -> int | None:
    """What it is being filled with."""
    slot = process.member.slots.get("a")
    return None if slot is None or slot.state is not State.FILLING or slot.target is None else slot.target.number


def _stream_bytes(manifest: Manifest) -> int:
    return manifest.stream_bytes + DIGEST_BYTES * manifest.chunks
