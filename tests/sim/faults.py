"""What goes wrong in a world, drawn from its seed before anything runs, and printed first.

A fault has a time, a victim and a duration. The plan decides nothing at run time: `inject` does what is written, and
skips what makes no sense then (nobody kills the dead).
"""

from __future__ import annotations

import asyncio
import enum
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.sim.memory import Meddling, Rule

if TYPE_CHECKING:
    from tests.sim.process import Place, Process
    from tests.sim.world import World


class Kind(enum.Enum):
    """What happens to a process, to its control link, or to its reads."""

    KILL = "kill"
    PAUSE = "pause"
    PAUSE_AND_REPLACE = "pause and replace"
    HOLD_INTERPRETER = "hold interpreter"
    CUT = "cut"
    PART = "part"
    LOSE_COMMIT = "lose commit"
    LATE = "late"
    SCRIBBLE = "scribble"
    MEDDLE = "meddle"
    RESTART = "restart the server, empty,"
    SPLIT = "two servers"


#: Whether worlds lose their server.
SERVER_DIES = True
#: {kind: how often it is drawn}. A third of the worlds that have faults lose their server.
_WEIGHTS = {
    Kind.KILL: 4,
    Kind.PAUSE: 4,
    Kind.PAUSE_AND_REPLACE: 2,
    Kind.HOLD_INTERPRETER: 1,
    Kind.CUT: 5,
    Kind.PART: 2,
    Kind.LOSE_COMMIT: 2,
    Kind.LATE: 1,
    Kind.SCRIBBLE: 2,
    Kind.MEDDLE: 6,
    Kind.RESTART: 3 * SERVER_DIES,
    Kind.SPLIT: 1 * SERVER_DIES,
}
FAULTS_MAX = 10
#: How long one that was replaced, and is back, may go on beside its successor before its host kills it.
ZOMBIE_S = 8.0
#: A server that is to die amid a filling looks so often whether there is one, and waits so long.
FILLING_LOOK_S, FILLING_WAIT_S = 0.02, 4.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`place` is a name, or "" for everybody; a server's faults name the places that another takes over."""

    at_s: float
    kind: Kind
    place: str
    seconds: float
    meddling: Meddling | None = None
    probability: float = 0.0
    taken: tuple[str, ...] = ()
    #: A server dies while somebody is being filled, if anybody is soon.
    amid: bool = False
    #: Of two servers the second is the one that goes on.
    second_stays: bool = False

    def __str__(self) -> str:
        what = self.kind.value if self.meddling is None else f"{self.meddling.value} x{self.probability:.2f}"
        what += " amid a filling" if self.amid else ""
        whom = ", ".join(self.taken) + (", then alone," if self.second_stays else "") if self.taken else self.place
        return f"{self.at_s:6.2f}s {what} {whom or 'all'} for {self.seconds:.2f}s"


def draw_plan(rng: random.Random, places: list[Place], until_s: float) -> list[Fault]:
    """Faults in order of time. Some seeds have few: a quiet world must work, too."""
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    faults = []
    for _ in range(rng.randint(0, FAULTS_MAX)):
        kind = rng.choices(kinds, weights)[0]
        at_s, place = rng.uniform(0.5, until_s), rng.choice(places)
        match kind:
            case Kind.MEDDLE:
                meddling = rng.choice(list(Meddling))
                victim = rng.choice(["", place.seat.replica])
                fault = Fault(at_s, kind, victim, rng.uniform(1, 8), meddling, rng.choice([0.05, 0.3, 1.0]))
            case Kind.LATE:
                fault = Fault(at_s, kind, "", rng.uniform(1, 6))
            case Kind.SCRIBBLE:
                trainers = [each for each in places if each.is_trainer]
                fault = Fault(at_s, kind, rng.choice(trainers).name, 0.0)
            case Kind.PAUSE | Kind.PAUSE_AND_REPLACE | Kind.HOLD_INTERPRETER | Kind.PART:
                fault = Fault(at_s, kind, place.name, rng.choice([rng.uniform(0.1, 4), rng.uniform(7, 10)]))
            case Kind.LOSE_COMMIT:
                fault = Fault(at_s, kind, place.name, rng.uniform(5, 9))
            case Kind.RESTART:
                seconds = rng.choice([0.05, rng.uniform(0.1, 2), rng.uniform(2, 5), 8.0])
                fault = Fault(at_s, kind, "", seconds, amid=rng.random() < 0.7)
            case Kind.SPLIT:
                taken = tuple(each.name for each in places if rng.random() < 0.5) or (place.name,)
                seconds, stays = rng.uniform(0.5, 9), rng.random() < 0.5
                fault = Fault(at_s, kind, "", seconds, taken=taken, amid=rng.random() < 0.7, second_stays=stays)
            case Kind.KILL | Kind.CUT:
                fault = Fault(at_s, kind, place.name, rng.uniform(0.0, 5.0))
        faults.append(fault)
    return sorted(faults, key=lambda fault: fault.at_s)


async def inject(world: World, fault: Fault) -> None:
    """Wait for its time, do it, and undo it when its duration is over."""
    await asyncio.sleep(max(0.0, fault.at_s - world.now_s()))
    if fault.kind is Kind.MEDDLE and fault.meddling is not None:
        await _meddle(world, fault, fault.meddling)
        return
    if fault.kind is Kind.LATE:
        await _be_late(world, fault)
        return
    if fault.kind in (Kind.RESTART, Kind.SPLIT):
        await _lose_server(world, fault)
        return
    process = world.processes.get(fault.place)
    if process is None or process.dead or process.strand.frozen:
        return
    world.trace.add("FAULT", str(fault))
    world.checkers.lives.disturbed(process)
    match fault.kind:
        case Kind.KILL:
            await process.kill()
            world.checkers.killed(process)
        case Kind.CUT:
            world.network.cut(process, "cut")
        case Kind.SCRIBBLE:
            world.checkers.scribbled(process)
        case Kind.LOSE_COMMIT:
            world.network.fragile.add(process)
            await asyncio.sleep(fault.seconds)
            world.network.fragile.discard(process)
            world.network.join(process)
        case Kind.PART:
            world.network.part(process)
            await asyncio.sleep(fault.seconds)
            world.network.join(process)
        case _:
            await _stop_for_a_while(world, process, fault)


async def _stop_for_a_while(world: World, process: Process, fault: Fault) -> None:
    process.freeze(heart=fault.kind is not Kind.HOLD_INTERPRETER)
    if fault.kind is Kind.PAUSE_AND_REPLACE:
        # An operator takes it for dead: its connections are gone with its host, its successor starts.
        world.network.cut(process, "its host is gone")
        process.replaced = True
        world.place_anew(process.place)
    await asyncio.sleep(fault.seconds)
    if process.dead:
        return
    world.trace.add("FAULT", f"{process.name} goes on")
    world.checkers.woke(process, fault.kind is Kind.HOLD_INTERPRETER, fault.seconds)
    process.thaw()
    if process.replaced:
        await asyncio.sleep(ZOMBIE_S)
        await process.kill()


async def _lose_server(world: World, fault: Fault) -> None:
    if fault.amid:
        await _until_filling(world)
    if world.server_in_trouble:
        return
    world.trace.add("FAULT", str(fault))
    if fault.kind is Kind.RESTART:
        await world.restart_server(fault.seconds)
    else:
        await world.split_server(fault.taken, fault.seconds, second_stays=fault.second_stays)


async def _until_filling(world: World) -> None:
    began_s = world.now_s()
    while world.now_s() - began_s < FILLING_WAIT_S:
        if any(process.is_filling for process in world.processes.values() if not process.dead):
            return
        await asyncio.sleep(FILLING_LOOK_S)


async def _meddle(world: World, fault: Fault, meddling: Meddling) -> None:
    amount = 40.0 if meddling is Meddling.SLOW else 1.0 + fault.seconds
    rule = Rule(meddling, fault.place, fault.probability, amount)
    world.trace.add("FAULT", str(fault))
    world.plane.rules.append(rule)
    await asyncio.sleep(fault.seconds)
    if rule in world.plane.rules:
        world.plane.rules.remove(rule)


async def _be_late(world: World, fault: Fault) -> None:
    world.trace.add("FAULT", str(fault))
    world.network.lateness_s = 0.3
    await asyncio.sleep(fault.seconds)
    world.network.lateness_s = 0.0
