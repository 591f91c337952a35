"""Group transactions beyond their tables: agreement, pins, aborts that name everybody, late and repeated calls."""

from __future__ import annotations

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import SECOND_NS
from tensorhub.types import AtLeast, Exactly, Latest
from tests.unit.server.kit import Cluster, Process, pair, root


def error_of(answer: object) -> str:
    assert isinstance(answer, m.Refused), answer
    return answer.error


def next_version(trainers: list[Process], number: int) -> None:
    for trainer in trainers:
        trainer.unpublish()
    for trainer in trainers:
        trainer.publish(number)
        trainer.seal(number)


def test_one_version_per_replica() -> None:
    """`one_version_per_replica`: a shard that asks after a newer publish gets what its group decided before."""
    cluster, trainers, rolls = pair()
    other = cluster.group("other")
    for shard in other:
        shard.publish(2)
        shard.seal(2)
    first = rolls[0].answer(rolls[0].replicate(AtLeast(1)))
    newest = cluster.group("newest")
    for shard in newest:
        shard.publish(3)
        shard.seal(3)
    second = rolls[1].answer(rolls[1].replicate(AtLeast(1)))
    assert isinstance(first, m.Granted)
    assert isinstance(second, m.Granted)
    assert first.version == second.version
    assert first.version.number == 2
    assert trainers[0].seat.shard == 0


def test_pinned_source_serves_the_late_shard() -> None:
    """An unpublish waits for the member that has not asked yet, and grants it although it is hidden."""
    _, trainers, rolls = pair()
    rolls[0].replicate()
    calls = [trainer.unpublish() for trainer in trainers]
    assert trainers[1].answer(calls[1]) is None
    granted = rolls[1].answer(rolls[1].replicate())
    assert isinstance(granted, m.Granted)
    assert granted.source.seat == trainers[1].seat
    for roll in rolls:
        roll.done(1)
    answers = [trainer.answer(call) for trainer, call in zip(trainers, calls, strict=True)]
    assert [(answer.readers, len(answer.served)) for answer in answers] == [((), 1)] * 2, "done, and remembered by name"


def test_pin_moves_when_its_holder_dies() -> None:
    """A kept source that dies is replaced by another holder of the version."""
    cluster, trainers, rolls = pair()
    rolls[0].replicate()
    spare = cluster.process("spare#1")
    spare.publish(1)
    spare.seal(1)
    trainers[1].leave()
    call = spare.unpublish()
    assert spare.answer(call) is None
    granted = rolls[1].answer(rolls[1].replicate())
    assert isinstance(granted, m.Granted)
    assert granted.source.seat == spare.seat


def test_group_mismatch() -> None:
    """Shards that ask for different things: the transaction is aborted for both, by name."""
    _, _, rolls = pair()
    call = rolls[0].replicate(Exactly(7))
    assert error_of(rolls[1].answer(rolls[1].replicate(Latest()))) == "GroupMismatch"
    answer = rolls[0].answer(call)
    assert error_of(answer) == "GroupAborted"
    assert "shard 1" in str(answer)


def test_double_replicate() -> None:
    """`double_replicate`: a second replicate of a shard while one runs is refused by name; the first goes on. The hub
    refuses it before (`Busy`), so that what comes here follows one whose end was lost."""
    _, _, rolls = pair()
    generation = rolls[0].fresh()
    rolls[0].replicate()
    running = rolls[0].generation
    assert error_of(rolls[0].answer(rolls[0].replicate())) == "GroupAborted"
    rolls[0].generation = running
    rolls[1].replicate()
    call = rolls[0].done(1)
    assert isinstance(rolls[1].answer(rolls[1].done(1)), m.Committed)
    assert isinstance(rolls[0].answer(call), m.Committed)
    assert generation != running


def test_already_held() -> None:
    """A group that holds the version is told so at once, drains nothing, and commits as after a pull."""
    _, _, rolls = pair()
    for roll in rolls:
        roll.replicate()
    for roll in rolls:
        roll.done(1)
        roll.sequence += 1
    assert [roll.answer(roll.replicate()) for roll in rolls] == [
        m.Held(m.Version("main", 1), m.LineageMark("main", 0, 1))
    ] * 2
    calls = [roll.done(1) for roll in rolls]
    assert isinstance(rolls[0].answer(calls[0]), m.Committed)


def test_drain_timeout_shows_the_old_version_again() -> None:
    """Own readers that do not end: `DrainTimeout`, and the old version is shown again, for nothing was written."""
    cluster = Cluster()
    trainer, roll, reader = (cluster.process(name) for name in ("trainer", "roll", "reader"))
    trainer.publish(1)
    trainer.seal(1)
    cluster.fetched(roll, 1)
    trainer.unpublish()
    reader.replicate(timeout_s=60)
    trainer.publish(2)
    call = roll.replicate(timeout_s=3)
    assert cluster.state_of(1) == "hidden"
    cluster.alive(4, trainer, roll, reader)
    assert error_of(roll.answer(call)) == "DrainTimeout"
    assert "reader#0" in str(roll.answer(call))
    assert cluster.state_of(1) == "readable"


def test_sibling_dies() -> None:
    """`sibling_dies`: within what is left of the lease the group aborts by name; the survivor starts a new group."""
    cluster, trainers, rolls = pair()
    rolls[0].replicate()
    rolls[0].serve()
    rolls[1].replicate()
    call = rolls[0].done(1)
    cluster.disconnect(rolls[1])
    cluster.alive(3, rolls[0], *trainers)
    answer = rolls[0].answer(call)
    assert error_of(answer) == "GroupAborted"
    assert "shard 1" in str(answer)
    moved = rolls[0].notices(m.Moved)[0]
    assert isinstance(moved, m.Moved)
    late = rolls[0].answer(rolls[0].replicate())
    assert error_of(late) == "GroupAborted"
    rolls[0].group, rolls[0].sequence = moved.group, 0
    assert isinstance(rolls[0].answer(rolls[0].replicate()), m.Granted)


def aborted_by_sibling() -> tuple[Cluster, Process, int, list[Process]]:
    """Two shards read; the second aborts; the first one's source unpublishes, and so far nobody has answered it."""
    cluster, trainers, rolls = pair()
    for roll in rolls:
        roll.replicate()
    rolls[1].abort()
    call = trainers[0].unpublish(timeout_s=60)
    assert trainers[1].answer(trainers[1].unpublish()) is not None, "who aborts has stopped"
    assert trainers[0].answer(call) is None
    return cluster, trainers[0], call, rolls


@pytest.mark.parametrize("word", ["abort", "replicate", "abort of a later one", "leave", "goodbye", "lease"])
def test_aborted_reader_is_waited_for_until_its_word(word: str) -> None:
    """`sibling_dies`: a reader aborted by its sibling may read on, so its source is drained by its own word or the end
    of its lease, whichever comes first."""
    cluster, trainer, call, rolls = aborted_by_sibling()
    reader = rolls[0]
    match word:
        case "abort":
            reader.abort("")
        case "replicate":
            reader.sequence += 1
            reader.replicate()
        case "abort of a later one":
            reader.sequence += 1
            reader.abort()
        case "leave":
            reader.leave()
        case "goodbye":
            reader.do(m.Goodbye())
        case "lease":
            cluster.alive(9, trainer)
            assert trainer.answer(call) is None
            cluster.alive(2, trainer)
    assert trainer.answer(call) == m.Unpublished((), (str(reader.seat),))


@pytest.mark.parametrize("message", ["join", "beat", "progress", "done", "replicate again", "abort of an earlier one"])
def test_aborted_reader_is_not_taken_at_other_words(message: str) -> None:
    """What a process also says while it reads, or said before, does not mean that it has stopped."""
    _, trainer, call, rolls = aborted_by_sibling()
    reader = rolls[0]
    asked = (reader.seat, "a", reader.group, reader.sequence, Latest(), 5_000_000_000, reader.generation)
    match message:
        case "join":
            reader.join()
        case "beat":
            reader.do(m.Beat(reader.session))
        case "progress":
            reader.progress(3)
        case "done":
            reader.done(1)
        case "replicate again":
            reader.do(m.Replicate(*asked))
        case "abort of an earlier one":
            reader.do(m.Abort(reader.seat, reader.group - 1, 7, "no route"))
    assert trainer.answer(call) is None


def test_aborted_reader_takes_no_place() -> None:
    """Four aborted readers that have not stopped yet keep nobody from their source; an unpublish names them."""
    cluster = Cluster(shards=2)
    trainers = cluster.group("trainer")
    for trainer in trainers:
        trainer.publish(1)
        trainer.seal(1)
    for number in range(4):
        late, quits = cluster.group(f"late-{number}")
        late.replicate()
        quits.abort()
    reader = cluster.process("reader#0")
    assert isinstance(reader.answer(reader.replicate()), m.Granted)
    reader.abort()
    answer = trainers[0].answer(trainers[0].unpublish(abandon=True))
    assert isinstance(answer, m.Unpublished)
    assert answer.readers == tuple(f"late-{number}#0" for number in range(4))
    assert cluster.processes["late-0#0"].abort("") == m.Ok()


def test_reader_that_lost_its_seat_is_waited_for() -> None:
    """A reader without its control connection may live and read: who takes its seat takes no grant back in its name."""
    cluster = Cluster()
    trainer, reader = cluster.process("trainer"), cluster.process("reader")
    trainer.publish(1)
    trainer.seal(1)
    reader.replicate()
    cluster.disconnect(reader)
    cluster.process("reader", life=2)
    call = trainer.unpublish(timeout_s=60)
    reader.hello()
    assert error_of(reader.join()) == "SeatTaken"
    assert trainer.answer(call) is None
    assert reader.abort("") == m.Ok()
    assert isinstance(trainer.answer(call), m.Unpublished)


def test_aborted_reader_holds_up_an_overwrite() -> None:
    """A relay whose aborted reader has not stopped does not get its next grant before."""
    cluster, trainers, relays = pair()
    for relay in relays:
        relay.replicate()
    for relay in relays:
        relay.done(1)
        relay.sequence += 1
    for trainer in trainers:
        trainer.unpublish()
    reader, quits = cluster.group("reader")
    reader.replicate()
    quits.abort()
    next_version(trainers, 2)
    calls = [relay.replicate() for relay in relays]
    assert relays[0].answer(calls[0]) is None
    assert isinstance(relays[1].answer(calls[1]), m.Granted)
    reader.abort("")
    assert isinstance(relays[0].answer(calls[0]), m.Granted)


def test_all_errors_surface() -> None:
    """`all_errors_surface`: a process that dies with two shards, and who never asked, are all named."""
    cluster = Cluster(shards=3)
    trainers = cluster.group("trainer", 3)
    rolls = cluster.group("roll", 3)
    for trainer in trainers:
        trainer.publish(1)
        trainer.seal(1)
    rolls[0].replicate(timeout_s=2)
    call = rolls[0].done(1)
    rolls[1].replicate(timeout_s=2)
    cluster.alive(8, *trainers, *rolls)
    text = str(rolls[0].answer(call))
    assert "shard 1: it was still reading" in text
    assert "shard 2: it never asked" in text
    assert len(rolls[1].notices(m.TransactionAborted)) == 1


def test_who_waited_in_vain_hears_what_for() -> None:
    """A wait for a version ends with the selector and what there is; a wait for a source, with the version and why
    none was to be had."""
    cluster = Cluster()
    trainer, roll = cluster.process("trainer"), cluster.process("roll")
    trainer.publish(1)
    trainer.seal(1)
    call = roll.replicate(Exactly(2), timeout_s=2)
    cluster.alive(3, trainer, roll)
    assert error_of(roll.answer(call)) == "WaitTimeout"
    assert "no version matched 2 in time" in str(roll.answer(call))
    for number in range(4):
        other = cluster.process(f"other-{number}")
        assert isinstance(other.answer(other.replicate(timeout_s=60, serves=False)), m.Granted)
    roll.sequence += 1
    call = roll.replicate(timeout_s=2)
    cluster.alive(3, *cluster.processes.values())
    assert error_of(roll.answer(call)) == "VersionUnavailable"
    assert "no source of version 1 in time: none of 5 holders has a place" in str(roll.answer(call))


def test_done_again_after_commit() -> None:
    """A lost commit reply: the same `Done` is answered again, also when the group has moved on."""
    _, _, rolls = pair()
    for roll in rolls:
        roll.replicate()
    for roll in rolls:
        roll.done(1)
    rolls[1].leave()
    assert rolls[0].answer(rolls[0].done(1)) == m.Committed(m.Version("main", 1))


def test_wrong_root_fails_the_group() -> None:
    """`transport_lies`: a root that is not the version's is no success for anybody."""
    _, _, rolls = pair()
    for roll in rolls:
        roll.replicate()
    call = rolls[0].done(1)
    assert error_of(rolls[1].answer(rolls[1].done(1, root(9)))) == "SourceFailed"
    assert error_of(rolls[0].answer(call)) == "GroupAborted"


def test_subset_never_serves() -> None:
    """`subset_selection_exact`: a filling of a subset is neither a partial nor a complete source."""
    cluster = Cluster()
    trainer, roll = cluster.process("trainer"), cluster.process("roll")
    trainer.publish(1)
    trainer.seal(1)
    roll.replicate(serves=False)
    roll.serve()
    other = cluster.process("other")
    granted = other.answer(other.replicate())
    assert isinstance(granted, m.Granted)
    assert granted.source.seat == trainer.seat
    assert isinstance(roll.answer(roll.done(1)), m.Committed)
    assert roll.seat not in {holding.member.seat for holding in cluster.machine.state.generations.values()}


def test_same_request_twice() -> None:
    """A request that arrives again under another call takes the answer over; the first is told so."""
    cluster = Cluster()
    roll = cluster.process("roll")
    call = roll.replicate()
    request = m.Replicate(roll.seat, "a", roll.group, 0, Latest(), 5_000_000_000, roll.generation)
    again = roll.ask(request)
    assert error_of(roll.answer(call)) == "Busy"
    cluster.process("trainer").publish(1)
    assert isinstance(roll.answer(again), m.Granted)
    assert isinstance(roll.do(request), m.Granted)


def test_same_request_after_its_source_was_lost() -> None:
    """A grant that was lost on its way, and then its source: asked again, the reader gets another source, or waits for
    one; it has done nothing wrong, and is not told so."""
    cluster = Cluster()
    first, second, roll = (cluster.process(name) for name in ("first", "second", "roll"))
    for trainer in (first, second):
        trainer.publish(1)
        trainer.seal(1)
    roll.replicate(timeout_s=30)
    request = m.Replicate(roll.seat, "a", roll.group, 0, Latest(), 5_000_000_000, roll.generation)
    granted = roll.do(request)
    assert isinstance(granted, m.Granted)
    lost, left = (first, second) if granted.source.seat == first.seat else (second, first)
    lost.leave()
    anew = roll.do(request)
    assert isinstance(anew, m.Granted)
    assert anew.source.seat == left.seat
    left.leave()
    assert error_of(roll.do(request)) == "VersionUnavailable"


def test_another_filling_under_the_same_number() -> None:
    """Whoever gave a replicate up unheard and asks anew is told to do so once more, as of any lost transaction: an
    outage is no mistake of the caller's."""
    cluster = Cluster()
    roll = cluster.process("roll")
    roll.replicate()
    assert error_of(roll.answer(roll.replicate())) == "GroupAborted"
    assert roll.abort("") == m.Ok()
    cluster.process("trainer").publish(1)
    assert isinstance(roll.answer(roll.replicate()), m.Granted)


def test_no_advance_on_failure() -> None:
    """`no_advance_on_failure`: after a failed replicate the replica holds nothing; the next one heals it."""
    _, trainers, rolls = pair()
    for roll in rolls:
        roll.replicate()
    for roll in rolls:
        roll.done(1)
        roll.sequence += 1
    next_version(trainers, 2)
    for roll in rolls:
        roll.replicate()
    rolls[0].abort()
    rolls[1].sequence += 1
    assert all(
        not member.holdings
        for member in rolls[0]
        .cluster.machine.state.models[rolls[0].seat.model]
        .replicas[rolls[0].seat.replica]
        .members.values()
    )
    for roll in rolls:
        assert isinstance(roll.answer(roll.replicate()), m.Granted)


def test_a_grant_says_how_long_it_waited_for_the_readers_own_readers() -> None:
    """`Replication.phases` tells waiting for a version from draining: only the server knows which of them it was."""
    cluster = Cluster(shards=1)
    trainer, relay, below = (cluster.process(name, shards=1) for name in ("trainer", "relay", "below"))
    trainer.publish(1)
    trainer.seal(1)
    cluster.fetched(relay, 1)
    trainer.unpublish()
    assert below.answer(below.replicate()).source.seat == relay.seat
    trainer.publish(2)
    trainer.seal(2)
    call = relay.replicate()
    assert relay.answer(call) is None
    cluster.wait(2)
    below.abort()
    assert relay.answer(call).drained_ns == 2 * SECOND_NS
