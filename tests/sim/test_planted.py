"""Mistakes planted in the real code; the sweep must find each: a simulation that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tensorhub.client.publication import Publication
from tensorhub.client.slot import Slot
from tensorhub.messages import Committed, Standing, TransactionAborted
from tensorhub.pipeline.follow import Filling
from tensorhub.server import groups, publishing, returning
from tensorhub.server.state import Member, Part
from tensorhub.server.turn import Turn
from tests.sim.run import simulate

#: Each mistake is found within so many seeds.
SEEDS_MAX = 40


def no_digests_no_final_look(patch: pytest.MonkeyPatch) -> None:
    """Neither are chunks compared with digests, nor is the generation looked at after the last byte."""
    no_digests(patch)

    async def look_away(filling: Filling, source: object) -> None:
        return None

    patch.setattr(Filling, "_confirm", look_away)


def no_digests(patch: pytest.MonkeyPatch) -> None:
    """Chunks are taken as they come."""

    real = Filling._read

    async def believe(filling: Filling, source: Any, source_map: Any, batch: Any) -> None:
        await real(filling, source, source_map, batch)

    patch.setattr(Filling, "_read", believe)


def shards_commit_alone(patch: pytest.MonkeyPatch) -> None:
    """A shard that is done is told that all are."""
    real = groups.settled

    def settled(turn: Turn, part: Part) -> None:
        real(turn, part)
        record = part.transaction.record
        if part.member.replica.transaction is part.transaction and part.call is not None and record is not None:
            turn.say(part.member.session.id, part.call, Committed(record.version))

    patch.setattr(groups, "settled", settled)


def unpublish_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Readers are forgotten at once, as if every unpublish abandoned them."""
    patch.setattr(publishing, "is_drained", lambda holding: True)


def shown_before_verified(patch: pytest.MonkeyPatch) -> None:
    """A filling shows chunks before they have landed."""
    real = Filling._read

    async def read(filling: Filling, source: Any, source_map: Any, batch: tuple[int, int]) -> int | None:
        if batch[0] == filling.counter.watermark:
            filling.raise_to(batch[1])
        return await real(filling, source, source_map, batch)

    patch.setattr(Filling, "_read", read)


def version_kept_after_failure(patch: pytest.MonkeyPatch) -> None:
    """The hub goes on to show what it held before."""
    real = Slot.tear

    def tear(slot: Slot) -> None:
        kept = slot.previous
        real(slot)
        slot.version = kept

    patch.setattr(Slot, "tear", tear)


def write_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """A publisher's write counters are not compared."""
    patch.setattr(Publication, "check", lambda publication: None)


def idle_shards_untold(patch: pytest.MonkeyPatch) -> None:
    """Shards that have not asked do not hear that a number is used up: they never meet their siblings again."""
    real = groups._tell

    def tell(turn: Any, transaction: Any, member: Any, reason: str) -> None:
        if member.seat.shard in transaction.parts:
            real(turn, transaction, member, reason)

    patch.setattr(groups, "_tell", tell)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (no_digests_no_final_look, "No false progress"),
    (no_digests, "No false progress"),
    (shards_commit_alone, "One version per replica"),
    (unpublish_does_not_wait, "Drained"),
    (shown_before_verified, "Broken"),
    (version_kept_after_failure, "No false progress"),
    (write_goes_unnoticed, "Exact"),
    (idle_shards_untold, "Survives"),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("plant", "guarantee"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_mistake_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], guarantee: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker of the guarantee that the mistake breaks says so."""
    plant(monkeypatch)
    found: list[str] = []
    for seed in range(SEEDS_MAX):
        found += simulate(seed).violations
        if any(line.startswith(guarantee) for line in found):
            return
    pytest.fail(f"{SEEDS_MAX} seeds did not find it; they found: {found}")


def fillings_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new life of the server ends what was under way when it began."""

    def end(turn: Turn, member: Member, standing: Standing, told: object) -> None:
        turn.notify(member.session.id, TransactionAborted(member.seat, standing.group, standing.sequence, "forgotten"))

    patch.setattr(returning, "_go_on", end)


def readers_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A new life drains what comes back as if nobody could still read it."""
    patch.setattr(returning, "doubt", lambda turn, holding: None)


#: Each with seeds among which one kills the server at the right moment: most worlds keep theirs.
OF_RESTARTS = [(fillings_forgotten, "Survives", range(104, 110)), (readers_forgotten, "Drained", range(215, 221))]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "guarantee", "seeds"), OF_RESTARTS, ids=[each[0].__name__ for each in OF_RESTARTS])
def test_a_planted_mistake_of_a_restart_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], guarantee: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """server_restart_midtransfer: what a restart must not cost is noticed when it does."""
    plant(monkeypatch)
    found = [line for seed in seeds for line in simulate(seed).violations]
    assert any(line.startswith(guarantee) for line in found), found
