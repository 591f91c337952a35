"""Runs one operation with one failure in it, lets the dust settle, and says what is wrong then.

Everything happens on virtual time in a world of its own, so that a run is the same each time; the next operation of
every process that is left, and of a successor of one that is not, must succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

from tensorhub.client.slot import State
from tensorhub.errors import Broken
from tensorhub.types import Latest, Location, ModelKey, ReplicaId, Seat
from tests.leaks import aftermath
from tests.leaks.injection import ERRORS, FailingEngine, Injected, Injection, Mode
from tests.leaks.operations import CALL_S, LATE, RELAY, TRAINER, Operation, Stage
from tests.sim.content import Layout
from tests.sim.process import Place, Process
from tests.sim.server import LEASE_S
from tests.sim.strands import run_stranded
from tests.sim.world import World

MODEL = ModelKey("job", "actor")
LAYOUT = Layout(1, 0, (("bias", 64), ("embed", 65_536), ("empty", 0), ("weight", 160_000)), (("head", "embed"),))
#: A call has ended by then, whatever has happened; and all that it left to be said is said.
END_S = 4 * CALL_S
SETTLE_S = 3 * LEASE_S
STALL_S = 1.0
#: How long there is no server when it dies.
DOWN_S = 0.5
#: The version with which everybody must be able to go on.
NEXT = 9
#: {name: what happens at a suspension, or nothing there but an error of the engine}.
WAYS: dict[str, tuple[Mode | None, Callable[[], BaseException]]] = {
    **{mode.value: (mode, Injected) for mode in Mode},
    **{f"engine {name}": (None, error) for name, error in ERRORS.items()},
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one run."""

    #: Where the failure could have been, in order, and where it was; "" for none.
    sites: list[str]
    struck: str
    outcome: BaseException | None
    found: list[str]


def run(operation: Operation, way: str, at: int) -> Verdict:
    """One operation that fails in one of the `WAYS`, at the place of that number; 0 for none, to count them."""
    mode, error = WAYS[way]
    verdict: Verdict = run_stranded(_run(operation, Injection(mode, at, error)))
    return verdict


async def _run(operation: Operation, injection: Injection) -> Verdict:
    loop = asyncio.get_running_loop()
    loop.set_task_factory(injection.make_task)
    world = World(0, echo=False, check_every=4, stall_s=STALL_S)
    world.plane.bytes_per_s, world.digest_lateness_s = 4e6, 0.001
    unheard: list[str] = []
    loop.set_exception_handler(lambda _, context: unheard.append(f"unheard: {context}"))
    world.places = [_place(*who) for who in (("trainer", 0), ("reader", 0), ("relay", 0), ("late", 0))]
    cast = [_process(world, place, injection) for place in world.places]
    stage = Stage(world, cast)
    victim = cast[operation.victim]
    for process in cast[:LATE]:
        await stage.must(process, process.start())
    await operation.prepare(stage)
    injection.on_close = lambda: stage.meanwhile(victim, victim.member.close(CALL_S))
    injection.on_restart = partial(copy_context().run, _restart, stage)
    injection.arm(victim.strand)
    injection.main = victim.strand.spawn(operation.act(stage, victim))
    await asyncio.wait([injection.main], timeout=END_S)
    injection.disarm()
    found = [] if injection.main.done() else ["it did not end"]
    outcome = _outcome(injection.main)
    if stage.beside:
        await asyncio.wait(stage.beside, timeout=END_S)
    world.plane.rules.clear()
    await asyncio.sleep(SETTLE_S)
    found += await _look(stage, victim)
    found += await _go_on(stage, injection)
    for process in stage.cast:
        if process.started:
            await stage.do(process, process.stop())
    await asyncio.sleep(SETTLE_S)
    for process in {*stage.cast, victim}:
        found += aftermath.unheard(process) + aftermath.closed(process)
    found += aftermath.emptied(world)
    await world.end()
    return Verdict(injection.sites, injection.struck, outcome, found + unheard)


def _restart(stage: Stage) -> None:
    """In the context of the world: no process owns the server."""
    stage.beside.append(asyncio.ensure_future(stage.world.restart_server(DOWN_S)))


def _outcome(main: asyncio.Task[object]) -> BaseException | None:
    if not main.done():
        return None
    return asyncio.CancelledError() if main.cancelled() else main.exception()


async def _look(stage: Stage, victim: Process) -> list[str]:
    found = []
    observer = stage.cast[RELAY]
    if victim.session._ended is None and victim.started:
        if victim.member.closed:
            found += aftermath.registrations(victim, ())
        else:
            found += aftermath.idle(stage.world, victim)
    return found + await aftermath.server(observer, [process for process in stage.cast if process.started])


async def _go_on(stage: Stage, injection: Injection) -> list[str]:
    """Whoever cannot be used any more is closed, and has a successor; then all move to the next version."""
    for seat, process in enumerate(stage.cast):
        if not process.is_usable or process.session._ended is not None:
            if process.started:
                await stage.do(process, process.stop())
                found = aftermath.closed(process)
                if found:
                    return found
            stage.cast[seat] = _process(stage.world, process.place, injection)
            await stage.must(stage.cast[seat], stage.cast[seat].start())
        elif process.state is State.SUSPENDED:
            process.member.resume([process.buffers])
    trainer = stage.cast[TRAINER]
    if trainer.state in aftermath.SHOWN:
        outcome = await stage.do(trainer, trainer.unpublish(CALL_S, abandon=False))
        if isinstance(outcome, BaseException) and not isinstance(outcome, Broken):
            return [f"unpublish afterwards: {outcome!r}"]
    try:
        await stage.publish(NEXT, "background")
        for process in stage.cast[1:]:
            await stage.must(process, process.replicate(Latest(), CALL_S, None))
            wrong = process.buffers.wrong(NEXT)
            if process.version != NEXT or wrong is not None:
                return [f"{process.name} afterwards holds {process.version}: {wrong}"]
    except AssertionError as error:
        return [str(error)]
    return []


def _process(world: World, place: Place, injection: Injection) -> Process:
    process = world.place_anew(place)
    process.member.engines[:] = [FailingEngine(process.engine, injection)]
    return process


def _place(replica: str, shard: int) -> Place:
    location = Location(("dc1", "r1" if replica in ("reader", "relay") else "r2", replica))
    return Place(Seat(MODEL, ReplicaId(replica), shard), 1, LAYOUT, replica == "trainer", False, location)


def places(operation: Operation, way: str) -> list[str]:
    """The sites at which a failure of that kind can strike."""
    counted = run(operation, way, 0)
    if counted.outcome is not None or counted.found:
        raise AssertionError(f"{operation.name} fails without a failure: {counted.outcome!r} {counted.found}")
    return counted.sites
