"""Which source a reader gets, as a table: holders with place, kind and readers on one side, the choice on the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.server.holdings import attach, detach
from tensorhub.server.placement import weight
from tensorhub.server.settings import DEFAULTS, READERS_PER_SOURCE_MAX, SECOND_NS, SICK_REPORTS
from tensorhub.server.turn import Turn
from tests.unit.server.kit import Cluster, Process


def build(*holders: str) -> Cluster:
    """Holders written `name kind place readers`; kinds: published, complete, partial (fed by the first holder)."""
    cluster = Cluster(replace(DEFAULTS, patience_ns=0))
    for text in holders:
        name, kind, place, _ = text.split()
        process = cluster.process(name, location="" if place == "-" else place)
        if kind == "published":
            process.publish(1)
            process.seal(1)
    origin = cluster.processes[holders[0].split()[0]]
    for text in holders:
        name, kind, _, _ = text.split()
        process = cluster.processes[name]
        if kind != "published":
            take(cluster, process, origin)
            if kind == "complete":
                process.done(1)
                process.sequence += 1
    for text in holders:
        name, _, _, readers = text.split()
        for number in range(int(readers)):
            take(cluster, cluster.process(f"{name}-reader-{number}"), cluster.processes[name])
    return cluster


def take(cluster: Cluster, reader: Process, source: Process) -> None:
    """Let a reader read from this very source, whatever placement says."""
    answer = reader.answer(reader.replicate())
    assert isinstance(answer, m.Granted), answer
    state = cluster.machine.state
    turn = Turn(state, cluster.settings, cluster.now_ns, "the test")
    filling = state.generations[reader.generation]
    target = next(holding for holding in state.generations.values() if holding.member.seat == source.seat)
    detach(turn, filling)
    attach(turn, filling, target)
    cluster.machine.check()
    if "reader" not in reader.name:
        reader.serve()


TABLE = [
    # who asks from where, the holders, whom it gets
    ("-", ["t published - 0"], "t", "the only one"),
    ("dc1/r1/h1", ["t published dc1/r2/h9 0", "a complete dc1/r1/h2 1"], "t", "idle before nearer"),
    ("dc1/r1/h1", ["t published dc1/r2/h9 0", "a partial dc1/r1/h2 0"], "a", "nearest of the idle"),
    (
        "dc1/r1/h1",
        ["t published dc1/r2/h9 2", "a complete dc1/r1/h2 3"],
        "a",
        "nearest, though loaded, when none is idle",
    ),
    (
        "dc1/r1/h1",
        ["t published dc2/r2/h9 0", "a complete dc1/r1/h2 3"],
        "a",
        "loaded before idle beyond the data centre",
    ),
    (
        "dc1/r1/h1",
        ["t published dc1/r1/h1 0", "a complete dc2/r1/h1 0"],
        "t",
        "a publisher before a far copy",
    ),
    ("dc1/r1/h1", ["t published dc1/r1/h2 0", "a complete dc1/r3/h4 0"], "a", "publishers last within the data centre"),
    ("dc1/r1/h1", ["t published dc1/r2/h9 0", "a complete dc1/r1/h1 1"], "a", "the own host before an idle one"),
    (
        "dc1/r1/h1",
        ["t published dc1/r1/h1 0", "a complete dc1/r1/h2 0"],
        "t",
        "a publisher on the own host before a copy",
    ),
    ("dc1/r1/h1", ["t published dc1/r1/h1 0", "a complete dc1/r1/h1 1"], "a", "publishers last on the own host, too"),
    ("dc1/r1/h1", ["t published dc1/r2/h9 0", "a complete dc1/r1/h1 4"], "t", "beyond the host when it is full"),
    ("dc1/r1", ["t published dc1/r1 0", "a complete dc1/r1 1"], "t", "a rack is no host"),
    (
        "dc1/r1/h1",
        ["t published - 0", "a complete dc1/r1/h1 4", "b complete dc1/r9/h9 0"],
        "b",
        "a full one is unseen",
    ),
    ("-", ["t published - 0", "a complete - 1", "b complete - 0"], "b", "least loaded"),
    ("-", ["t published - 0", "a complete - 1", "b partial - 0"], "b", "less loaded, though partial"),
    ("-", ["t published - 0", "a partial - 0", "b complete - 0"], "b", "complete before partial at equal load"),
    ("-", ["t published - 0", "a complete - 0", "b complete - 0"], "a", "who came first"),
    ("-", ["t published - 0", "a partial - 0"], "a", "a partial source unloads a publisher that serves it"),
    ("-", ["t published - 0", "a complete - 4", "b complete - 4"], "t", "the publisher when the others are full"),
]


@pytest.mark.parametrize(("place", "holders", "expected", "why"), TABLE, ids=[row[3] for row in TABLE])
def test_choice(place: str, holders: list[str], expected: str, why: str) -> None:
    """The source is idle, or else the least loaded; the nearest; complete; publishers last; and its reason is told."""
    cluster = build(*holders)
    reader = cluster.process("reader", location="" if place == "-" else place)
    answer = reader.answer(reader.replicate())
    assert isinstance(answer, m.Granted)
    assert answer.source.seat.replica == expected, answer.reason
    assert answer.reason


def test_weight_is_coarse() -> None:
    """A reader weighs 1 to 4 by the quarters it has left, and 1 when there is nothing to read."""
    assert [weight(done, 8) for done in (0, 1, 2, 4, 6, 7, 8)] == [4, 4, 3, 2, 1, 1, 1]
    assert weight(0, 0) == 1


def published(*names: str, patience_ns: int = DEFAULTS.patience_ns) -> tuple[Cluster, list[Process]]:
    """A cluster with trainers that hold version 1."""
    cluster = Cluster(replace(DEFAULTS, patience_ns=patience_ns))
    trainers = [cluster.process(name) for name in names]
    for trainer in trainers:
        trainer.publish(1)
        trainer.seal(1)
    return cluster, trainers


def source_of(reader: Process, call: int) -> str:
    """Whose holding a call was granted; empty while it waits."""
    answer = reader.answer(call)
    return answer.source.seat.replica if isinstance(answer, m.Granted) else ""


def test_full_sources_make_readers_wait() -> None:
    """A source serves so many readers; the next waits for a place and gets the first that is free."""
    cluster, _ = published("trainer", patience_ns=0)
    readers = [cluster.process(f"roll-{number}") for number in range(READERS_PER_SOURCE_MAX + 1)]
    calls = [reader.replicate() for reader in readers]
    sources = [source_of(reader, call) for reader, call in zip(readers, calls, strict=True)]
    assert sources == ["trainer"] * READERS_PER_SOURCE_MAX + [""]
    readers[0].done(1)
    assert source_of(readers[-1], calls[-1]) == "roll-0"


def test_newcomers_wait_for_the_filling_that_will_serve() -> None:
    """Who finds no idle source waits for the next reader to serve, rather than share the trainer's uplink."""
    cluster, _ = published("trainer")
    first, second, third = (cluster.process(name) for name in ("first", "second", "third"))
    first.replicate()
    calls = [second.replicate(), third.replicate()]
    assert source_of(second, calls[0]) == ""
    first.serve()
    assert source_of(second, calls[0]) == "first"
    assert source_of(third, calls[1]) == ""
    second.serve()
    assert source_of(third, calls[1]) == "second"


def test_patience_ends() -> None:
    """A filling that does not serve in time is not waited for: one reader shares a source, the next waits for it."""
    cluster, _ = published("trainer")
    cluster.process("stuck").replicate()
    second, third = cluster.process("second"), cluster.process("third")
    calls = [second.replicate(), third.replicate()]
    cluster.wait(DEFAULTS.patience_ns / SECOND_NS - 0.001)
    assert source_of(second, calls[0]) == ""
    cluster.wait(0.001)
    assert source_of(second, calls[0]) == "trainer"
    assert source_of(third, calls[1]) == ""
    second.serve()
    assert source_of(third, calls[1]) == "second"


@pytest.mark.parametrize("end", ["leave", "done", "abort"])
def test_nobody_waits_for_a_filling_that_ended(end: str) -> None:
    """The filling that others wait for goes, or completes, or is given up: the next reader gets its source at once."""
    cluster, _ = published("trainer")
    first, second = cluster.process("first"), cluster.process("second")
    first.replicate()
    call = second.replicate()
    assert source_of(second, call) == ""
    {"leave": first.leave, "done": lambda: first.done(1), "abort": first.abort}[end]()
    assert source_of(second, call) == ("first" if end == "done" else "trainer")


def test_nobody_waits_for_a_subset() -> None:
    """A reader of a subset never serves: the next one shares its source at once."""
    cluster, _ = published("trainer")
    cluster.process("subset").replicate(serves=False)
    reader = cluster.process("reader")
    assert source_of(reader, reader.replicate()) == "trainer"


def test_another_source_has_no_less() -> None:
    """A reader that lost its source goes on from one that has all that itself has; an idle one that has less is waited
    for, rather than to share another."""
    cluster, _ = published("trainer")
    readers = [cluster.process(name) for name in ("first", "second", "third")]
    for reader in readers:
        reader.replicate()
        reader.serve()
    first, second, third = readers
    first.progress(4)
    second.leave()
    call = third.reroute(second.generation, watermark=5)
    assert source_of(third, call) == ""
    first.progress(5)
    assert source_of(third, call) == "first"


def test_who_is_behind_a_dead_relay_goes_on_from_that_ones_source_at_once() -> None:
    """source_killed_midchunk: nobody but its reader knows yet that it is dead; its own source, which it still seems to
    read from, is free all the same, and has what the reader has, though it has not said so yet."""
    cluster, _ = published("trainer")
    readers = [cluster.process(name) for name in ("first", "second", "third")]
    for reader in readers:
        reader.replicate()
        reader.serve()
    first, second, third = readers
    first.progress(1)
    assert source_of(third, third.reroute(second.generation, watermark=4)) == "first"
    fourth = cluster.process("fourth")
    assert source_of(fourth, fourth.replicate()) == "third"


def test_who_was_given_up_and_lives_counts_again() -> None:
    """A relay that one reader gave up reports progress: its source is not idle, and late comers go elsewhere."""
    cluster, _ = published("trainer")
    first, second, third = (cluster.process(name) for name in ("first", "second", "third"))
    for reader in (first, second, third):
        reader.replicate()
        reader.serve()
    first.progress(4)
    assert source_of(third, third.reroute(second.generation, watermark=2)) == "first"
    assert cluster.machine.state.generations[second.generation].weight == 0
    second.progress(3)
    assert cluster.machine.state.generations[second.generation].weight > 0


def test_another_source_is_shared_when_patience_ends() -> None:
    """The idle source does not get far enough in time: the reader shares one that has everything."""
    cluster, _ = published("trainer")
    first, second, third = (cluster.process(name) for name in ("first", "second", "third"))
    for reader in (first, second, third):
        reader.replicate()
        reader.serve()
    second.leave()
    call = third.reroute(second.generation, watermark=4)
    assert source_of(third, call) == ""
    cluster.wait(DEFAULTS.patience_ns / SECOND_NS)
    assert source_of(third, call) == "trainer"


def test_reroute_needs_more_than_oneself() -> None:
    """A re-route goes to a complete source or one with a greater watermark, never to one's own reader."""
    cluster, (trainer,) = published("trainer")
    first, second = cluster.process("first"), cluster.process("second")
    first.replicate()
    first.serve()
    second.replicate()
    second.serve()
    second.progress(5)
    call = first.reroute(trainer.published, 3)
    refused = first.answer(call)
    assert isinstance(refused, m.Refused)
    assert refused.error == "VersionUnavailable"


def test_sick_source_quarantined() -> None:
    """`sick_source_quarantined`: reported by enough readers a source is offered to nobody, until its time is over."""
    cluster, (sick,) = published("sick", patience_ns=0)
    well = cluster.process("well")
    readers = [cluster.process(f"roll-{number}") for number in range(SICK_REPORTS)]
    for reader in readers:
        assert isinstance(reader.answer(reader.replicate(timeout_s=30)), m.Granted)
    well.publish(1)
    well.seal(1)
    for reader in readers:
        granted = reader.answer(reader.reroute(sick.published, 1))
        assert isinstance(granted, m.Granted)
        assert granted.source.seat.replica == "well"
    late = [cluster.process(f"late-{number}") for number in range(3)]
    taken = [reader.answer(reader.replicate(timeout_s=30)) for reader in late[:2]]
    assert {answer.source.seat.replica for answer in taken if isinstance(answer, m.Granted)} == {"well"}
    call = late[2].replicate(timeout_s=30)
    assert late[2].answer(call) is None
    cluster.alive(11, *cluster.processes.values())
    granted = late[2].answer(call)
    assert isinstance(granted, m.Granted)
    assert granted.source.seat.replica == "sick"


def test_progress_ends_quarantine() -> None:
    """A source whose reader still progresses is not sick: it is offered again at once."""
    cluster, (source,) = published("source", patience_ns=0)
    readers = [cluster.process(f"roll-{number}") for number in range(3)]
    for reader in readers:
        reader.replicate()
    calls = [reader.reroute(source.published) for reader in readers[:2]]
    assert cluster.machine.state.generations[source.published].quarantined
    readers[2].progress(1)
    assert not cluster.machine.state.generations[source.published].quarantined
    assert [reader.answer(call) for reader, call in zip(readers[:2], calls, strict=True)] == [None, None]
    readers[2].serve()
    granted = readers[0].answer(calls[0])
    assert isinstance(granted, m.Granted)
    assert granted.source.seat.replica == "roll-2"
