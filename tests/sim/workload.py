"""What people do with the system: trainers that step, rollouts that follow, replicas that come and go.

Each replica has one driver, the job's controller: it has all shards do the next thing, waits until each has ended in
some way, and goes on. Drivers never touch memory or the network: processes do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tensorhub.client.slot import State
from tensorhub.errors import ContractBroken, NotPublished, OutcomeUnknown, TensorHubError, VersionConflict
from tensorhub.types import AtLeast, Exactly, Latest, Newest, Selector
from tests.sim.content import SPOILED
from tests.sim.marks import Mark

if TYPE_CHECKING:
    from tests.sim.process import Place, Process
    from tests.sim.world import Outcome, World

T = TypeVar("T")

#: Attempts of one shard to take its buffers back before it abandons its readers.
PATIENT_UNPUBLISHES = 2
#: An unpublish that waits for nobody still asks the server.
ABANDON_S = 1.0
#: What an owner leaves in memory that is nobody's version.
GARBAGE = SPOILED


class Replica:
    """The controller of one replica: what is common to trainers and rollouts."""

    def __init__(self, world: World, places: list[Place]) -> None:
        self.world = world
        self.places = places
        self.name = f"{places[0].seat.model.name}/{places[0].seat.replica}"
        self.rng = random.Random(f"{world.seed} {self.name}")

    async def all(self, work: Callable[[Process], Awaitable[T]], processes: Sequence[Process]) -> list[T]:
        """Have every shard do it; returns when each has ended in some way."""
        return list(await asyncio.gather(*(work(process) for process in processes)))

    async def unpublish(self, process: Process, patience: int, timeout_s: float) -> Outcome:
        """Take the buffers back: patiently at first, then without regard for readers."""
        while True:
            outcome = await self._unpublish(process, timeout_s, abandon=patience == 0)
            if outcome.ok or process.dead or patience <= 0:
                return outcome
            patience -= 1

    async def _unpublish(self, process: Process, timeout_s: float, *, abandon: bool) -> Outcome:
        async def work() -> None:
            began_s, error = self.world.now_s(), None
            self.world.checkers.lives.hides(process)
            try:
                await process.unpublish(timeout_s, abandon=abandon)
            except (ContractBroken, VersionConflict, NotPublished) as told:
                error = told  # the buffers are the user's all the same
            waited_s = self.world.now_s() - began_s
            self.world.checkers.unpublished(process, abandon=abandon, waited_s=waited_s, error=error)
            # Whoever reads on must notice, from the very next instant on.
            process.buffers.write(self.rng.choice(process.buffers.rows()), GARBAGE)

        what = "unpublish(abandon)" if abandon else f"unpublish({timeout_s:g}s)"
        return await self.world.perform(process, what, work, ABANDON_S if abandon else timeout_s)


class Trainer(Replica):
    """Writes, publishes, lets them read, takes back; over and over, with rising versions."""

    version = 0

    async def run(self) -> None:
        while self.world.chaos:
            processes = await self.world.living(self.places)
            await self.step(processes, self.rng.choice(["background"] * 4 + ["now"]))
            await asyncio.sleep(
                self.rng.choice([self.rng.uniform(0, 0.2), self.rng.uniform(0, 2), self.rng.uniform(0, 5)])
            )
            await self.take_back(processes)

    async def step(self, processes: Sequence[Process], digest: str) -> bool:
        """Make the next version and publish it; whether every shard could."""
        self.version += 1
        version = self.version

        async def one(process: Process) -> Outcome:
            async def work() -> None:
                await process.write(version)
                await process.publish(version, digest, 8.0)
                self.world.checkers.published(process, version)

            return await self.world.perform(process, f"write and publish {version}", work, 9.0)

        outcomes = await self.all(one, processes)
        return all(outcome.ok for outcome in outcomes)

    async def take_back(self, processes: Sequence[Process]) -> None:
        """Unpublish what is published, in one of the ways there are."""
        patience, timeout_s = self.rng.choice([(PATIENT_UNPUBLISHES, 8.0), (PATIENT_UNPUBLISHES, 0.2), (0, 1.0)])

        async def one(process: Process) -> Outcome | None:
            if process.dead or process.state is not State.PUBLISHED:
                return None
            return await self.unpublish(process, patience, timeout_s)

        await self.all(one, processes)


class Rollout(Replica):
    """Replicates what selectors name, sometimes leaves, restarts, or withdraws what it holds."""

    async def run(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 3))
        while self.world.chaos:
            processes = await self.world.living(self.places)
            selector, only = self._wish(processes)
            if self.rng.random() < 0.05 and len(processes) > 1:
                # A shard whose user is busy elsewhere misses a transaction.
                await self.replicate(self.rng.sample(processes, len(processes) - 1), selector, 1.0, only)
            else:
                await self.replicate(processes, selector, self.rng.choice([1.0, 6.0, 12.0]), only)
            await asyncio.sleep(self.rng.choice([0.0, self.rng.uniform(0, 1), self.rng.uniform(0, 4)]))
            await self._stir(processes)

    def _wish(self, processes: Sequence[Process]) -> tuple[Selector, Sequence[str] | None]:
        newest = max(process.version or 0 for process in processes)
        selectors: list[Selector] = [Latest(), Latest(), AtLeast(newest + 1), Exactly(max(1, newest))]
        selector = self.rng.choice([*selectors, Latest(1), Newest(2)])
        only = None
        if self.rng.random() < 0.1:
            names = set(processes[0].buffers.large).intersection(*(p.buffers.large for p in processes[1:]))
            only = sorted(names)[:1] or None
        return selector, only

    async def replicate(
        self, processes: Sequence[Process], selector: Selector, timeout_s: float, only: Sequence[str] | None = None
    ) -> bool:
        """All shards ask at about the same time; whether all got it."""
        skewed = self.rng.random() < 0.3

        async def one(process: Process) -> Outcome:
            late_s = self.rng.uniform(0, 1) if skewed else 0.0
            checkers = self.world.checkers

            async def work() -> object:
                await asyncio.sleep(late_s)
                before = checkers.before(process)
                others = None if only is None else process.buffers.contents()
                try:
                    got = await process.replicate(selector, timeout_s, only)
                except TensorHubError as error:
                    checkers.failed(process, before, error)
                    if isinstance(error, OutcomeUnknown):
                        self.world.marks.hit(Mark.OUTCOME_UNKNOWN)
                    raise
                checkers.replicated(process, before, got, only, latest=selector == Latest())
                if others is not None and not got.already_held:
                    checkers.untouched(process, others, only or ())
                return got.version

            what = f"replicate {selector}{'' if only is None else f' only {only}'} ({timeout_s:g}s)"
            return await self.world.perform(process, what, work, late_s + timeout_s)

        outcomes = await self.all(one, processes)
        versions = {
            outcome.process.place.name: outcome.value
            for outcome in outcomes
            if outcome.ok and outcome.value is not None
        }
        self.world.checkers.group(versions)
        whole = len(versions) == len(self.places)
        if whole and skewed and len(versions) > 1:
            self.world.marks.hit(Mark.SPREAD_COMMIT)
        return whole

    async def _stir(self, processes: Sequence[Process]) -> None:
        """Now and then a replica does something else than to ask for more."""
        draw = self.rng.random()
        if draw < 0.08:
            leaver = self.rng.choice(list(processes))
            if not leaver.dead:
                await self.world.perform(leaver, "leave", leaver.stop, 30.0)
        elif draw < 0.2:
            for process in processes:
                if not process.dead and process.state is State.COMPLETE:
                    await self.unpublish(process, 1, 1.0)


def controllers(world: World) -> tuple[list[Trainer], list[Rollout]]:
    """One for each replica."""
    replicas: dict[tuple[object, str], list[Place]] = {}
    for place in world.places:
        replicas.setdefault((place.seat.model, place.seat.replica), []).append(place)
    trainers = [Trainer(world, places) for places in replicas.values() if places[0].is_trainer]
    rollouts = [Rollout(world, places) for places in replicas.values() if not places[0].is_trainer]
    return trainers, rollouts
