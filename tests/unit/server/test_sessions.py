"""Sessions, leases, seats and claims: who is alive, who may sit where, and what falls with a process."""

from __future__ import annotations

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import DEFAULTS, SECOND_NS
from tensorhub.types import Exactly, Latest, Version
from tests.unit.server.kit import ACTOR, NO_EPOCH, OTHER_LIFE, Cluster, Process, claim, content, undertaking


def refused(answer: object) -> str:
    assert isinstance(answer, m.Refused), answer
    assert answer.message
    return answer.error


def test_unknown_session() -> None:
    """A session the server does not know is told `LeaseLost`, whatever it asks, and nothing changes."""
    cluster = Cluster()
    stranger = cluster.stranger("roll")
    assert refused(stranger.do(m.Beat(stranger.session))) == "LeaseLost"
    assert refused(stranger.do(m.List(None))) == "LeaseLost"
    assert cluster.machine.state.sessions == {}


def test_protocol_mismatch() -> None:
    """Another protocol number is refused by name."""
    stranger = Cluster().stranger("roll")
    hello = m.Hello(m.PROTOCOL + 1, stranger.session, b"", "host", 1, NO_EPOCH)
    assert refused(stranger.do(hello)) == "BadRequest"


def test_beats_keep_a_session_alive() -> None:
    """Beats renew the lease; silence ends the session, and what it held goes with it."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    cluster.alive(60, trainer)
    assert cluster.state_of(1) == "readable"
    cluster.wait(11)
    assert cluster.state_of(1) == "absent"
    assert refused(trainer.do(m.Beat(trainer.session))) == "LeaseLost"


def test_readers_that_progress_keep_their_source_alive() -> None:
    """A source that holds its interpreter for half a minute is alive while its readers progress."""
    cluster = Cluster()
    trainer, reader = cluster.process("trainer"), cluster.process("reader")
    trainer.publish(1)
    reader.replicate(timeout_s=100)
    for watermark in range(1, 8):
        cluster.wait(5)
        reader.progress(watermark)
    assert trainer.session in cluster.machine.state.sessions
    cluster.alive(11, reader)
    assert trainer.session not in cluster.machine.state.sessions
    assert len(reader.notices(m.SourceLost)) == 1


def test_reconnect_restores_the_lease() -> None:
    """After a disconnect little of the lease is left; a Hello of the same session restores it, with all it holds."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    cluster.disconnect(trainer)
    cluster.wait(1.9)
    assert isinstance(trainer.hello(), m.Welcome)
    cluster.wait(9)
    assert cluster.state_of(1) == "readable"
    cluster.disconnect(trainer)
    cluster.wait(2.1)
    assert cluster.state_of(1) == "absent"


def test_a_stopped_server_declares_nobody_dead() -> None:
    """Messages that came while the server itself was stopped count before its overdue deadlines."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    cluster.now_ns = 30 * SECOND_NS
    assert trainer.do(m.Beat(trainer.session)) == m.Ok()
    cluster.wait(5)
    assert trainer.session in cluster.machine.state.sessions


def test_seat_taken() -> None:
    """A seat of a connected session is taken, and the error names the process."""
    cluster = Cluster()
    cluster.process("roll")
    rival = cluster.stranger("roll", life=2)
    rival.hello()
    answer = rival.join()
    assert refused(answer) == "SeatTaken"
    assert isinstance(answer, m.Refused)
    assert "process 7 on host-roll" in answer.message


def test_takeover_of_a_disconnected_seat() -> None:
    """`restart_same_name_same_addr`: a newcomer takes the seat of a broken connection; what it held goes, readers hear
    of it, siblings get a new group."""
    cluster = Cluster(shards=2)
    old, sibling = cluster.group("trainer")
    old.publish(1)
    sibling.publish(1)
    reader = cluster.process("roll#0")
    reader.replicate()
    cluster.disconnect(old)
    new = cluster.process("trainer#0", life=2)
    assert new.group != old.group
    assert sibling.notices(m.Moved) == [
        m.Moved(sibling.seat, new.group, 0, "process 7 on host-trainer#0 took its seat")
    ]
    assert len(reader.notices(m.SourceLost)) == 1
    assert refused(old.do(m.Leave(old.seat))) == "BadRequest"


def test_join_again_tells_the_numbers() -> None:
    """Joining one's own seat again changes nothing and tells group and next sequence."""
    cluster = Cluster()
    cluster.process("trainer").publish(1)
    roll = cluster.process("roll")
    roll.abort()
    assert roll.join() == m.Joined(roll.group, 1)


@pytest.mark.parametrize("change", ["shards", "layout"])
def test_layout_of_a_replica(change: str) -> None:
    """All shards of a replica agree on their number and layout."""
    cluster = Cluster(shards=2)
    cluster.process("roll#0")
    other = cluster.stranger("roll#1", shards=3 if change == "shards" else 2)
    other.hello()
    assert refused(other.join(layout="flat" if change == "shards" else "other")) == "LayoutMismatch"


def test_layout_of_a_version() -> None:
    """A replica of another layout is refused when its version is decided."""
    cluster = Cluster()
    cluster.process("trainer").publish(1)
    readers = cluster.group("roll")
    assert refused(readers[0].answer(readers[0].replicate())) == "LayoutMismatch"


def test_reader_killed() -> None:
    """`reader_killed`: its lease expires, the drain completes, nothing leaks."""
    cluster = Cluster()
    trainer, reader = cluster.process("trainer"), cluster.process("reader")
    trainer.publish(1)
    trainer.seal(1)
    reader.replicate(timeout_s=100)
    reader.serve()
    cluster.disconnect(reader)
    call = trainer.unpublish()
    assert trainer.answer(call) is None
    cluster.alive(3, trainer)
    assert trainer.answer(call).readers == ()
    assert cluster.machine.state.generations == {}


def test_goodbye_ends_everything() -> None:
    """A session that says goodbye leaves nothing behind, and every call of it is answered."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    waits = trainer.ask(m.Wait(ACTOR, Exactly(9), trainer.location, SECOND_NS))
    assert trainer.do(m.Goodbye()) == m.Ok()
    assert refused(trainer.answer(waits)) == "Closed"
    assert cluster.machine.state.sessions == {}
    assert cluster.machine.state.generations == {}
    assert cluster.machine.next_deadline_ns() is None


def returning_from_another_server() -> tuple[Cluster, Process, Process, int]:
    """(cluster, trainer, reader, the trainer's unpublish): the reader has said Hello after it was with a second server,
    and its process has not heard yet that the grant of this one is over."""
    cluster = Cluster()
    trainer, reader = cluster.process("trainer"), cluster.process("reader")
    trainer.publish(4)
    reader.answer(reader.replicate())
    drained = trainer.unpublish(timeout_s=60)
    assert isinstance(reader.hello(OTHER_LIFE), m.Welcome)
    return cluster, trainer, reader, drained


def test_who_was_with_another_server_may_still_read() -> None:
    """Drained: what this server granted is drained when the reader says that it has stopped, not when it is back: its
    group has moved on, and it hears so only now."""
    cluster = Cluster()
    trainers, readers = cluster.group("trainer"), cluster.group("reader")
    for trainer in trainers:
        trainer.publish(4)
    for reader in readers:
        reader.replicate()
    trainer, reader = trainers[1], readers[1]
    drained = trainer.unpublish(timeout_s=60)
    group, sequence = reader.group, reader.sequence
    reader.hello(OTHER_LIFE)
    standing = m.Standing(group, sequence, undertaking=undertaking(reader, upstream=trainer.published))
    assert reader.join(standing=standing) != m.Joined(group, sequence)
    assert trainer.answer(drained) is None
    reader.do(m.Abort(reader.seat, group, sequence, "the group has moved on"))
    assert isinstance(trainer.answer(drained), m.Unpublished)


def test_who_comes_back_with_nothing_under_way_reads_nothing() -> None:
    """Its Join says so: nobody waits for a lease then."""
    _, trainer, reader, drained = returning_from_another_server()
    assert trainer.answer(drained) is None
    reader.join()
    assert isinstance(trainer.answer(drained), m.Unpublished)


def test_who_goes_on_with_its_filling_is_a_reader_again() -> None:
    """A transfer that this server takes up again holds the drain by itself, and ends it by itself."""
    cluster, trainer, reader, drained = returning_from_another_server()
    standing = m.Standing(reader.group, reader.sequence, undertaking=undertaking(reader, upstream=trainer.published))
    reader.join(standing=standing)
    (session,) = [each for each in cluster.machine.state.sessions.values() if each.id == reader.session]
    assert trainer.answer(drained) is None
    assert session.lingers == {}
    cluster.alive(5, trainer, reader)  # the grace of this life is over
    reader.done(4)
    assert isinstance(trainer.answer(drained), m.Unpublished)


def test_who_never_says_that_it_stopped_has_its_lease() -> None:
    """A process that said Hello and then nothing is waited for as long as any other."""
    cluster, trainer, _, drained = returning_from_another_server()
    cluster.alive(DEFAULTS.lease_ns / SECOND_NS + 1, trainer)
    assert isinstance(trainer.answer(drained), m.Unpublished)


def test_a_publish_asked_again_is_answered_again() -> None:
    """The answer was lost with its connection: the same generation of the same version is no second publish."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    assert isinstance(trainer.publish(1), m.Announced)
    again = m.Publish(trainer.seat, "a", Version("main", 1), trainer.published, content(1), trainer.locators(), b"here")
    assert isinstance(trainer.do(again), m.Announced)


def test_an_unpublish_asked_again_takes_nothing_else() -> None:
    """The answer was lost, and the next version is published by then: what arrives late is about the generation that it
    names, and about no other."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    late = m.Unpublish(trainer.seat, "a", trainer.published, 5_000_000_000)
    assert isinstance(trainer.do(late), m.Unpublished)
    trainer.publish(2)
    assert refused(trainer.do(late)) == "NotPublished"
    assert cluster.state_of(2) == "readable"


def test_a_generation_names_one_filling() -> None:
    """What a reader is granted is known by its generation: nobody else may use one that is there, neither to publish,
    nor to read, nor to come back with."""
    cluster = Cluster()
    trainer, other = cluster.process("trainer"), cluster.process("other")
    trainer.publish(1)
    taken = trainer.published
    publish = m.Publish(other.seat, "a", Version("main", 2), taken, content(2), (), b"")
    read = m.Replicate(other.seat, "a", other.group, 0, Latest(), 5_000_000_000, taken)
    for request in (publish, read):
        assert refused(other.do(request)) == "BadRequest"
    back = cluster.stranger("back")
    back.hello()
    back.join((claim(back, generation=taken),))
    assert len(back.notices(m.Conflicted)) == 1
    assert [holding.member.seat for holding in cluster.machine.state.generations.values()] == [trainer.seat]


def test_next_deadline() -> None:
    """The machine always knows when time alone changes something."""
    cluster = Cluster()
    assert cluster.machine.next_deadline_ns() is None
    cluster.process("roll")
    assert cluster.machine.next_deadline_ns() == DEFAULTS.lease_ns
