"""Calls of a group that come again, late, ahead of it, or make no sense: each is told so, and why, and changes nothing
for the others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import (
    DEFAULTS,
    LOCATORS_MAX,
    OUTCOMES_MAX,
    READERS_PER_SOURCE_MAX,
    REASON_TEXT_MAX,
    SECOND_NS,
)
from tensorhub.types import AtLeast, Exactly, Generation, Latest
from tests.unit.server.kit import ACTOR, Cluster, Process, pair


def single() -> tuple[Cluster, Process, Process]:
    """A trainer that has published version 1, and a rollout."""
    cluster = Cluster()
    trainer, roll = cluster.process("trainer"), cluster.process("roll")
    trainer.publish(1)
    trainer.seal(1)
    return cluster, trainer, roll


def asked(process: Process, timeout_s: int = 5, **change: object) -> m.Replicate:
    """What it last asked for, once more."""
    seat, timeout_ns = process.seat, timeout_s * SECOND_NS
    request = m.Replicate(seat, "a", process.group, process.sequence, Latest(), timeout_ns, process.generation)
    return replace(request, **change)  # type: ignore[arg-type]


def refused(answer: object) -> tuple[str, str]:
    assert isinstance(answer, m.Refused), answer
    return answer.error, answer.message


def why(answer: object) -> str:
    return refused(answer)[1]


# ---------------------------------------------------------------- what makes no sense

SENSELESS: dict[str, tuple[dict[str, object], str]] = {
    "selector": ({"selector": AtLeast(-1)}, "outside 0 to"),
    "generation": ({"generation": Generation(b"short")}, "16 random bytes"),
    "buffers": ({"buffers": ""}, "buffer set must be"),
    "locators": ({"locators": (m.Locator("memory", b""),) * (LOCATORS_MAX + 1)}, "at most 64 locators"),
}


@pytest.mark.parametrize("kind", SENSELESS)
def test_a_senseless_replicate_opens_nothing(kind: str) -> None:
    """It is refused by what is wrong with it, and the number is still free for one that makes sense."""
    change, message = SENSELESS[kind]
    _, _, roll = single()
    roll.generation = roll.fresh()
    assert message in why(roll.do(asked(roll, **change)))
    assert isinstance(roll.answer(roll.replicate()), m.Granted)


def test_what_is_being_unpublished_is_not_filled() -> None:
    """A replicate does not overtake the unpublish of its own buffer set."""
    cluster, trainer, reader = single()
    reader.replicate()
    trainer.unpublish(60)
    other = cluster.process("other")
    other.publish(2)
    other.seal(2)
    assert refused(trainer.answer(trainer.replicate())) == (
        "Busy",
        "buffer set 'a' is being unpublished; wait for it",
    )


# ---------------------------------------------------------------- numbers that are over


def test_a_number_that_is_over_is_told_with_its_end() -> None:
    """Who comes late hears how the transaction ended; or, when that is forgotten, where the group is now."""
    _, _, rolls = pair()
    rolls[0].replicate()
    rolls[0].abort("no space")
    rolls[1].replicate()
    late = why(rolls[1].answer(rolls[1].replicate()))
    assert "no space" in late
    assert "moved" not in late
    never = why(rolls[1].do(replace(asked(rolls[1]), group=rolls[1].group - 1)))
    assert f"the group is at {rolls[1].group}/1 now" in never
    assert "moved" not in never


def test_a_group_that_moved_tells_why() -> None:
    """A number of the group as it was before a sibling left is over for that reason; one of the group since, for its
    own."""
    _, _, rolls = pair()
    rolls[1].leave()
    assert "; the group moved: " in why(rolls[0].do(asked(rolls[0])))
    (moved,) = rolls[0].notices(m.Moved)
    assert isinstance(moved, m.Moved)
    rolls[0].group, rolls[0].sequence = moved.group, 0
    rolls[0].replicate()
    rolls[0].abort("no space")
    rolls[0].sequence = 0
    assert "moved" not in why(rolls[0].do(asked(rolls[0])))


# ---------------------------------------------------------------- the same once more


def test_who_holds_the_version_hears_it_again() -> None:
    """The answer was lost: the same request gets the same one."""
    cluster, _, roll = single()
    cluster.fetched(roll, 1)
    first = roll.answer(roll.replicate())
    assert isinstance(first, m.Held)
    assert roll.do(asked(roll)) == first


def test_the_same_call_twice_is_answered_once() -> None:
    """A frame that came twice is no later call: nobody is told that it was overtaken by itself."""
    cluster = Cluster()
    roll = cluster.process("roll")
    call = roll.replicate()
    cluster.send(roll.session, asked(roll), call)
    assert roll.answer(call) is None
    trainer = cluster.process("trainer")
    trainer.publish(1)
    assert isinstance(roll.answer(call), m.Granted)


def test_a_call_that_is_owed_nothing_is_not_overtaken() -> None:
    """A reader that reports its source owes no answer to an earlier call: none is refused."""
    cluster, _, roll = single()
    second = cluster.process("second")
    second.publish(1)
    second.seal(1)
    granted = roll.answer(roll.replicate())
    assert isinstance(granted, m.Granted)
    before = len(cluster.log)
    assert isinstance(roll.answer(roll.reroute(granted.source.generation)), m.Granted)
    assert not [out for out in cluster.log[before:] if isinstance(out.message, m.Refused)]


def test_who_is_done_is_not_granted_again() -> None:
    """A belated replicate of a shard that waits for its siblings: its place in the transaction is told, and the call
    that is owed the commit gets it."""
    _, _, rolls = pair()
    rolls[0].replicate()
    call = rolls[0].done(1)
    assert refused(rolls[0].do(asked(rolls[0]))) == ("Busy", "shard 0 of 0 is done")
    rolls[1].replicate()
    rolls[1].done(1)
    assert isinstance(rolls[0].answer(call), m.Committed)


def test_asked_again_without_a_source_the_time_counts_from_then() -> None:
    """Grant and source were lost, and all other places are taken: it waits as long as it says now, and no shorter."""
    cluster, trainer, roll = single()
    assert isinstance(roll.answer(roll.replicate(timeout_s=5)), m.Granted)
    other = cluster.process("other")
    other.publish(1)
    other.seal(1)
    cluster.alive(1, trainer, roll, other)
    for number in range(2 * READERS_PER_SOURCE_MAX - 1):
        reader = cluster.process(f"reader-{number}")
        assert isinstance(reader.answer(reader.replicate(timeout_s=60, serves=False)), m.Granted)
    cluster.alive(2, *cluster.processes.values())
    trainer.leave()
    call = roll.ask(asked(roll, 10))
    cluster.alive(9, *cluster.processes.values())
    assert roll.answer(call) is None
    cluster.alive(1, *cluster.processes.values())
    assert refused(roll.answer(call))[0] == "VersionUnavailable"


# ---------------------------------------------------------------- time


def test_nothing_is_due_for_who_left_while_it_waited() -> None:
    """Its wait ends with its seat: when the time comes there is nobody to tell."""
    cluster = Cluster()
    roll = cluster.process("roll")
    call = roll.replicate(timeout_s=5)
    roll.leave()
    before = len(cluster.log)
    cluster.wait(6)
    assert refused(roll.answer(call))[0] == "GroupAborted"
    assert not [out for out in cluster.log[before:] if out.to == roll.session]


def test_the_group_has_as_long_as_its_latest_shard() -> None:
    """Who asks later has its own time, and a margin to say that it is done: the others wait for it so long."""
    cluster, trainers, rolls = pair()
    rolls[0].replicate(timeout_s=2)
    call = rolls[0].done(1)
    cluster.alive(1, *trainers, *rolls)
    rolls[1].replicate(timeout_s=10)
    margin_s = DEFAULTS.commit_margin_ns // SECOND_NS
    cluster.alive(10 + margin_s - 1, *trainers, *rolls)
    assert rolls[0].answer(call) is None
    cluster.alive(1, *trainers, *rolls)
    assert refused(rolls[0].answer(call))[0] == "GroupAborted"


# ---------------------------------------------------------------- decisions


def relay_pair() -> tuple[Cluster, list[Process], list[Process]]:
    """A trainer and a relay of two that hold version 1."""
    cluster, trainers, _ = pair()
    relays = cluster.group("relay")
    for relay in relays:
        relay.replicate()
    for relay in relays:
        relay.done(1)
        relay.sequence += 1
    return cluster, trainers, relays


def test_what_will_be_overwritten_is_offered_to_nobody_from_the_decision_on() -> None:
    """Of all shards, also those that have not asked yet; an abort shows it again."""
    cluster, trainers, relays = relay_pair()
    for trainer in trainers:
        trainer.unpublish()
        trainer.publish(2)
        trainer.seal(2)
    (copy,) = cluster.machine.state.sessions[relays[1].session].members[relays[1].seat].holdings.values()
    relays[0].replicate()
    assert copy.hidden
    relays[0].abort("no space")
    assert not copy.hidden


def test_no_source_is_kept_for_a_shard_that_holds_the_version() -> None:
    """It has not asked yet, and will be told that it holds it: the trainer's shard may go."""
    _, trainers, relays = relay_pair()
    relays[1].unpublish()
    relays[1].replicate()
    assert isinstance(trainers[0].answer(trainers[0].unpublish()), m.Unpublished)
    assert trainers[1].answer(trainers[1].unpublish()) is None


def test_the_source_kept_for_the_late_is_of_the_replica_that_the_first_reads_from() -> None:
    """One replica's shards are held up, not those of several."""
    cluster, _, rolls = pair()
    others = cluster.group("other")
    for other in others:
        other.publish(1)
        other.seal(1)
    reader = cluster.process("reader#0")
    granted = reader.answer(reader.replicate(serves=False))
    assert isinstance(granted, m.Granted)
    assert granted.source.seat.replica == "trainer"
    first = rolls[0].answer(rolls[0].replicate())
    assert isinstance(first, m.Granted)
    assert first.source.seat.replica == "other"
    ended = others[1].answer(others[1].unpublish(abandon=True))
    assert isinstance(ended, m.Unpublished)
    assert ended.readers == ("roll#1",)


def test_who_waits_for_what_cannot_come_is_told_at_once() -> None:
    """An exact version that newer ones have passed: refused by name and place, and the group's number is used up."""
    _, trainers, rolls = pair()
    for trainer in trainers:
        trainer.unpublish()
        trainer.publish(3)
        trainer.seal(3)
    answer = rolls[0].answer(rolls[0].replicate(Exactly(2)))
    assert isinstance(answer, m.Refused)
    assert (answer.error, answer.where.replica, answer.where.shard) == ("VersionUnavailable", "roll", 0)
    (notice,) = rolls[1].notices(m.TransactionAborted)
    assert isinstance(notice, m.TransactionAborted)
    assert notice.sequence == 0


def test_a_version_cut_otherwise_is_refused_to_all_who_asked() -> None:
    """Layouts do not mix: each shard that waits hears that, not only that its group ended."""
    cluster = Cluster()
    rolls = cluster.group("roll", 3)
    calls = [roll.replicate() for roll in rolls[:2]]
    for trainer in cluster.group("trainer", 2):
        trainer.publish(1)
        trainer.seal(1)
    assert [refused(roll.answer(call))[0] for roll, call in zip(rolls, calls, strict=False)] == ["LayoutMismatch"] * 2
    assert len(rolls[2].notices(m.TransactionAborted)) == 1


# ---------------------------------------------------------------- done


def test_done_again_before_the_commit() -> None:
    """The call that came later gets the commit; the earlier one hears that it was overtaken."""
    _, _, rolls = pair()
    for roll in rolls:
        roll.replicate()
    first, second = rolls[0].done(1), rolls[0].done(1)
    assert refused(rolls[0].answer(first))[0] == "Busy"
    rolls[1].done(1)
    assert isinstance(rolls[0].answer(second), m.Committed)


def test_a_reader_that_is_done_needs_no_other_source() -> None:
    """It asked for one and then found all it needs: that call ends, by name, and is in no line any more."""
    cluster, trainers, rolls = pair()
    cluster.process("other#0").replicate(timeout_s=30)
    for roll in rolls:
        roll.replicate(timeout_s=30)
    cluster.wait(0.3)
    call = rolls[0].reroute(trainers[0].published, timeout_s=30)
    assert rolls[0].answer(call) is None
    rolls[0].done(1)
    assert refused(rolls[0].answer(call)) == ("Busy", "the filling was reported done")


@pytest.mark.parametrize("was", ["reading", "waiting for a source"])
def test_who_is_done_has_everything_before_its_group_commits(was: str) -> None:
    """Whatever it told last, and whether it had a source then: others may read all of it while its siblings read on."""
    cluster, trainers, rolls = pair()
    for roll in rolls:
        roll.replicate(timeout_s=30)
    cluster.wait(0.3)  # until nobody waits for it to serve
    late = cluster.group("late")
    for each, trainer in zip(late, trainers, strict=True):
        granted = each.answer(each.replicate(timeout_s=30))
        assert isinstance(granted, m.Granted)
        assert granted.source.seat == trainer.seat
    rolls[0].serve()
    if was != "reading":
        assert rolls[0].answer(rolls[0].reroute(trainers[0].published, timeout_s=30)) is None
    late[0].progress(5)
    rolls[0].done(1)
    trainers[0].leave()
    moved = late[0].answer(late[0].reroute(trainers[0].published, watermark=5))
    assert isinstance(moved, m.Granted)
    assert moved.source.seat == rolls[0].seat


def test_a_copy_is_a_source_like_others_from_its_commit_on() -> None:
    """Also one that a reader gave up while it filled: newcomers read from it rather than from the publisher."""
    cluster, _, roll = single()
    roll.replicate()
    roll.serve()
    late = cluster.process("late")
    granted = late.answer(late.replicate())
    assert isinstance(granted, m.Granted)
    assert granted.source.seat == roll.seat
    late.reroute(roll.generation)
    roll.done(1)
    other = cluster.process("other")
    answer = other.answer(other.replicate())
    assert isinstance(answer, m.Granted)
    assert answer.source.seat == roll.seat
    assert "idle" in answer.reason


# ---------------------------------------------------------------- ends


def test_reasons_are_kept_of_what_failed_only() -> None:
    """Who ends a transaction that was aborted adds its own reason, once; an empty one, or one about a transaction that
    was committed, says nothing."""
    _, _, rolls = pair()
    for roll in rolls:
        roll.replicate()
    rolls[0].abort("no space")
    for reason in ("", "no route", "again"):
        rolls[1].do(m.Abort(rolls[1].seat, rolls[1].group, 0, reason))
    text = why(rolls[1].answer(rolls[1].replicate()))
    assert "shard 0: no space" in text
    assert "shard 1: no route" in text
    assert "again" not in text
    for roll in rolls:
        roll.sequence = 1
        roll.replicate()
    for roll in rolls:
        roll.done(1)
    rolls[0].do(m.Abort(rolls[0].seat, rolls[0].group, 1, "too late"))
    assert "too late" not in why(rolls[0].answer(rolls[0].replicate()))


@pytest.mark.parametrize("more", [0, 1])
def test_a_reason_is_told_up_to_a_limit(more: int) -> None:
    """One that is longer is cut, and shows it."""
    _, _, rolls = pair()
    for roll in rolls:
        roll.replicate()
    rolls[0].abort("x" * (REASON_TEXT_MAX + more))
    (notice,) = rolls[1].notices(m.TransactionAborted)
    assert isinstance(notice, m.TransactionAborted)
    assert ("x" * REASON_TEXT_MAX + "..." in notice.reason) == bool(more)
    assert "x" * REASON_TEXT_MAX in notice.reason


def test_who_gives_up_waiting_names_the_shards_it_waited_for() -> None:
    """Once a shard is done its group's others are what is missing; before, its own reason is all."""
    for is_done in (True, False):
        cluster = Cluster(shards=3)
        for trainer in cluster.group("trainer", 3):
            trainer.publish(1)
            trainer.seal(1)
        rolls = cluster.group("roll", 3)
        for roll in rolls:
            roll.replicate()
        if is_done:
            rolls[0].done(1)
        rolls[0].abort("out of time")
        (notice,) = rolls[1].notices(m.TransactionAborted)
        assert isinstance(notice, m.TransactionAborted)
        assert ("out of time; not done: shard 1, 2" in notice.reason) == is_done


def test_ends_are_told_to_those_who_watch() -> None:
    """Of a group, the version, the transaction, and the shard that failed it, if one did."""
    cluster, _, rolls = pair()
    watcher = cluster.process("watcher#0")
    watcher.ask(m.Watch(ACTOR))
    for roll in rolls:
        roll.replicate()
    rolls[1].abort("no space")
    for roll in rolls:
        roll.sequence = 1
        roll.replicate()
    for roll in rolls:
        roll.done(1)
    events = [out.message for out in cluster.log if out.to == watcher.session and isinstance(out.message, m.Event)]
    told = [(event.kind, event.replica, str(event.version)) for event in events]
    assert [each for each in told if each[0] in ("aborted", "committed")] == [
        ("aborted", "roll", "1"),
        ("committed", "roll", "1"),
    ]


def test_an_abort_of_another_number() -> None:
    """Of what is over it is as good as done, whether its end is remembered or not; of what cannot be yet it is a
    mistake. Neither touches the transaction that is open."""
    _, _, rolls = pair()
    reader = rolls[0]
    for _ in range(OUTCOMES_MAX + 1):
        reader.replicate()
        reader.abort("again")
    assert isinstance(reader.answer(reader.replicate()), m.Granted)
    group, now = reader.group, reader.sequence
    assert "the group is at" in why(reader.do(asked(reader, sequence=now - OUTCOMES_MAX - 1)))
    assert "again" in why(reader.do(asked(reader, sequence=now - OUTCOMES_MAX)))
    for number in ((group, 0), (group, now - 1), (group - 1, now), (group - 1, now + 1)):
        assert reader.do(m.Abort(reader.seat, *number, "late")) == m.Ok()
    error, message = refused(reader.do(m.Abort(reader.seat, group, now + 1, "early")))
    assert (error, f"ahead of its group at {now}" in message) == ("BadRequest", True)
    assert not rolls[1].notices(m.TransactionAborted)[now:]
    assert isinstance(reader.do(asked(reader)), m.Granted)
