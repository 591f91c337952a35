"""The guarantees of `docs/guarantees.md`, each watched from outside: what calls returned or raised, and what the
registered memory held at that instant. Knows nothing of how the code goes about it.

A violation is recorded, not raised: it must not change the run that it describes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorhub import messages as m
from tensorhub.client.results import Replication
from tensorhub.client.slot import State
from tensorhub.errors import Broken, ContractBroken, LeaseLost, TensorHubError
from tests.sim.lives import Lives
from tests.sim.marks import Mark
from tests.sim.trace import told

if TYPE_CHECKING:
    from tests.sim.process import Process
    from tests.sim.world import World

#: Beyond a call's own deadline: the reply's margin, ending a commit that did not come, and telling of a failure.
MARGIN_S = 6.0


@dataclass(eq=False)
class Watch:
    """A call under way."""

    process: Process
    what: str
    began_s: float
    frozen_s: float
    timeout_s: float
    #: Bytes that its process had asked for, and asked for in vain, before.
    asked: int
    wasted: int
    #: Publishers whose unpublish returned while this call was reading from them.
    suspects: list[str] = field(default_factory=list)
    #: Publishers that abandoned it: what they do later is no news to it, if it has not heard of that yet.
    abandoned_by: list[Process] = field(default_factory=list)


@dataclass(eq=False)
class Before:
    """What a process showed before a replicate."""

    version: int | None
    state: State
    #: How its last replicate ended is not known: the next call asks again, and may find that it was a success.
    is_unknown: bool


class Checkers:
    """All checkers of a world, and what they found."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[str] = []
        #: Calls under way.
        self.running: dict[Watch, None] = {}
        self.lives = Lives(world)
        #: {process: (version, shown) of what it published and then spoiled}.
        self._spoiled: dict[Process, int] = {}
        self._published: dict[Process, int] = {}
        #: {process: the lease counts from here}; it was stopped for longer than its lease.
        self._zombies: set[Process] = set()

    def violated(self, guarantee: str, process: Process, story: str) -> None:
        line = f"{guarantee} violated by {process.name}: {story}"
        self._world.trace.add("VIOLATION", line)
        self.violations.append(line)

    # ------------------------------------------------------------ Bounded

    def began(self, process: Process, what: str, timeout_s: float) -> Watch:
        now_s = self._world.now_s()
        frozen_s, plane = process.strand.frozen_s(asyncio.get_running_loop().time()), self._world.plane
        asked, wasted = plane.asked.get(process, 0), plane.wasted.get(process, 0)
        watch = Watch(process, what, now_s, frozen_s, timeout_s, asked, wasted)
        self.running[watch] = None
        return watch

    def ended(self, watch: Watch, error: TensorHubError | None) -> None:
        """Every call ends by its deadline, or a little later.

        Drained: no reader with a live lease was overtaken by an unpublish. A reader whose lease has run out by the end
        of its call is another matter: it had a lease only as far as it knew; the server, which waits for no longer
        than a lease, may have known better, and the reader fences itself.
        """
        del self.running[watch]
        if watch.process.dead:
            return
        if isinstance(error, Broken):
            self.violated("Broken", watch.process, f"{watch.what}: {told(error)}")
        if watch.suspects and not isinstance(error, LeaseLost):
            how = "succeeded" if error is None else told(error)
            self.violated("Drained", watch.process, f"{watch.suspects} unpublished while it was reading; {how}")
        frozen_s = watch.process.strand.frozen_s(asyncio.get_running_loop().time()) - watch.frozen_s
        took_s = self._world.now_s() - watch.began_s - frozen_s
        if took_s > watch.timeout_s + MARGIN_S:
            self.violated("Bounded", watch.process, f"{watch.what} took {took_s:.2f} s of {watch.timeout_s:.2f} s")

    def broke(self, process: Process, what: str, error: BaseException | None) -> None:
        """An error that is no `TensorHubError` is a mistake of ours."""
        if error is not None and not process.dead:
            self.violated("Bounded", process, f"{what} raised {error!r}")

    def broken(self, broken: Broken) -> None:
        """The machine's own promises."""
        self._world.trace.add("VIOLATION", f"Broken: {told(broken)}")
        self.violations.append(f"Broken violated by the server: {told(broken)}")

    def unheard(self, context: dict[str, object]) -> None:
        """An error that nobody looks at: a task that died alone, a callback that raised."""
        line = f"unheard: {context.get('message')}: {context.get('exception')!r}"
        self._world.trace.add("VIOLATION", line)
        self.violations.append(line)

    def call_of(self, process: Process) -> Watch | None:
        """The call that a process has under way: its user makes one at a time."""
        return next((watch for watch in self.running if watch.process is process), None)

    def unfinished(self) -> list[str]:
        """Calls that have not ended."""
        return [f"{watch.process.name} {watch.what} since {watch.began_s:.2f}s" for watch in self.running]

    # ------------------------------------------------------------ publishing

    def published(self, process: Process, version: int) -> None:
        self._published[process] = version
        self._spoiled.pop(process, None)
        self.lives.published(process, version)

    def scribbled(self, process: Process) -> None:
        """A publisher breaks its contract, if it shows something."""
        version = self._published.get(process)
        if version is not None and process.state is State.PUBLISHED and not process.member.slots["a"].running:
            process.scribble(version)
            self._spoiled[process] = version

    def unpublished(self, process: Process, *, abandon: bool, waited_s: float, error: TensorHubError | None) -> None:
        """An unpublish has returned: the memory is the user's again."""
        version = self._published.pop(process, None)
        if self._spoiled.pop(process, None) is not None:
            if isinstance(error, ContractBroken):
                self._world.marks.hit(Mark.CONTRACT_BROKEN)
            else:
                self.violated(
                    "Exact", process, f"version {version} was written to while published, and nobody was told"
                )
        if abandon:
            for reading in self._world.plane.reading.values():
                call = self.call_of(reading.reader)
                if reading.source is process:
                    self._world.marks.hit(Mark.ABANDONED)
                    if call is not None:
                        call.abandoned_by.append(process)
            return
        for reading in self._world.plane.reading.values():
            reader = reading.reader
            live = reader.lease_is_live and reader.session.lapses == reading.lapses
            # Two servers that both believe to be the one cannot know of each other's readers: those read untorn.
            live = live and reader.session.epoch == process.session.epoch
            call = self.call_of(reader)
            if reading.source is process and live and call is not None and process not in call.abandoned_by:
                call.suspects.append(process.name)
        if waited_s > 0.005:
            self._world.marks.hit(Mark.DRAIN_WAITED)
        if error is None and (call := self.call_of(process)) is not None:
            self.lives.unpublished(call)

    # ------------------------------------------------------------ serving

    def served(self, source: Process) -> None:
        """Watermarks rise only over verified bytes: what a filling shows is the version's, before it is all there."""
        slot = source.member.slots["a"]
        if slot.target is not None and slot.verified and slot.holding.watermark:
            end = int(slot.holding.manifest.chunk_ends[slot.holding.watermark - 1])
            wrong = source.buffers.wrong_prefix(slot.target.number, end)
            if wrong is not None:
                self.violated("No false progress", source, f"serves a prefix of {end} bytes, in which {wrong}")

    # ------------------------------------------------------------ replicating

    def before(self, process: Process) -> Before:
        self.lives.hides(process)
        return Before(process.version, process.state, process.member.slots["a"].pending is not None)

    def replicated(
        self, process: Process, before: Before, got: Replication, only: Sequence[str] | None, *, latest: bool = False
    ) -> None:
        """Exact, Untorn: judged the instant the call returns. `latest` says that this is what was asked for."""
        wrong = process.buffers.wrong(got.version, only)
        if wrong is not None:
            self.violated("Exact", process, f"replicate returned version {got.version}, but {wrong}")
        shown = None if only is not None and not got.already_held else got.version
        if process.version != shown:
            self.violated("No false progress", process, f"shows version {process.version}, replicated {got.version}")
        if only is None:
            self._siblings_whole(process, got.version)
        if (call := self.call_of(process)) is not None:
            self.lives.replicated(process, call, got.version, is_whole=only is None and not got.already_held)
            if latest:
                self.lives.latest(process, call, got.version)
        marks = self._world.marks
        if before.state is State.TORN:
            marks.hit(Mark.TORN_HEALED)
        if got.already_held:
            marks.hit(Mark.ALREADY_HELD)
        if only is not None:
            marks.hit(Mark.SUBSET)
        if len(got.sources) > 1:
            marks.hit(Mark.REROUTED)
            used = [f"{process.seat.model.name[0]}.{use.replica}#{use.shard}" for use in got.sources[:-1]]
            if any(name in self._world.processes and self._world.processes[name].dead for name in used):
                marks.hit(Mark.SOURCE_KILLED)

    def _siblings_whole(self, process: Process, version: int) -> None:
        """A commit says that every shard is done: each has all bytes at this instant, whatever it is told later."""
        for place in self._world.places:
            sibling = self._world.processes.get(place.name)
            same = (place.seat.model, place.seat.replica) == (process.seat.model, process.seat.replica)
            if not same or sibling is None or sibling is process or sibling.dead or not sibling.member.slots:
                continue
            if sibling.replaced or any(old.place is place for old in self._world.replaced):
                continue
            wrong = sibling.buffers.wrong(version)
            if wrong is not None:
                self.violated("One version per replica", process, f"returned {version}; {sibling.name}: {wrong}")

    def failed(self, process: Process, before: Before, error: TensorHubError) -> None:
        """No false progress: nothing is shown, or what was there before, with exactly its bytes."""
        shown = process.version
        if process.dead:
            return
        if (call := self.call_of(process)) is not None:
            self.lives.failed(process, call, error)
        if shown is not None:
            wrong = process.buffers.wrong(shown)
            if wrong is not None or (shown != before.version and not before.is_unknown):
                self.violated(
                    "No false progress", process, f"shows {shown} after {told(error)}; before {before.version}: {wrong}"
                )
            else:
                self._world.marks.hit(Mark.PREVIOUS_KEPT)
        if process.buffers.spilled() is not None:
            self.violated("Whole", process, "bytes beside the tensors were written")
        if process in self._zombies:
            self._zombies.discard(process)
            self._world.marks.hit(Mark.ZOMBIE_FAILED)

    def untouched(self, process: Process, before: dict[str, bytes], only: Sequence[str]) -> None:
        """A subset updates only itself."""
        now = process.buffers.contents()
        changed = [name for name in now if name not in only and now[name] != before[name]]
        if changed:
            self.violated("Whole", process, f"replicate(only={list(only)}) also wrote {changed}")

    def group(self, versions: dict[str, int]) -> None:
        """One version per replica: shards of one transaction that returned have returned the same."""
        if len(set(versions.values())) > 1:
            process = self._world.processes[next(iter(versions))]
            self.violated("One version per replica", process, f"shards returned {versions}")
        self.lives.group(versions)

    # ------------------------------------------------------------ what happens to processes

    def killed(self, process: Process) -> None:
        self._published.pop(process, None)
        self._spoiled.pop(process, None)

    def woke(self, process: Process, heart_beat: bool, seconds: float) -> None:
        lease_s = process.session.lease_s
        if process.session.epoch is None or seconds <= lease_s:
            return
        known = process.session.id in self._world.machine.state.sessions
        if heart_beat and known:
            self._world.marks.hit(Mark.GIL_SURVIVED)
        if not heart_beat and process.is_filling:
            self._zombies.add(process)
        if not heart_beat and not known:
            self._world.marks.hit(Mark.LEASE_EXPIRED)

    def heard(self, process: Process, message: m.Request | m.Reply | m.Notice) -> None:
        """Marks for what is only seen on the wire."""
        self.lives.heard(process, message)
        marks = self._world.marks
        match message:
            case m.Reroute(reason=reason) if "does not match its digest" in reason and self._was_lied_to(process):
                marks.hit(Mark.UNCOVERED_LIE)
            case m.TransactionAborted():
                marks.hit(Mark.GROUP_ABORTED)
            case m.Refused(error="DrainTimeout"):
                marks.hit(Mark.DRAIN_TIMED_OUT)
            case m.Hello(epoch=epoch) if epoch:
                marks.hit(Mark.RECONNECTED)
            case m.Refused(error="SeatTaken") if process.replaced:
                marks.hit(Mark.SEAT_LOST)
            case _:
                return

    def _was_lied_to(self, process: Process) -> bool:
        return self._world.plane.lied_to.get(process, 0) > 0

    # ------------------------------------------------------------ the end

    def stuck(self) -> None:
        """Bounded: calls that are still running long after the last fault."""
        for line in self.unfinished() or ["a driver"]:
            self.violations.append(f"Bounded violated: still running long after the last fault: {line}")

    def not_live(self, who: str, story: str) -> None:
        """Survives: when faults stop, everything works again."""
        self._world.trace.add("VIOLATION", f"Survives: {who} {story}")
        self.violations.append(f"Survives violated: {who} {story}")

    def crashed(self, errors: Sequence[Exception]) -> None:
        """The simulation itself, or the server, has failed."""
        servers = [life.crashed() for life in self._world.lives]
        self.violations += [f"broken: {error!r}" for error in [*errors, *servers] if error is not None]

    def nothing_left(self, tasks: set[asyncio.Task[object]]) -> None:
        """Bounded: no task outlives its process."""
        names = sorted(getattr(task.get_coro(), "__qualname__", "?") for task in tasks)
        if names:
            self.violations.append(f"Bounded violated: tasks are left at the end: {', '.join(names)}")

    async def server_knows(self, living: Sequence[Process]) -> None:
        """The server's view is what is alive: no session, holding, reader or wait of anybody else."""
        view = await living[0].session.call(m.Status(None), 10.0)
        if not isinstance(view, m.StatusView):
            self.violations.append(f"Survives violated: Status was answered by {view!r}")
            return
        sessions = {process.session.id: process for process in living}
        known = {session.session for session in view.sessions}
        if known != set(sessions):
            names = sorted(session.host for session in view.sessions if session.session not in sessions)
            self.violations.append(f"Survives violated: the server knows {len(known)} sessions, also {names}")
        places = {process.seat: process for process in living}
        for holding in view.holdings:
            process = places.get(holding.seat)
            shown = None if process is None else process.version
            if shown != holding.version.number or holding.readers or holding.state not in ("complete", "published"):
                self.violations.append(f"Survives violated: the server has {holding}, the process {shown}")
        if view.waiting:
            self.violations.append(f"Survives violated: requests wait in an idle world: {view.waiting}")

    def server_is_empty(self) -> None:
        """Nobody is there, nothing is remembered of them."""
        state = self._world.machine.state
        if state.sessions or state.generations:
            self.violations.append(f"Survives violated: {len(state.sessions)} sessions are left in the server")
