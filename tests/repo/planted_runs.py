"""How a layer is asked whether it sees a planted mistake: one test of it, one small exploration, one seed, one story.

Every run here passes in silence without a mistake, and says by an `AssertionError` what it has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from hypothesis import Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tensorhub.server import placement
from tests.conformance.sources import CASES, SourceHere
from tests.model.test_server_model import ServerModel
from tests.sim import crowd as crowds
from tests.sim.crowd import Crowd, gathered
from tests.sim.run import simulate
from tests.sim.strands import run_stranded
from tests.sim.test_crowd import chained, lies
from tests.support.courses import Place, Shard, Vessel
from tests.unit.pipeline import test_filling

#: The machine's own invariants stay out of it: it is the watcher that must see what anybody can see.
NEVER = 1 << 30
#: Histories of the twin, from one seed: enough for each mistake that is planted for it.
HISTORIES = 12

Run = Callable[[], None]
Story = Callable[[Crowd], Awaitable[None]]


def the_twin() -> None:
    """A few random histories, every reply predicted."""
    chosen = settings(
        max_examples=HISTORIES, stateful_step_count=30, deadline=None, database=None, phases=[Phase.generate]
    )
    run_state_machine_as_test(seed(1)(ServerModel), settings=chosen)


def a_seed(number: int) -> Run:
    """One run of the simulation; what its checkers say of it."""

    def run() -> None:
        violations = simulate(number).violations
        assert not violations, "\n".join(violations)

    return run


def a_story(story: Story) -> Run:
    """A trainer and its readers; what the checkers say of what happens to them."""

    async def main() -> list[str]:
        names = ["r1", "r2", "r3", *(f"late-{number}" for number in range(12))]
        async with gathered(0, names, check_every=NEVER, judged=False) as crowd:
            await crowd.publish()
            await story(crowd)
        return list(crowd.world.checkers.violations)

    def run() -> None:
        with crowds.scaled():
            violations: list[str] = run_stranded(main())
        assert not violations, "\n".join(violations)

    return run


def an_engine(test: Callable[..., None], *args: object) -> Run:
    """One test of the suite of engines, over the engine within one process."""

    def run() -> None:
        case = CASES["memory"]
        source, engine = case.open_source(), case.open_engine()
        try:
            test(case, engine, source, *args)
        finally:
            source.end()
            asyncio.run(engine.close())

    return run


def a_filling(test: Callable[[Shard, Vessel], None]) -> Run:
    """One test of fillings, from a shard held here."""

    def run() -> None:
        memory = SourceHere()
        try:
            shard = Shard(memory, test_filling.SIZES, manifest=test_filling.MANIFEST.digest)
            vessel = Vessel(test_filling.MANIFEST, Place(test_filling.SIZES), stall_s=test_filling.STALL_S)
            test(shard, vessel)
        finally:
            memory.end()

    return run


# ---------------------------------------------------------------- stories of the graph


async def orphans(crowd: Crowd) -> None:
    """Two readers in a chain lose the complete source."""
    tasks = await chained(crowd, ("r1", "r2"))
    await crowd.process("trainer").kill()
    await asyncio.wait(tasks, timeout=2.0)


async def liar(crowd: Crowd) -> None:
    """The second relay of a chain begins to serve wrong bytes."""
    tasks = await chained(crowd, ("r1", "r2", "r3"))
    crowd.world.plane.rules.append(lies("r1"))
    await asyncio.wait(tasks, timeout=20.0)


async def sick(crowd: Crowd) -> None:
    """A complete copy lies, and twelve readers come one after the other."""
    await crowd.read("r1")
    crowd.world.plane.rules.append(lies("r1"))
    coming = []
    for number in range(12):
        coming.append(asyncio.create_task(crowd.read(f"late-{number}")))
        await asyncio.sleep(0.02)
    await asyncio.wait(coming, timeout=20.0)
    given = sum(source == "r1" for _, source in crowd.watch.grants)
    if given > placement.READERS_PER_SOURCE_MAX:
        crowd.world.checkers.violations.append(f"a sick source was given to {given} readers")
