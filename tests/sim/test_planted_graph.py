"""Mistakes of the graph planted in the real code, each found by a story of `test_crowd.py`, and by the layer named."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tensorhub.pipeline.follow import Filling
from tensorhub.server import holdings, placement, reading
from tensorhub.server.placement import Reader
from tensorhub.server.state import Holding
from tests.sim import crowd as crowds
from tests.sim.crowd import Crowd, gathered
from tests.sim.strands import run_stranded
from tests.sim.test_crowd import chained, lies

pytestmark = pytest.mark.slow

#: The machine's own invariants stay out of it: it is the watcher that must see what anybody can see.
NEVER = 1 << 30


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


def cycles_fit(patch: pytest.MonkeyPatch) -> None:
    """A reader may read from its own reader, whatever that has."""

    def fits(holding: Holding, reader: Reader) -> bool:
        return holding.member.replica.id != reader.replica and holding.generation not in reader.suspects

    def rise(holding: Holding | None) -> None:
        """Heights upwards, but not round and round."""

    patch.setattr(placement, "fits", fits)
    patch.setattr(holdings, "_rise", rise)


def raised_before_verified(patch: pytest.MonkeyPatch) -> None:
    """A relay shows what has landed before it has compared it with its digests."""
    real = Filling._read

    async def read(filling: Filling, source: object, plan: object, batch: tuple[int, int]) -> int | None:
        wrong: int | None = await real(filling, source, plan, batch)  # type: ignore[arg-type]
        if batch[0] == filling.counter.watermark:
            filling.raise_to(batch[1])
            await asyncio.sleep(0.05)  # its readers look meanwhile
        return wrong

    patch.setattr(Filling, "_read", read)


def partials_are_believed(patch: pytest.MonkeyPatch) -> None:
    """What a source sent counts, whatever its digest."""
    real = Filling._read

    async def read(filling: Filling, source: object, plan: object, batch: tuple[int, int]) -> None:
        await real(filling, source, plan, batch)  # type: ignore[arg-type]

    patch.setattr(Filling, "_read", read)


def nobody_is_quarantined(patch: pytest.MonkeyPatch) -> None:
    """Reports are heard and forgotten."""
    patch.setattr(reading, "SICK_REPORTS", NEVER)


Story = Callable[[Crowd], Awaitable[None]]
PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Story, str]] = [
    (cycles_fit, orphans, "Survives violated: sources form a cycle"),
    (raised_before_verified, liar, "Broken violated"),
    (partials_are_believed, liar, "No false progress violated"),
    (nobody_is_quarantined, sick, "a sick source was given"),
]


def found(story: Story) -> list[str]:
    """What the checkers say of a story of a trainer and its readers."""

    async def main() -> list[str]:
        names = ["r1", "r2", "r3", *(f"late-{number}" for number in range(12))]
        async with gathered(0, names, check_every=NEVER, judged=False) as crowd:
            await crowd.publish()
            await story(crowd)
        return list(crowd.world.checkers.violations)

    with crowds.scaled():
        lines: list[str] = run_stranded(main())
    return lines


@pytest.mark.parametrize(("plant", "story", "finding"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_mistake_of_the_graph_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], story: Story, finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay_does_not_propagate_corruption, sick_source_quarantined: without the mistake a story finds nothing, with it
    the checker says so."""
    assert found(story) == []
    plant(monkeypatch)
    lines = found(story)
    assert any(line.startswith(finding) for line in lines), lines
