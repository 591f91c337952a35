"""One seed from beginning to end: chaos, in which nothing may be wrong; then heal and drain, in which all must work.

It decides the phases and what counts as the end. The result says everything a caller needs: violations, marks, trace.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tensorhub.client import publication
from tensorhub.pipeline import follow
from tensorhub.types import Latest
from tests.sim.faults import Fault, draw_plan, inject
from tests.sim.marks import Mark
from tests.sim.process import Process
from tests.sim.server import LEASE_S
from tests.sim.strands import run_stranded
from tests.sim.workload import Rollout, Trainer, controllers
from tests.sim.world import World

CHAOS_S = 8.0
#: Longest a round of any driver may outlast the chaos: a long replicate, its group's margin, a stop in the midst.
CALM_S = 60.0
#: After the last fault, until the server must have forgotten the dead and let the quarantined back.
SETTLE_S = LEASE_S + 2.0
#: Attempts at the last version: one whose source is still busy, one that heals, one more.
ATTEMPTS = 3
#: How often a publisher looks at its digests, and readers at a source that does not move: here a look costs what real
#: ones do, and nothing comes of most. A chunk takes 16 ms of the fastest link.
LOOK_S = 0.05
POLL_S = (0.004, 0.1)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a seed."""

    seed: int
    plan: list[str]
    violations: list[str]
    marks: dict[Mark, int]
    lines: list[str]
    digest: str
    #: Callbacks that the loop ran, and how far its clock came.
    events: int
    virtual_s: float


def simulate(seed: int, *, echo: bool = False) -> Result:
    """Run one seed."""
    with _scaled():
        result: Result = run_stranded(_simulate(seed, echo))
    return result


@contextmanager
def _scaled() -> Iterator[None]:
    before = publication.LOOK_S, follow.POLL_S_MIN, follow.POLL_S_MAX, follow.POLL_BUSY_S
    publication.LOOK_S = LOOK_S
    (follow.POLL_S_MIN, follow.POLL_S_MAX), follow.POLL_BUSY_S = POLL_S, POLL_S[0]
    try:
        yield
    finally:
        publication.LOOK_S, follow.POLL_S_MIN, follow.POLL_S_MAX, follow.POLL_BUSY_S = before


async def _simulate(seed: int, echo: bool) -> Result:
    world = World(seed, echo=echo)
    plan = draw_plan(random.Random(f"{seed} faults"), world.places, CHAOS_S)
    world.trace.add("WORLD", ", ".join(place.name for place in world.places))
    for fault in plan:
        world.trace.add("PLAN", str(fault))
    await _run(world, plan)
    return Result(
        seed,
        [str(fault) for fault in plan],
        list(world.checkers.violations),
        dict(world.marks.counts),
        world.trace.lines,
        world.trace.digest,
        world.events(),
        world.now_s(),
    )


async def _run(world: World, plan: list[Fault]) -> None:
    trainers, rollouts = controllers(world)
    drivers = [asyncio.create_task(each.run()) for each in trainers]
    drivers += [asyncio.create_task(each.run()) for each in rollouts]
    faults = [asyncio.create_task(inject(world, fault)) for fault in plan]
    try:
        await asyncio.sleep(CHAOS_S)
        world.check()
        await _calm(world, faults, drivers)
        world.check()
        if not world.checkers.violations:
            await _drain(world, trainers, rollouts)
            world.check()
        if not world.checkers.violations:
            await _leave(world)
    finally:
        for task in [*drivers, *faults]:
            task.cancel()
        errors = await asyncio.gather(*drivers, *faults, return_exceptions=True)
        await world.end()
    world.checkers.crashed([error for error in errors if isinstance(error, Exception)])
    if not world.checkers.violations:
        world.checkers.nothing_left(asyncio.all_tasks() - {asyncio.current_task()})


async def _calm(world: World, faults: list[asyncio.Task[None]], drivers: list[asyncio.Task[None]]) -> None:
    """No more faults; what is under way comes to its end, good or bad."""
    world.trace.add("WORLD", "heals")
    world.chaos = False
    await asyncio.wait(faults, timeout=CALM_S) if faults else None
    world.plane.rules.clear()
    _, late = await asyncio.wait(drivers, timeout=CALM_S)
    if late:
        world.checkers.stuck()


async def _drain(world: World, trainers: list[Trainer], rollouts: list[Rollout]) -> None:
    """Everybody gets the last version; then every publisher gets its buffers back. Who has lost its seat is ended."""
    lost = [process for process in world.processes.values() if process.started and not process.is_usable]
    for process in [*world.replaced, *lost]:
        await process.kill()
    await asyncio.sleep(SETTLE_S)
    for trainer in trainers:
        processes = await world.living(trainer.places)
        for _ in range(ATTEMPTS):
            if await trainer.step(processes, "background"):
                break
        else:
            world.checkers.not_live(trainer.name, "cannot publish in a world without faults")
    await asyncio.gather(*(_follow(world, rollout, trainers) for rollout in rollouts))
    for trainer in trainers:
        for process in await world.living(trainer.places):
            outcome = await trainer.unpublish(process, 1, 30.0)
            if not outcome.ok:
                world.checkers.not_live(trainer.name, f"cannot unpublish: {outcome.error}")


async def _follow(world: World, rollout: Rollout, trainers: list[Trainer]) -> None:
    model = rollout.places[0].seat.model
    last = next(trainer.version for trainer in trainers if trainer.places[0].seat.model == model)
    for _ in range(ATTEMPTS):
        processes = await world.living(rollout.places)
        await rollout.replicate(processes, Latest(), 30.0)
        if {process.version for process in processes} == {last}:
            return
    world.checkers.not_live(rollout.name, f"does not get version {last} in a world without faults")


async def _leave(world: World) -> None:
    """The server knows exactly those who live; then all say goodbye, and it knows nobody."""
    living: list[Process] = [process for process in world.processes.values() if not process.dead]
    await world.checkers.server_knows(living)
    for process in living:
        await world.perform(process, "stop", process.stop, 30.0)
    world.checkers.server_is_empty()
