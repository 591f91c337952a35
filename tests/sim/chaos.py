"""What goes wrong in a crowd, drawn from its seed before anybody comes, and how the crowd gets through it.

Each victim has its own trouble, and no draw depends on how the graph turns out. After the last of it all must work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub.client.results import Replication
from tensorhub.types import Latest
from tests.sim.crowd import REPLICATE_S, Crowd
from tests.sim.faults import Fault, Kind, inject
from tests.sim.memory import LIES, Meddling, Rule
from tests.sim.process import Place
from tests.sim.server import LEASE_S
from tests.sim.workload import Rollout, Trainer
from tests.sim.world import RESTART_S

#: Who failed tries again, so often.
ATTEMPTS = 6
#: What a crowd needs beyond the chaos: pauses of more than a lease, and attempts.
CALM_S = 120.0
#: After the last fault, until the server must have forgotten the dead and those who stood still have noticed.
SETTLE_S = 2 * LEASE_S

#: Of a hundred readers, so many meet this.
KILLED, PAUSED, BETRAYED, LIED_TO, STALLED, SLOWED = 4, 6, 4, 4, 4, 6
#: They all come, and all goes wrong, within this.
CHAOS_S = 1.5


@dataclass(frozen=True, slots=True)
class Slowness:
    """A host whose link has a fraction of the others' rate for a while."""

    at_s: float
    replica: str
    seconds: float
    fraction: float

    def __str__(self) -> str:
        return f"{self.at_s:6.2f}s link x{self.fraction:.2f} {self.replica} for {self.seconds:.2f}s"


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes wrong in a crowd."""

    faults: tuple[Fault, ...]
    slow: tuple[Slowness, ...]
    #: (time, replica, duration): whose weights reach its readers wrong, while it holds them right.
    liars: tuple[tuple[float, str, float], ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.faults, *self.slow, *self.liars)))


def draw_plan(rng: random.Random, readers: Sequence[Place]) -> Plan:
    """Each victim has its own trouble: no draw depends on how the graph turns out."""
    counts = [max(1, len(readers) * share // 100) for share in (KILLED, PAUSED, BETRAYED, LIED_TO, STALLED, SLOWED)]
    victims = iter(rng.sample(list(readers), sum(counts)))
    killed, paused, liars, lied_to, stalled, slowed = ([next(victims) for _ in range(count)] for count in counts)

    def when() -> float:
        return rng.uniform(0.05, CHAOS_S)

    def meddled(each: Place, meddling: Meddling) -> Fault:
        seconds = rng.uniform(0.5, 3)
        return Fault(when(), Kind.MEDDLE, each.seat.replica, seconds, meddling, rng.choice([0.3, 1.0]))

    faults = [Fault(when(), Kind.KILL, each.name, 0.0) for each in killed]
    pauses = [rng.choice([rng.uniform(0.1, 1), rng.uniform(LEASE_S, 2 * LEASE_S)]) for _ in paused]
    faults += [Fault(when(), Kind.PAUSE, each.name, pause) for each, pause in zip(paused, pauses, strict=True)]
    faults += [meddled(each, rng.choice(LIES)) for each in lied_to]
    faults += [meddled(each, rng.choice([Meddling.STALL, Meddling.FAIL])) for each in stalled]
    slow = [Slowness(when(), each.seat.replica, rng.uniform(1, 4), rng.choice([0.25, 0.1])) for each in slowed]
    return Plan(
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        tuple(slow),
        tuple((when(), each.seat.replica, rng.uniform(1, 4)) for each in liars),
    )


async def suffer(crowd: Crowd, plan: Plan) -> None:
    """All that the plan says, until the last of it is over."""
    links, rules, now_s = crowd.world.plane.links, crowd.world.plane.rules, crowd.world.now_s
    began_s = now_s()

    async def slow(each: Slowness) -> None:
        await asyncio.sleep(each.at_s)
        links[each.replica].bytes_per_s *= each.fraction
        await asyncio.sleep(each.seconds)
        links[each.replica].bytes_per_s /= each.fraction

    async def lie(at_s: float, replica: str, seconds: float) -> None:
        await asyncio.sleep(at_s)
        rule = Rule(Meddling.FLIP, "", 1.0, 0.0, source=replica, weights_only=True)
        rules.append(rule)
        await asyncio.sleep(seconds)
        rules.remove(rule)

    later = [Fault(began_s + f.at_s, f.kind, f.place, f.seconds, f.meddling, f.probability) for f in plan.faults]
    await asyncio.gather(
        *(inject(crowd.world, fault) for fault in later),
        *(slow(each) for each in plan.slow),
        *(lie(*each) for each in plan.liars),
    )


async def come(crowd: Crowd, replica: str, at_s: float) -> None:
    """A reader that comes at its time, and tries again while the world is unkind; the killed start anew."""
    await asyncio.sleep(at_s)
    for _ in range(ATTEMPTS):
        got = await crowd.read(replica)
        if isinstance(got, Replication) and not crowd.process(replica).dead:
            return
        await asyncio.sleep(RESTART_S)
    crowd.world.checkers.not_live(
        replica, f"did not get the version in {ATTEMPTS} attempts: {crowd.failed.get(replica)}"
    )


async def follow(crowd: Crowd, version: int) -> None:
    """In a world without faults the trainer gets its buffers back, and every reader the next version; links
    are fast then, for nothing is to be seen any more."""
    world, trainer = crowd.world, Trainer(crowd.world, [crowd.trainer])
    await asyncio.sleep(SETTLE_S)
    world.plane.links.clear()
    await take_back(crowd, trainer)
    await crowd.publish(version)
    await asyncio.gather(*(_follow(crowd, each) for each in crowd.readers))
    late = [each.name for each in crowd.readers if world.processes[each.name].version != version]
    if late:
        world.checkers.not_live(", ".join(late), f"did not get version {version} in a world without faults")
    await take_back(crowd, trainer)


async def take_back(crowd: Crowd, trainer: Trainer) -> None:
    """Unpublish, patiently: nobody reads for long."""
    for process in await crowd.world.living([crowd.trainer]):
        outcome = await trainer.unpublish(process, 1, REPLICATE_S)
        if not outcome.ok:
            crowd.world.checkers.not_live("trainer", f"cannot unpublish: {outcome.error}")


async def _follow(crowd: Crowd, each: Place) -> None:
    rollout = Rollout(crowd.world, [each])
    for _ in range(ATTEMPTS):
        if await rollout.replicate(await crowd.world.living([each]), Latest(), REPLICATE_S):
            return
