"""Whom a holding was filled from: known source by source, through reroutes and losses, after the sources are gone."""

from __future__ import annotations

from tensorhub import messages as m
from tensorhub.server.settings import ORIGINS_MAX, SECOND_NS
from tensorhub.types import Generation, Version
from tensorhub.views import PulledView
from tests.unit.server.kit import ACTOR, OTHER_LIFE, Cluster, Process, content, root, undertaking

CHUNK = 65536
Pulled = list[tuple[str, int]]


def view_of(process: Process) -> m.HoldingView:
    """The only row of this seat in a status."""
    status = process.do(m.Status(ACTOR))
    assert isinstance(status, m.StatusView)
    (row,) = [row for row in status.holdings if row.seat == process.seat]
    return row


def pulled(process: Process) -> Pulled:
    """(source, bytes) in order."""
    return [(str(pull.source), pull.nbytes) for pull in view_of(process).pulled]


def published(cluster: Cluster, *names: str) -> list[Process]:
    """Trainers that hold version 1."""
    trainers = [cluster.process(name) for name in names]
    for trainer in trainers:
        trainer.publish(1)
        trainer.seal(1)
    return trainers


def granted(reader: Process, call: int) -> Generation:
    """The generation of the source that a call was granted."""
    answer = reader.answer(call)
    assert isinstance(answer, m.Granted), answer
    return answer.source.generation


def test_bytes_belong_to_the_source_they_came_from_across_a_reroute() -> None:
    """What was verified up to a reroute is the first source's, the rest the second's; both are shown after the commit,
    also when the first is gone.
    """
    cluster = Cluster()
    first, second = published(cluster, "trainer-0", "trainer-1")
    reader = cluster.process("roll")
    source = granted(reader, reader.replicate())
    reader.progress(2)
    assert pulled(reader) == [("trainer-0#0", 2 * CHUNK)]
    cluster.wait(2)
    granted(reader, reader.reroute(source, watermark=3))
    assert pulled(reader) == [("trainer-0#0", 3 * CHUNK), ("trainer-1#0", 0)]
    cluster.wait(1)
    reader.done(1)
    first.unpublish()
    cluster.wait(1)
    row = view_of(reader)
    assert (row.state, row.upstream) == ("complete", "")
    assert row.pulled == (
        PulledView(first.seat, 3 * CHUNK, "", 4 * SECOND_NS, 2 * SECOND_NS),
        PulledView(second.seat, 5 * CHUNK, "", 2 * SECOND_NS, 1 * SECOND_NS),
    )


def test_what_is_reported_after_a_loss_is_the_lost_source_s() -> None:
    """source_killed_midchunk: the server forgets a source before its reader has told of its last bytes; they are still
    put down to it, and its name outlives it.
    """
    cluster = Cluster()
    first, _ = published(cluster, "trainer-0", "trainer-1")
    reader = cluster.process("roll")
    source = granted(reader, reader.replicate())
    first.leave()
    assert reader.notices(m.SourceLost)
    reader.progress(1)
    assert view_of(reader).upstream == ""
    granted(reader, reader.reroute(source, watermark=2))
    reader.progress(6)
    assert pulled(reader) == [("trainer-0#0", 2 * CHUNK), ("trainer-1#0", 4 * CHUNK)]


def test_every_byte_counts_once() -> None:
    """A report that comes again, or after a later one, adds nothing; one that brings a single byte adds that."""
    cluster = Cluster()
    published(cluster, "trainer")
    reader = cluster.process("roll")
    granted(reader, reader.replicate())
    for nbytes in (CHUNK, CHUNK + 1, CHUNK + 1, CHUNK):
        reader.do(m.Progress(reader.seat, reader.generation, 1, nbytes))
    assert pulled(reader) == [("trainer#0", CHUNK + 1)]


def test_the_engine_is_known_per_source() -> None:
    """A reader tells its engine when it changes: an untold one is the last that was told."""
    cluster = Cluster()
    published(cluster, "trainer-0", "trainer-1", "trainer-2")
    reader = cluster.process("roll")
    source = granted(reader, reader.replicate())
    reader.do(m.Serve(reader.seat, reader.generation, reader.locators(), b"there", "tcp (fastest)"))
    source = granted(reader, reader.reroute(source, watermark=1))
    granted(reader, reader.reroute(source, watermark=2))
    reader.do(m.Progress(reader.seat, reader.generation, 3, 3 * CHUNK, "local (same host)"))
    assert [pull.route for pull in view_of(reader).pulled] == [
        "tcp (fastest)",
        "tcp (fastest)",
        "local (same host)",
    ]


def test_sources_that_gave_least_are_forgotten_first() -> None:
    """However many sources fail a reader, what is kept is bounded, in order, and holds those that gave bytes."""
    cluster = Cluster()
    trainers = published(cluster, *(f"trainer-{i:02}" for i in range(ORIGINS_MAX + 3)))
    reader = cluster.process("roll")
    source = granted(reader, reader.replicate())
    for watermark in (1, *[2] * (len(trainers) - 3)):
        source = granted(reader, reader.reroute(source, watermark=watermark))
    granted(reader, reader.reroute(source, watermark=8))
    kept = pulled(reader)
    assert len(kept) == ORIGINS_MAX
    assert [nbytes // CHUNK for _, nbytes in kept if nbytes] == [1, 1, 6]
    assert [name for name, _ in kept] == sorted(name for name, _ in kept)
    assert kept[-1] == (f"trainer-{ORIGINS_MAX + 2:02}#0", 0)


def test_a_new_life_does_not_put_earlier_bytes_down_to_the_next_source() -> None:
    """server_restart_midtransfer: a claimed prefix came from somebody the new server never heard of."""
    cluster = Cluster()
    (trainer,) = published(cluster, "trainer")
    reader = cluster.stranger("roll")
    reader.hello(OTHER_LIFE)
    reader.generation = reader.fresh()
    told = undertaking(
        reader,
        version=Version("main", 1),
        content=content(1),
        watermark=3,
        bytes_done=3 * CHUNK,
        upstream=trainer.published,
    )
    assert isinstance(reader.join(standing=m.Standing(7, 0, undertaking=told)), m.Joined)
    assert pulled(reader) == [("trainer#0", 0)]
    reader.progress(5)
    assert pulled(reader) == [("trainer#0", 2 * CHUNK)]
    again = cluster.stranger("roll-2")
    again.hello()
    claim = m.Claim("a", Version("main", 1), again.fresh(), content(1), root(1), False, 8, (), b"")
    assert isinstance(again.join((claim,)), m.Joined)
    assert pulled(again) == []
