"""The catalogue of planted mistakes: what each is, how it is planted in the real code, and which layer must see it.

A layer of tests that cannot fail proves nothing. Each mistake is one small function replaced; whoever must see it is
asked by the cheapest run that shows it, and must say what is written here. Nothing is planted by reading this file.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from tensorhub import errors
from tensorhub.client.publication import Publication
from tensorhub.client.session import Session
from tensorhub.client.slot import Slot
from tensorhub.messages import Committed, Standing, TransactionAborted, Unpublish
from tensorhub.pipeline.follow import Filling
from tensorhub.server import (
    grace,
    grants,
    groups,
    holdings,
    placement,
    publishing,
    reading,
    returning,
    roots,
    sessions,
    watching,
)
from tensorhub.server.placement import Reader
from tensorhub.server.publishing import check_well_formed
from tensorhub.server.state import Holding, Member, ModelTable, Part, Replica, Transaction, VersionRecord
from tensorhub.server.state import Session as Known
from tensorhub.server.turn import Turn
from tensorhub.transport.memory import MemoryEngine
from tensorhub.types import Latest, Location, Selector
from tests.conformance import test_engines as engines
from tests.model import test_group_protocol as protocol
from tests.model import test_server_lives as lives
from tests.repo import fault_ids, test_errors, test_faults
from tests.repo.planted_runs import NEVER, Run, a_filling, a_seed, a_story, an_engine, liar, orphans, sick, the_twin
from tests.sim import test_stories
from tests.unit.pipeline import test_filling
from tests.unit.server import test_groups, test_placement, test_returning, test_sessions, test_versions
from tests.unit.session import test_session

Patch = pytest.MonkeyPatch


class Layer(enum.Enum):
    """Where a mistake must be seen."""

    UNIT = "tables and cases of one module"
    TWIN = "the naive twin that predicts every reply"
    EXPLORED = "the protocol, every order of its steps"
    SIMULATED = "the checkers of the simulation"
    CONFORMANCE = "one suite over every implementation of a port"
    REPO = "what the repository says of itself"


@dataclass(frozen=True, slots=True)
class Caught:
    """Who sees it, by which run, and a part of what is said."""

    layer: Layer
    run: Run
    says: str


@dataclass(frozen=True, slots=True)
class Planted:
    """One mistake: a function whose name is its name, and whose docstring says what it is."""

    plant: Callable[[Patch], None]
    caught: tuple[Caught, ...]

    @property
    def name(self) -> str:
        return self.plant.__name__


# ---------------------------------------------------------------- the server


def readers_end_unnoticed(patch: Patch) -> None:
    """A wake-up is skipped: whoever waits for the last reader of what it unpublishes, or will overwrite, waits on."""
    patch.setattr(reading, "drained", lambda turn, holding: None)


def queues_are_not_woken(patch: Patch) -> None:
    """A wake-up is skipped: a place is free at a source, and who waits in line for one is not looked at."""
    patch.setattr(reading, "wake", lambda turn, slot: None)


def leases_never_end(patch: Patch) -> None:
    """A process that is silent past its lease stays, as if it had been heard."""
    real = sessions.end

    def end(turn: Turn, session: Known, kind: str, reason: str) -> None:
        if kind == "expired":
            sessions.renew(turn, session.id)
        else:
            real(turn, session, kind, reason)

    patch.setattr(sessions, "end", end)


def generations_are_used_twice(patch: Patch) -> None:
    """A filling may have the generation of another that is still there."""
    for module in (grants, publishing, returning):
        patch.setattr(module, "check_generation", lambda turn, member, generation: None)


def shards_commit_alone(patch: Patch) -> None:
    """A shard that is done is told that all are."""
    real = groups.settled

    def settled(turn: Turn, part: Part) -> None:
        real(turn, part)
        record = part.transaction.record
        if part.member.replica.transaction is part.transaction and part.call is not None and record is not None:
            turn.say(part.member.session.id, part.call, Committed(record.version))

    patch.setattr(groups, "settled", settled)


def shards_decide_alone(patch: Patch) -> None:
    """Each shard is given what its selector means when it asks, whatever its siblings were given."""
    real = groups.admit

    def admit(turn: Turn, part: Part) -> None:
        model = part.member.replica.model
        if part.transaction.record is not None and model.readable:
            part.transaction.record = model.current[model.readable[-1]]
        real(turn, part)

    patch.setattr(groups, "admit", admit)


def unpublish_does_not_wait(patch: Patch) -> None:
    """Readers are forgotten at once, as if every unpublish abandoned them."""
    patch.setattr(publishing, "is_drained", lambda holding: True)


def unpublish_takes_the_next(patch: Patch) -> None:
    """An unpublish that is asked again, late, hides whatever the buffer set holds by then: generations are not
    compared."""
    real = publishing.unpublish

    def unpublish(turn: Turn, request: Unpublish) -> None:
        holding = turn.member(request.seat).holdings.get(request.buffers)
        real(turn, request if holding is None else replace(request, generation=holding.generation))

    patch.setattr(publishing, "unpublish", unpublish)


def idle_shards_untold(patch: Patch) -> None:
    """Shards that have not asked do not hear that a number is used up: they never meet their siblings again."""
    real = groups._tell

    def tell(turn: Turn, transaction: Transaction, member: Member, reason: str) -> None:
        if member.seat.shard in transaction.parts:
            real(turn, transaction, member, reason)

    patch.setattr(groups, "_tell", tell)


def other_roots_are_offered(patch: Patch) -> None:
    """A second publisher whose root is not the version's is offered like the first."""

    def compare(turn: Turn, holding: Holding) -> None:
        holding.proven = True
        roots.refresh(turn, holding)

    patch.setattr(roots, "compare", compare)


def latest_is_any(patch: Patch) -> None:
    """`latest` is the oldest version that can be read."""
    real = groups.select

    def select(model: ModelTable, selector: Selector, location: Location) -> VersionRecord | None:
        if selector == Latest() and model.readable:
            return model.current[model.readable[0]]
        return real(model, selector, location)

    for module in (groups, watching):
        patch.setattr(module, "select", select)


# ---------------------------------------------------------------- the graph


def cycles_fit(patch: Patch) -> None:
    """A reader may read from its own reader, whatever that has."""

    def fits(holding: Holding, reader: Reader) -> bool:
        return holding.member.replica.id != reader.replica and holding.generation not in reader.suspects

    def rise(holding: Holding | None) -> None:
        """Heights upwards, but not round and round."""

    patch.setattr(placement, "fits", fits)
    patch.setattr(holdings, "_rise", rise)


def raised_before_verified(patch: Patch) -> None:
    """A relay shows what has landed before it has compared it with its digests."""
    real = Filling._read

    async def read(filling: Filling, source: Any, plan: Any, batch: tuple[int, int]) -> int | None:
        wrong = await real(filling, source, plan, batch)
        if batch[0] == filling.counter.watermark:
            filling.raise_to(batch[1])
            await asyncio.sleep(0.05)  # its readers look meanwhile
        return wrong

    patch.setattr(Filling, "_read", read)


def nobody_is_quarantined(patch: Patch) -> None:
    """Reports are heard and forgotten."""
    patch.setattr(reading, "SICK_REPORTS", NEVER)


# ---------------------------------------------------------------- the client


def no_digests(patch: Patch) -> None:
    """Chunks are taken as they come."""
    real = Filling._read

    async def believe(filling: Filling, source: Any, plan: Any, batch: Any) -> None:
        await real(filling, source, plan, batch)

    patch.setattr(Filling, "_read", believe)


def no_digests_no_final_look(patch: Patch) -> None:
    """Neither are chunks compared with digests, nor is the generation looked at after the last byte."""
    no_digests(patch)
    no_final_look(patch)


def no_final_look(patch: Patch) -> None:
    """The generation is not looked at after the last byte."""

    async def look_away(filling: Filling, source: object) -> None:
        return None

    patch.setattr(Filling, "_confirm", look_away)


def shown_before_verified(patch: Patch) -> None:
    """A filling shows chunks before they have landed."""
    real = Filling._read

    async def read(filling: Filling, source: Any, plan: Any, batch: tuple[int, int]) -> int | None:
        if batch[0] == filling.counter.watermark:
            filling.raise_to(batch[1])
        return await real(filling, source, plan, batch)

    patch.setattr(Filling, "_read", read)


def version_kept_after_failure(patch: Patch) -> None:
    """The hub goes on to show what it held before."""
    real = Slot.tear

    def tear(slot: Slot) -> None:
        kept = slot.previous
        real(slot)
        slot.version = kept

    patch.setattr(Slot, "tear", tear)


def write_goes_unnoticed(patch: Patch) -> None:
    """A publisher's write counters are not compared."""
    patch.setattr(Publication, "check", lambda publication: None)


def seats_are_not_taken_again(patch: Patch) -> None:
    """A session that is back says Hello and nothing of its seats."""

    async def take(session: Session, connection: object) -> None:
        return None

    patch.setattr(Session, "_take_seats", take)


def who_was_forgotten_reads_on(patch: Patch) -> None:
    """A reader whose lease has ended, of which the server told its source, goes on when it is welcome again."""
    patch.setattr(Session, "lapses", property(lambda session: 0, lambda session, count: None), raising=False)


# ---------------------------------------------------------------- another life of the server


def no_grace(patch: Patch) -> None:
    """A new life decides at once, whoever is still on the way."""
    patch.setattr(sessions, "open_grace", lambda turn: None)


def groups_do_not_wait_for_shards(patch: Patch) -> None:
    """In the grace a group decides without the shards that are missing, and that may bring a decision."""

    def may_decide_for(turn: Turn, replica: Replica, selector: Selector) -> bool:
        return grace.may_decide(turn, replica.model, selector)

    patch.setattr(groups, "may_decide_for", may_decide_for)


def a_second_decision(patch: Patch) -> None:
    """A transaction that was decided in an earlier life is decided again when a sibling asks."""

    def resume(turn: Turn, member: Member, told: Any) -> None:
        returning._refill(turn, member, told)

    patch.setattr(returning, "_resume", resume)


def no_doubt(patch: Patch) -> None:
    """What was brought back is drained as soon as nobody is known to read it."""
    patch.setattr(returning, "doubt", lambda turn, holding: None)


def fillings_are_forgotten(patch: Patch) -> None:
    """A new life of the server ends what was under way when it began."""

    def end(turn: Turn, member: Member, standing: Standing, told: object) -> None:
        turn.notify(member.session.id, TransactionAborted(member.seat, standing.group, standing.sequence, "forgotten"))

    patch.setattr(returning, "_go_on", end)


def numbers_are_forgotten(patch: Patch) -> None:
    """A new life numbers its groups afresh."""
    patch.setattr(returning, "_number", lambda turn, member, told, *, is_first: None)


def commits_are_forgotten(patch: Patch) -> None:
    """That one shard has heard of a commit means nothing for its siblings."""
    patch.setattr(returning, "_recall_commit", lambda turn, replica, told: None)


def what_is_given_up_is_claimed(patch: Patch) -> None:
    """A version that a reader was forgotten to hold, for what it waits for, is its again when it says so."""
    patch.setattr(returning, "_is_given_up", lambda member, buffers: False)


def other_bytes_are_believed(patch: Patch) -> None:
    """A claim is taken whatever others hold under that version."""

    def check_content(member: Member, version: Any, content: Any, root: Any) -> None:
        check_well_formed(member, version, content)

    patch.setattr(returning, "_check_content", check_content)


def lineages_come_as_they_come(patch: Patch) -> None:
    """Lineages have the order in which their holders happen to come back."""
    patch.setattr(returning, "recall", lambda turn, model, mark: None)


def what_was_seen_is_forgotten(patch: Patch) -> None:
    """A version that somebody was given is not waited for: `latest` may fall below it."""
    patch.setattr(returning, "raise_floor", lambda model, version: None)


def what_is_not_claimed_stays(patch: Patch) -> None:
    """A Join that is said again changes nothing."""
    patch.setattr(returning, "reconcile", lambda turn, member, request: None)


def other_servers_are_believed(patch: Patch) -> None:
    """A session that was with a second server meanwhile is what it was here before."""
    real = sessions.hello

    def hello(turn: Turn, request: Any) -> None:
        is_known = turn.sender in turn.state.sessions
        real(turn, replace(request, epoch=turn.state.epoch) if is_known else request)

    patch.setattr(sessions, "hello", hello)


# ---------------------------------------------------------------- engines, and the repository


def engines_serve_anything(patch: Patch) -> None:
    """Memory that is not registered is served."""
    patch.setattr(MemoryEngine, "check_served", lambda engine, ranges, bytes_done: None)


def engines_drop_the_last_range(patch: Patch) -> None:
    """A read says that it is done when its last range has not come."""
    real = MemoryEngine.copy_out

    def copy_out(engine: MemoryEngine, ranges: Any, bytes_done: int) -> None:
        whole = type(ranges)(ranges.remote[:-1], ranges.local[:-1], ranges.nbytes[:-1])
        real(engine, whole if len(ranges.nbytes) > 1 else ranges, bytes_done)

    patch.setattr(MemoryEngine, "copy_out", copy_out)


def errors_lose_their_place(patch: Patch) -> None:
    """An error that comes out of another process says what, but not where."""
    patch.setattr(errors.TensorHubError, "__reduce__", lambda error: (type(error), (error.message,)))


def a_fault_without_a_test(patch: Patch) -> None:
    """A fault enters the catalogue and nobody writes its test."""
    ids = (*fault_ids.FAULT_IDS, "the_moon" + "_falls")
    patch.setattr(fault_ids, "FAULT_IDS", ids)


def every_fault_has_a_test() -> None:
    """As `tests/repo` asks, of the catalogue as it is now."""
    for fault in fault_ids.FAULT_IDS:
        test_faults.test_fault_has_a_test(fault)


def every_range_lands(case: object, engine: Any, source: Any) -> None:
    """A batch of three ranges, over an engine."""
    engines.check_exact(engine, source, 4096, [100, 300])


# ---------------------------------------------------------------- the catalogue

UNIT, TWIN, EXPLORED = Layer.UNIT, Layer.TWIN, Layer.EXPLORED
SIMULATED, CONFORMANCE, REPO = Layer.SIMULATED, Layer.CONFORMANCE, Layer.REPO
#: Small explorations.
ONE_GROUP = partial(protocol.test_one_group_around_a_publish, "trainer#0")
A_RELAY = partial(protocol.test_two_replicas_and_a_relay, "a#0 done")

PLANTED: tuple[Planted, ...] = (
    # The server.
    Planted(readers_end_unnoticed, (Caught(EXPLORED, A_RELAY, "hidden content and readers"),)),
    Planted(queues_are_not_woken, (Caught(UNIT, test_placement.test_full_sources_make_readers_wait, "roll-0"),)),
    Planted(
        leases_never_end,
        (Caught(EXPLORED, protocol.test_a_source_dies, "a#1 failed"), Caught(TWIN, the_twin, "sorted(expected")),
    ),
    Planted(
        generations_are_used_twice,
        (Caught(UNIT, test_sessions.test_a_generation_names_one_filling, "every generation is held"),),
    ),
    Planted(
        shards_commit_alone,
        (
            Caught(EXPLORED, protocol.test_unpublish_among_two_groups, "answered twice"),
            Caught(SIMULATED, a_seed(0), "One version per replica violated"),
        ),
    ),
    Planted(shards_decide_alone, (Caught(UNIT, test_groups.test_one_version_per_replica, "one version per replica"),)),
    Planted(
        unpublish_does_not_wait,
        (
            Caught(EXPLORED, protocol.test_unpublish_among_two_groups, "not drained"),
            Caught(TWIN, the_twin, "sorted(expected"),
            Caught(SIMULATED, a_seed(3), "Drained violated"),
        ),
    ),
    Planted(
        unpublish_takes_the_next,
        (Caught(UNIT, test_sessions.test_an_unpublish_asked_again_takes_nothing_else, "m.Refused"),),
    ),
    Planted(
        idle_shards_untold,
        (Caught(TWIN, the_twin, "sorted(expected"), Caught(SIMULATED, a_seed(4), "Survives violated")),
    ),
    Planted(
        other_roots_are_offered,
        (Caught(UNIT, test_versions.test_conflicting_publisher_is_withdrawn, "an offered root is the version's"),),
    ),
    Planted(latest_is_any, (Caught(UNIT, partial(test_versions.test_selector, Latest(), "7"), "== expected"),)),
    # The graph.
    Planted(cycles_fit, (Caught(SIMULATED, a_story(orphans), "Survives violated: sources form a cycle"),)),
    Planted(raised_before_verified, (Caught(SIMULATED, a_story(liar), "Broken violated"),)),
    Planted(nobody_is_quarantined, (Caught(SIMULATED, a_story(sick), "a sick source was given"),)),
    # The client.
    Planted(
        no_digests,
        (
            Caught(SIMULATED, a_story(liar), "No false progress violated"),
            Caught(SIMULATED, a_seed(4), "No false progress violated"),
        ),
    ),
    Planted(no_digests_no_final_look, (Caught(SIMULATED, a_seed(4), "No false progress violated"),)),
    Planted(
        no_final_look,
        (
            Caught(
                UNIT, a_filling(test_filling.test_a_generation_that_ends_after_the_last_byte_is_caught), "DID NOT RAISE"
            ),
        ),
    ),
    Planted(shown_before_verified, (Caught(SIMULATED, a_seed(1), "Broken violated"),)),
    Planted(version_kept_after_failure, (Caught(SIMULATED, a_seed(1), "No false progress violated"),)),
    Planted(write_goes_unnoticed, (Caught(SIMULATED, a_seed(4), "Exact violated"),)),
    Planted(
        seats_are_not_taken_again,
        (Caught(UNIT, test_session.test_seats_are_taken_again_in_a_new_life, "m.Join"),),
    ),
    Planted(
        who_was_forgotten_reads_on,
        (Caught(SIMULATED, test_stories.test_a_reader_that_was_forgotten_stops, "LeaseLost"),),
    ),
    # Another life of the server.
    Planted(no_grace, (Caught(EXPLORED, lives.test_a_newer_version_is_on_its_way, "latest fell from 2 to 1"),)),
    Planted(
        groups_do_not_wait_for_shards,
        (Caught(EXPLORED, lives.test_a_decision_is_on_its_way, "a second decision"),),
    ),
    Planted(
        a_second_decision,
        (
            Caught(UNIT, test_returning.test_a_half_consumed_group_keeps_its_decision, "OLD"),
            Caught(EXPLORED, lives.test_a_decision_is_on_its_way, "BadRequest"),
        ),
    ),
    Planted(
        no_doubt,
        (Caught(EXPLORED, lives.test_one_shard_and_its_source, "not drained"),),
    ),
    Planted(
        fillings_are_forgotten,
        (
            Caught(EXPLORED, lives.test_one_shard_and_its_source, "all came back in time, and yet"),
            Caught(SIMULATED, a_seed(108), "Survives violated"),
        ),
    ),
    Planted(numbers_are_forgotten, (Caught(EXPLORED, lives.test_one_shard_and_its_source, "'behind'"),)),
    Planted(
        commits_are_forgotten,
        tuple(
            Caught(EXPLORED, partial(lives.test_a_commit_is_half_heard, deaf), "all came back in time, and yet")
            for deaf in range(2)
        ),
    ),
    Planted(
        other_bytes_are_believed,
        (Caught(UNIT, test_returning.test_claim_that_contradicts, "an offered root is the version's"),),
    ),
    Planted(lineages_come_as_they_come, (Caught(UNIT, test_returning.test_lineages_keep_their_order, "retry"),)),
    Planted(
        what_was_seen_is_forgotten,
        (Caught(UNIT, test_returning.test_a_version_that_somebody_has_seen_is_waited_for, "is None"),),
    ),
    Planted(
        what_is_not_claimed_stays,
        (Caught(UNIT, test_returning.test_what_a_seat_does_not_claim_is_dropped, "generations"),),
    ),
    Planted(
        what_is_given_up_is_claimed,
        (Caught(UNIT, test_returning.test_what_waits_to_be_overwritten_is_not_taken_back, "generations"),),
    ),
    Planted(
        other_servers_are_believed,
        (Caught(UNIT, test_returning.test_a_session_that_was_with_another_server_is_somebody_else, "known"),),
    ),
    # Engines, and the repository.
    Planted(
        engines_serve_anything,
        (Caught(CONFORMANCE, an_engine(engines.test_only_registered_bytes_are_served), "DID NOT RAISE"),),
    ),
    Planted(engines_drop_the_last_range, (Caught(CONFORMANCE, an_engine(every_range_lands), "expected"),)),
    Planted(
        errors_lose_their_place,
        (Caught(REPO, partial(test_errors.test_errors_survive_pickle, "WaitTimeout", 4), "PLACE"),),
    ),
    Planted(a_fault_without_a_test, (Caught(REPO, every_fault_has_a_test, "no test names the fault"),)),
)
