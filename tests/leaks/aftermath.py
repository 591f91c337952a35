"""What must be true of a process and its server some time after anything at all went wrong in it.

Public observations first (what the server shows, what the registered memory holds), then the client's own books:
nothing may run, wait, be registered or be remembered that nobody stands behind. It changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tensorhub import messages as m
from tensorhub.client.slot import Slot, State
from tensorhub.types import NO_GENERATION
from tests.leaks.injection import FailingEngine
from tests.sim.process import BUFFERS, Process
from tests.sim.strands import Strand
from tests.sim.world import World

#: The tasks of an open session in which nothing happens.
OF_A_SESSION = Counter(["_own", "_receive", "_watch_heart"])
#: Registered besides the tensors: progress block, manifest and map.
OF_A_HOLDING = 3
SHOWN = (State.PUBLISHED, State.COMPLETE)


def idle(world: World, process: Process) -> list[str]:
    """What is wrong with a process in which nothing has been called for a while."""
    found = [f"task left: {name}" for name in running(process) - OF_A_SESSION]
    for slot in process.member.slots.values():
        found += _slot(process, slot)
    session = process.session
    found += [f"a call waits: {pending.request}" for pending in session._pending.values()]
    found += [f"a watch is left: {watching.model}" for watching in session._watching.values()]
    found += registrations(process, [slot.holding._registered for slot in process.member.slots.values()])
    found += [f"a read is under way: {reading}" for reading in world.plane.reading.values()]
    found += world.checkers.violations
    return found


def running(process: Process) -> Counter[str]:
    """What runs in a process, by name."""
    names = (getattr(task.get_coro(), "__qualname__", repr(task)) for task in _left(process.strand))
    return Counter(name.rpartition(".")[2] for name in names)


def _slot(process: Process, slot: Slot) -> list[str]:
    found = []
    if slot.running is not None or slot.pull is not None or slot.reading is not None or slot.offered is not None:
        found.append(f"under way: {slot.running} {slot.pull} {slot.reading} {slot.offered}")
    if slot.task is not None and not slot.task.done():
        found.append(f"digests are under way: {slot.task!r}")
    needed = 0 if slot.state is State.SUSPENDED else len(slot.holding.buffers.regions) + OF_A_HOLDING
    if len(slot.holding._registered) != needed:
        found.append(f"{slot.describe()} has {len(slot.holding._registered)} ranges registered of {needed}")
    if slot.state is State.FILLING:
        found.append(f"state {slot.describe()}")
    if (slot.version is not None) != (slot.state in SHOWN):
        found.append(f"state {slot.describe()} and version {slot.version}")
    if slot.version is not None and (wrong := process.buffers.wrong(slot.version.number)) is not None:
        found.append(f"{slot.describe()}: {wrong}")
    is_shown = slot.holding.generation != NO_GENERATION
    if is_shown and slot.state not in SHOWN and slot.pending is None:
        found.append(f"{slot.describe()} shows a generation")
    if process.buffers.spilled() is not None:
        found.append("bytes beside the tensors were written")
    return found


def registrations(process: Process, expected: Iterable[Iterable[tuple[Any, int, int]]]) -> list[str]:
    """Registered is what the holdings of the process need, each as often as it is needed."""
    engine = process.member.engines[0]
    if not isinstance(engine, FailingEngine):
        raise TypeError("this process has another engine")
    want = Counter((address, nbytes) for held in expected for _, address, nbytes in held)
    have = Counter(engine.registered)
    return [] if want == have else [f"registered {len(have - want)} too many, {len(want - have)} too few"]


async def server(observer: Process, processes: list[Process]) -> list[str]:
    """What the server knows that is not so."""
    view = await observer.session.call(m.Status(None), 10.0)
    if not isinstance(view, m.StatusView):
        return [f"Status was answered by {view!r}"]
    found = [f"the server has a request wait: {wait}" for wait in view.waiting]
    seats = {process.seat: process for process in processes}
    shown = set()
    for holding in view.holdings:
        process = seats.get(holding.seat)
        version = None if process is None else process.version
        if version != holding.version.number:
            found.append(f"the server has {holding.seat} {holding.state} {holding.version}, the process {version}")
        if holding.readers:
            found.append(f"the server has readers of {holding.seat}: {holding.readers}")
        shown.add(holding.seat)
    for process in processes:
        slot = process.member.slots.get(BUFFERS)
        is_there = process.is_usable and process.session._ended is None
        if slot is None or not is_there or process.seat in shown:
            continue
        if slot.state in SHOWN and not slot.hidden:
            found.append(f"{process.seat} is {slot.describe()}, and the server does not know")
    sessions = {process.session.id for process in processes if process.session._ended is None}
    strangers = [session.host for session in view.sessions if session.session not in sessions]
    return found + [f"the server knows a session of {host}" for host in strangers]


def closed(process: Process) -> list[str]:
    """What is left of a process that was closed in order."""
    found = [f"task left after close: {name}" for name in running(process)]
    found += [f"heart left after close: {task!r}" for task in _left(process.heart)]
    found += registrations(process, ())
    found += [f"connections left: {process.name}"] * bool(process.world.network._open.get(process))
    return found


def unheard(process: Process) -> list[str]:
    """Errors of tasks that nobody has looked at: whoever should have heard of them never will."""
    ended = [task for task in process.strand._tasks if task.done() and getattr(task, "_log_traceback", False)]
    return [f"unheard: {task.get_coro()!r} {task.exception()!r}" for task in ended]


def emptied(world: World) -> list[str]:
    """What a server remembers of a cluster that is gone."""
    state = world.machine.state
    left = {
        "sessions": list(state.sessions),
        "holdings": list(state.generations),
        "awaited": list(state.awaited),
        "models in use": [model for model in state.models if model not in state.idle],
    }
    return [f"the server still has {what}: {things}" for what, things in left.items() if things]


def collected(kinds: tuple[type, ...]) -> Counter[str]:
    """Objects of these kinds that are still referred to."""
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


def _left(strand: Strand) -> list[asyncio.Task[Any]]:
    return [task for task in strand._tasks if not task.done()]
