"""A new life of the server, which begins empty: what sessions bring back, and what is not decided before they have.

Ids are those of `fault-cases`: `server_restart_midtransfer`, `server_recreated_same_name`.
"""

from __future__ import annotations

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import DEFAULTS, SECOND_NS
from tensorhub.types import AtLeast, Digest, Exactly, Generation, Latest, Newest, Selector, Version
from tests.unit.server.comers import MAIN, NEW, OLD, back, holder, reader, trainer_of
from tests.unit.server.kit import LATEST, OTHER_LIFE, Cluster, claim, content, ident, root, undertaking

GRACE_S = DEFAULTS.grace_ns / SECOND_NS
LEASE_S = DEFAULTS.lease_ns / SECOND_NS


def refused(answer: m.Reply | m.Notice | None) -> str:
    assert isinstance(answer, m.Refused), answer
    return answer.error


# ---------------------------------------------------------------- holdings


def test_claims_are_offered_again() -> None:
    """What sessions bring to an empty server is readable as before, and what it was called stays taken."""
    cluster = Cluster()
    trainer_of(cluster, 4)
    reader = cluster.process("roll-2")
    assert cluster.fetched(reader, 4).source.seat.replica == "trainer"
    publisher = cluster.process("other")
    assert refused(publisher.publish(3)) == "VersionOrder"


def test_a_claimed_source_is_not_drained_before_its_old_readers_could_come_back() -> None:
    """Drained, over a restart: a new server cannot know who still reads what an earlier one granted; a lease later
    everybody is back or has no lease any more. What was hidden stays hidden."""
    cluster = Cluster()
    trainer = trainer_of(cluster, 4, hidden=True)
    observer = cluster.process("roll")
    assert observer.answer(observer.replicate()) is None
    call = trainer.unpublish(timeout_s=3)
    cluster.alive(4, trainer, observer)
    assert "an earlier life" in trainer.answer(call).message
    call = trainer.unpublish(timeout_s=60)
    cluster.alive(5, trainer, observer)
    assert trainer.answer(call) is None
    cluster.alive(5, trainer, observer)
    assert trainer.answer(call).readers == ()


def test_what_a_seat_does_not_claim_is_dropped() -> None:
    """A publish whose answer was lost, or an abandon that never arrived: the next Join of the seat sets it right."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    trainer.seal(1)
    assert refused(trainer.publish(1)) == "AlreadyPublished"
    assert isinstance(trainer.join(), m.Joined)
    assert not cluster.machine.state.generations
    assert isinstance(trainer.publish(2), m.Announced)


def test_what_a_seat_claims_later_is_taken() -> None:
    """A commit that an earlier life told of while this one was already there: the next Join brings it."""
    cluster = Cluster()
    roll = back(cluster, "roll")
    assert isinstance(roll.join((claim(roll),)), m.Joined)
    assert cluster.state_of(4) == "readable"


def test_what_waits_to_be_overwritten_is_not_taken_back() -> None:
    """A reader that waits for a source has been forgotten as a holder of the old version. One that comes back over a
    new connection then has not heard of it, and claims that version: nobody is sent to what is about to be overwritten,
    and nothing of it is left when the grant comes."""
    cluster = Cluster()
    trainer, roll = cluster.process("trainer"), cluster.process("roll")
    trainer.publish(1)
    trainer.seal(1)
    cluster.fetched(roll, 1)
    old = roll.generation
    trainer.unpublish()
    trainer.publish(2)
    trainer.seal(2)
    other = cluster.process("other")
    other.replicate(timeout_s=30)
    waits = roll.replicate(timeout_s=30)
    assert roll.answer(waits) is None
    assert old not in cluster.machine.state.generations
    claimed = claim(roll, generation=old, version=Version("main", 1), content=content(1), root=root(1))
    assert isinstance(roll.join((claimed,)), m.Joined)
    assert old not in cluster.machine.state.generations
    assert cluster.state_of(1) == "absent"
    other.serve()
    other.progress(4)
    assert isinstance(roll.answer(waits), m.Granted)
    assert roll.held("a") == roll.generation


def test_claim_that_contradicts() -> None:
    """A claim of other bytes under a known version is not taken, and its owner is told."""
    cluster = Cluster()
    holder(cluster, "roll-1")
    other = holder(cluster, "roll-2", root=root(5))
    assert len(other.notices(m.Conflicted)) == 1
    assert len(cluster.machine.state.generations) == 1


# ---------------------------------------------------------------- transfers


def test_a_transfer_goes_on() -> None:
    """Nothing is granted anew: the filling reads on from its source, commits by its old numbers, and serves."""
    cluster = Cluster()
    trainer = trainer_of(cluster, 4)
    source = Generation(ident("claim of trainer"))
    roll = reader(cluster, upstream=source)
    assert (roll.group, roll.sequence) == (7, 3)
    roll.progress(5)
    assert roll.answer(roll.done(4)) == m.Committed(OLD)
    assert cluster.fetched(cluster.process("next"), 4).source.seat.replica in ("roll", "trainer")
    assert trainer.notices(m.Conflicted) == []


@pytest.mark.parametrize("shards", [1, 2], ids=["committed", "before the commit"])
def test_a_transfer_that_is_done_awaits_its_source_no_more(shards: int) -> None:
    """A reader is done before its source is back: whoever then returns as that source has no reader, neither while a
    sibling still reads nor after the commit."""
    cluster = Cluster()
    roll = reader(cluster, "roll#0", shards=shards, upstream=Generation(ident("claim of trainer#0")))
    call = roll.done(4)
    assert (roll.answer(call) == m.Committed(OLD)) == (shards == 1)
    trainer = back(cluster, "trainer#0", claim(cluster.stranger("trainer#0"), published=True), shards=shards)
    (holding,) = cluster.machine.state.sessions[trainer.session].members[trainer.seat].holdings.values()
    assert not holding.readers


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_transfer_holds_its_source(reader_first: bool) -> None:
    """Whoever comes back first: a drain waits for the reader."""
    cluster = Cluster()
    source = Generation(ident("claim of trainer"))
    if reader_first:
        reader(cluster, upstream=source)
    trainer = trainer_of(cluster, 4)
    if not reader_first:
        reader(cluster, upstream=source)
    roll = cluster.processes["roll"]
    call = trainer.unpublish(timeout_s=60)
    cluster.alive(30, trainer, roll)
    assert trainer.answer(call) is None
    roll.leave()
    assert trainer.answer(call).readers == ()


def test_a_source_that_comes_back_has_what_its_reader_has() -> None:
    """The reader is back first and tells of five chunks, its source then of two, from before: it has five."""
    cluster = Cluster()
    relay = cluster.stranger("relay")
    source = Generation(ident("relay fills"))
    reader(cluster, upstream=source, watermark=5, bytes_done=5 * 65536)
    relay.generation = source
    relay.hello(OTHER_LIFE)
    told = undertaking(relay, watermark=2, upstream=Generation(ident("gone")))
    relay.join(standing=m.Standing(7, 0, undertaking=told))
    assert cluster.machine.state.generations[source].watermark == 5


def test_one_join_names_few_lineages() -> None:
    """A liar cannot use up all lineages of a model at once."""
    cluster = Cluster()
    marks = tuple(m.LineageMark(f"lineage {number}", number, 0) for number in range(1000))
    liar = back(cluster, "liar", lineages=marks, seen=None)
    assert len(cluster.machine.state.models[liar.seat.model].lineages) < 20


def test_a_transfer_whose_source_died_with_the_server_waits_for_those_on_their_way() -> None:
    """A re-route in the grace waits for holders that are not back yet, and gets the first that is."""
    cluster = Cluster()
    gone = Generation(ident("gone"))
    roll = reader(cluster, upstream=gone)
    call = roll.reroute(gone, watermark=3)
    assert roll.answer(call) is None
    holder(cluster, "other")
    granted = roll.answer(call)
    assert isinstance(granted, m.Granted)
    assert granted.source.seat.replica == "other"


def test_a_transfer_without_any_source_ends_with_the_grace() -> None:
    """Nobody else came: what the reader waits for cannot come any more, and it hears so."""
    cluster = Cluster()
    gone = Generation(ident("gone"))
    roll = reader(cluster, upstream=gone)
    call = roll.reroute(gone, watermark=3, timeout_s=60)
    cluster.alive(GRACE_S + 1, roll)
    assert refused(roll.answer(call)) == "VersionUnavailable"


def test_a_subset_goes_on_and_serves_nobody() -> None:
    """`replicate(only=...)` survives as well: it is decided, and it is dropped when it commits."""
    cluster = Cluster()
    trainer_of(cluster, 4)
    source = Generation(ident("claim of trainer"))
    roll = reader(cluster, upstream=source, serves=False, locators=(), exposure=b"", begun=False)
    assert roll.answer(roll.done(4, Digest(b""))) == m.Committed(OLD)
    assert [str(each.member.seat) for each in cluster.machine.state.generations.values()] == ["trainer#0"]


def test_a_reader_that_had_not_begun_is_offered_as_it_will_be_shown() -> None:
    """A chain made in one step survives: the reader behind one that has only been granted is sent to it again."""
    cluster = Cluster()
    trainer_of(cluster, 4)
    first = reader(cluster, "first", upstream=Generation(ident("claim of trainer")), watermark=0, begun=False)
    granted = cluster.process("second")
    answer = granted.answer(granted.replicate(Exactly(4)))
    assert isinstance(answer, m.Granted)
    assert (answer.source.generation, answer.begun) == (first.generation, False)


def test_more_readers_than_places_are_believed() -> None:
    """This life may have given away a place before an old reader of it came back: it reads on all the same, and no
    further one is sent there."""
    cluster = Cluster()
    trainer_of(cluster, 4)
    source = Generation(ident("claim of trainer"))
    for name in ("a", "b", "c", "d", "e"):
        reader(cluster, name, upstream=source, locators=(), exposure=b"", begun=False)
    assert len(cluster.machine.state.generations[source].readers) == 5
    late = cluster.process("late")
    assert late.answer(late.replicate(Exactly(4))) is None


# ---------------------------------------------------------------- groups


def test_a_half_consumed_group_keeps_its_decision() -> None:
    """Shard 0 reads version 4, shard 1 had not asked: it gets version 4, though 5 is the latest by then."""
    cluster = Cluster(shards=2)
    for shard in range(2):
        name = f"trainer#{shard}"
        new = claim(cluster.stranger(name), version=NEW, content=content(5), root=root(5), published=True)
        back(cluster, name, new, shards=2, published=NEW)
        back(cluster, f"old#{shard}", claim(cluster.stranger(f"old#{shard}")), shards=2)
    one = back(cluster, "roll#1", shards=2)
    call = one.replicate()
    assert one.answer(call) is None, "its sibling may bring a decision"
    reader(cluster, "roll#0", shards=2, upstream=Generation(ident("claim of old#0")))
    granted = one.answer(call)
    assert isinstance(granted, m.Granted)
    assert granted.version == OLD


def test_a_group_whose_shard_does_not_come_back_decides_after_the_grace() -> None:
    """Waiting for a shard that died with the server has an end."""
    cluster = Cluster(shards=2)
    for shard in range(2):
        back(cluster, f"old#{shard}", claim(cluster.stranger(f"old#{shard}")), shards=2)
    one = back(cluster, "roll#1", shards=2)
    call = one.replicate(timeout_s=60)
    cluster.alive(GRACE_S - 1, one)
    assert one.answer(call) is None
    cluster.alive(2, one)
    assert isinstance(one.answer(call), m.Granted)


def test_a_commit_that_one_shard_has_heard_of_is_a_commit() -> None:
    """The answer to shard 1 was lost with the server: it asks again and hears the same, whoever is back first."""
    for heard_first in (True, False):
        cluster = Cluster(shards=2)
        told = {"committed_sequence": 3, "committed": OLD, "sequence": 4}
        shown = claim(cluster.stranger("roll#0"))
        if heard_first:
            back(cluster, "roll#0", shown, shards=2, **told)
        one = reader(cluster, "roll#1", shards=2, watermark=8, root=root(4))
        one.group, one.sequence = 7, 3
        call = None if heard_first else one.done(4)
        if not heard_first:
            back(cluster, "roll#0", shown, shards=2, **told)
        assert one.answer(one.done(4) if call is None else call) == m.Committed(OLD)
        assert cluster.state_of(4) == "readable"
        assert cluster.machine.state.models[one.seat.model].replicas[one.seat.replica].sequence == 4


def test_an_abort_that_one_shard_has_heard_of_is_an_abort() -> None:
    """Shard 0 is at the next number without a commit: what shard 1 has under way is over, and it hears so."""
    cluster = Cluster(shards=2)
    one = reader(cluster, "roll#1", shards=2)
    back(cluster, "roll#0", shards=2, sequence=4)
    assert [notice.sequence for notice in one.notices(m.TransactionAborted)] == [3]
    assert [(notice.group, notice.sequence) for notice in one.notices(m.Moved)] == [(7, 4)]
    assert cluster.machine.state.models[one.seat.model].replicas[one.seat.replica].transaction is None


def test_a_later_incarnation_wins() -> None:
    """Shard 1 had not heard that the group moved: its transaction is over."""
    cluster = Cluster(shards=2)
    one = reader(cluster, "roll#1", shards=2)
    back(cluster, "roll#0", shards=2, group=9, sequence=0)
    assert len(one.notices(m.TransactionAborted)) == 1
    assert [(notice.group, notice.sequence) for notice in one.notices(m.Moved)] == [(9, 0)]


def test_an_earlier_incarnation_hears_of_the_later_one() -> None:
    """The other way round: who comes back behind its group is answered by the group's numbers."""
    cluster = Cluster(shards=2)
    back(cluster, "roll#0", shards=2, group=9, sequence=1)
    one = reader(cluster, "roll#1", shards=2)
    assert (one.group, one.sequence) == (9, 1)
    assert one.generation not in cluster.machine.state.generations


def test_two_decisions_of_one_number_end_both() -> None:
    """Two servers believed to be the one, and decided: neither decision may be committed by half a group."""
    cluster = Cluster(shards=2)
    zero = reader(cluster, "roll#0", shards=2)
    one = reader(cluster, "roll#1", shards=2, version=NEW, content=content(5))
    assert [notice.sequence for notice in one.notices(m.TransactionAborted)] == [3]
    assert zero.abort() == m.Ok()
    assert cluster.machine.state.models[one.seat.model].replicas[one.seat.replica].transaction is None


def test_a_seat_that_holds_the_version_goes_on_to_its_commit() -> None:
    """`Held` was said, `Done` was not: asked again in the new life, it commits."""
    cluster = Cluster()
    roll = cluster.stranger("roll")
    roll = back(
        cluster,
        "roll",
        claim(roll),
        undertaking=lambda process: undertaking(process, held=True, upstream=Generation(b"")),
    )
    assert roll.answer(roll.done(4)) == m.Committed(OLD)


def test_a_session_that_was_with_another_server_is_somebody_else() -> None:
    """Two servers of one name: what a session did with the other, this one has not heard, so it starts from what the
    session brings."""
    cluster = Cluster()
    roll = cluster.process("roll")
    roll.publish(1)
    answer = roll.hello(OTHER_LIFE)
    assert isinstance(answer, m.Welcome)
    assert not answer.known
    assert cluster.machine.state.generations == {}
    assert isinstance(roll.hello(cluster.machine.state.epoch), m.Welcome)


# ---------------------------------------------------------------- grace


@pytest.mark.parametrize("selector", [LATEST, AtLeast(3)])
def test_latest_does_not_go_backwards(selector: Selector) -> None:
    """An old copy is back before the newest: nobody is sent to it, and the newest is given as soon as it is there."""
    cluster = Cluster()
    holder(cluster, "old")
    asking = cluster.process("roll")
    call = asking.replicate(selector)
    waiting = asking.ask(m.Wait(asking.seat.model, selector, asking.location, 9 * SECOND_NS))
    assert (asking.answer(call), asking.answer(waiting)) == (None, None)
    trainer_of(cluster, 5)
    assert isinstance(asking.answer(call), m.Granted)
    assert asking.answer(call).version == NEW
    assert asking.answer(waiting) == m.Found(NEW)


def test_a_version_that_somebody_has_seen_is_waited_for() -> None:
    """The publisher of 4 is back, and a reader that was given 5, by another publisher: 4 is not the latest."""
    cluster = Cluster()
    trainer_of(cluster, 4)
    back(cluster, "seen", seen=NEW)
    asking = cluster.process("roll")
    call = asking.replicate(timeout_s=60)
    assert asking.answer(call) is None
    cluster.alive(GRACE_S + 1, asking)
    assert asking.answer(call).version == OLD, "its holders died with the server"


@pytest.mark.parametrize("selector", [Latest(1), Newest(2), Exactly(7)])
def test_what_others_may_still_contradict_waits_for_the_end_of_the_grace(selector: Selector) -> None:
    """Older versions, and those of one data centre, may be on their way; a version nobody holds may be, too."""
    cluster = Cluster()
    trainer_of(cluster, 5)
    holder(cluster, "old")
    back(cluster, "seen", seen=Version("main", 9))
    asking = cluster.process("roll")
    call = asking.replicate(selector, timeout_s=60)
    assert asking.answer(call) is None
    cluster.alive(GRACE_S + 1, asking)
    assert asking.answer(call) is not None


def test_a_first_life_has_no_grace() -> None:
    """Nobody comes from elsewhere: nothing waits."""
    cluster = Cluster()
    trainer, roll = cluster.process("trainer"), cluster.process("roll")
    trainer.publish(1)
    assert isinstance(roll.answer(roll.replicate()), m.Granted)


def test_lineages_keep_their_order() -> None:
    """The older lineage is back last, with a higher number: it stays the older one, and is retired where it was."""
    cluster = Cluster()
    retry = m.LineageMark("retry", 1, 5)
    new = Version("retry", 6)
    shown = claim(cluster.stranger("trainer"), version=new, content=content(6), root=root(6), published=True)
    back(cluster, "trainer", shown, published=new, seen=None, lineages=(retry,))
    old = Version("main", 9)
    back(cluster, "old", claim(cluster.stranger("old"), version=old, content=content(9), root=root(9)), seen=old)
    model = cluster.machine.state.models[cluster.processes["old"].seat.model]
    assert (model.newest, model.readable) == ("retry", [6])
    asking = cluster.process("roll")
    assert asking.answer(asking.replicate()).version == new


def test_a_lineage_opened_after_the_death_is_newer_than_those_that_come_back() -> None:
    """server_recreated_same_name: a trainer that resumed is there first. Lineages of the life before, whatever their
    place was, come before its own: they are retired from its first version on, and it goes on publishing."""
    cluster = Cluster()
    resumed = cluster.process("trainer")
    resumed.publish(4, lineage="retry")
    resumed.seal(4)
    marks = (m.LineageMark("first", 0, 1), m.LineageMark("main", 1, 3))
    for name, number in (("roll-1", 3), ("roll-2", 4), ("roll-3", 9)):
        version = Version("main", number)
        shown = claim(cluster.stranger(name), version=version, content=content(number), root=root(number))
        back(cluster, name, shown, seen=version, lineages=marks)
    model = cluster.machine.state.models[resumed.seat.model]
    assert (model.newest, model.readable) == ("retry", [3, 4])
    assert cluster.fetched(cluster.process("roll"), 4, Exactly(4)).version == Version("retry", 4)
    answer = resumed.publish(5, lineage="retry", buffers="b")
    assert answer == m.Announced(m.LineageMark("retry", 2, 4))


def test_lineages_of_two_servers_that_claim_one_place() -> None:
    """Each of two that believed to be the one has opened a second lineage: one is older here, never both are shown."""
    cluster = Cluster()
    for name in ("left", "right"):
        version = Version(name, 6)
        shown = claim(cluster.stranger(name), version=version, content=content(6), root=root(6))
        back(cluster, name, shown, seen=version, lineages=(m.LineageMark(name, 1, 5),))
    model = cluster.machine.state.models[cluster.processes["left"].seat.model]
    assert (model.newest, model.readable) == ("right", [6])
    assert cluster.state_of(6) in ("readable", "retired")


def test_a_lineage_whose_place_was_told_too_low_rises() -> None:
    """The first back remembers an old place of its lineage, the others a later one: what was retired by it is not."""
    cluster = Cluster()
    retry, main = Version("retry", 6), Version("main", 9)
    for name, version, mark in (
        ("roll-1", retry, m.LineageMark("retry", 0, 5)),
        ("roll-2", main, m.LineageMark("main", 1, 1)),
        ("roll-3", None, m.LineageMark("retry", 2, 5)),
    ):
        held = () if version is None else (version,)
        claims = [
            claim(cluster.stranger(name), version=each, content=content(each.number), root=root(each.number))
            for each in held
        ]
        back(cluster, name, *claims, seen=version, lineages=(mark,))
    model = cluster.machine.state.models[cluster.processes["roll-1"].seat.model]
    assert (model.newest, model.readable) == ("retry", [6])


def test_a_shard_that_died_with_the_server_ends_its_group_within_a_lease() -> None:
    """sibling_dies, server_restart_midtransfer: whoever has not come back a lease later is dead, as in any life. Its
    siblings hear which shard it is, and do not wait for it until their deadlines; who comes by then is not too late."""
    cluster = Cluster()
    trainers = [
        back(
            cluster,
            f"trainer#{shard}",
            claim(cluster.stranger(f"trainer#{shard}", shards=2), published=True),
            shards=2,
        )
        for shard in range(2)
    ]
    first, late = reader(cluster, "roll#0", shards=2), None
    other = reader(cluster, "other#0", shards=2)
    call = first.done(4)
    cluster.alive(GRACE_S + 1, *trainers, first, other)
    late = reader(cluster, "other#1", shards=2)
    cluster.alive(LEASE_S - GRACE_S - 2, *trainers, first, other, late)
    assert first.answer(call) is None
    cluster.alive(2, *trainers, first, other, late)
    assert "shard 1: it has not come back" in first.answer(call).message
    assert not other.notices(m.TransactionAborted)
    assert isinstance(first.answer(first.replicate()), m.Refused)  # its number is used up


def test_a_lineage_began_where_its_lowest_version_says() -> None:
    """A holder is back with a lower version of the newer lineage than the new life knew of: the older lineage ended
    there, for what is here and for what comes later."""
    cluster = Cluster()
    for name, version, marks in (
        ("old", Version("main", 4), (MAIN,)),
        ("new", Version("retry", 6), (m.LineageMark("retry", 1, 6),)),
        ("newer", Version("retry", 3), ()),
        ("older", Version("main", 5), (MAIN,)),
    ):
        number = version.number
        shown = claim(cluster.stranger(name), version=version, content=content(number), root=root(number))
        back(cluster, name, shown, seen=None, lineages=marks)
        model = cluster.machine.state.models[cluster.processes[name].seat.model]
        if name == "new":
            assert model.readable == [4, 6]
    assert model.readable == [3, 6]
    assert [str(record.version) for record in model.versions.values() if record.retired] == ["4", "5"]
