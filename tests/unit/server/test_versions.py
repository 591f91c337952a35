"""Selectors, lineages, readability and what is left in memory when nobody holds anything."""

from __future__ import annotations

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import LINEAGES_MAX
from tensorhub.types import UNVERIFIED, AtLeast, Exactly, Latest, ModelKey, Newest, Selector, Version
from tests.unit.server.kit import ACTOR, Cluster, Process, content, root

SECONDS = 1_000_000_000


def holders(*numbers: int, location: str = "") -> Cluster:
    """One publisher per version, in this order."""
    cluster = Cluster()
    for number in numbers:
        process = cluster.process(f"t{number}", location=location)
        assert isinstance(process.publish(number), m.Announced)
        process.seal(number)
    return cluster


def found(cluster: Cluster, selector: Selector, location: str = "") -> str:
    """What a `Wait` says within a second: the version, the error, or `waits`."""
    name = f"asker-{cluster.calls}"
    process = cluster.process(name, location=location)
    answer = process.do(m.Wait(ACTOR, selector, process.location, SECONDS))
    match answer:
        case m.Found(version):
            return str(version)
        case m.Refused(error):
            return error
    return "waits"


TABLE = [
    (Latest(), "7"),
    (Latest(1), "5"),
    (Latest(3), "waits"),
    (Exactly(5), "5"),
    (Exactly(4), "VersionUnavailable"),
    (Exactly(8), "waits"),
    (AtLeast(6), "7"),
    (AtLeast(7), "7"),
    (AtLeast(8), "waits"),
    (Newest(0), "7"),
]


@pytest.mark.parametrize(("selector", "expected"), TABLE, ids=str)
def test_selector(selector: Selector, expected: str) -> None:
    """With 3, 5 and 7 readable, each selector finds, waits, or is refused when waiting is in vain."""
    assert found(holders(3, 5, 7), selector) == expected


def test_newest_is_local() -> None:
    """`Newest` takes what lies in the reader's data centre if it is fresh enough, else waits."""
    cluster = Cluster()
    for number, place in ((3, "dc1/h1"), (5, "dc2/h1"), (7, "dc2/h2")):
        cluster.process(f"t{number}", location=place).publish(number)
    assert found(cluster, Newest(2), "dc1/h9") == "3"
    assert found(cluster, Newest(1), "dc1/h9") == "waits"
    assert found(cluster, Newest(0), "dc2/h9") == "7"
    assert found(cluster, Newest(9), "") == "waits"


def test_newest_wakes_with_a_partial_source() -> None:
    """A reader in the data centre that serves its prefix is a local source."""
    cluster = Cluster()
    cluster.process("trainer", location="dc1").publish(1)
    waiting, seed = cluster.process("waiting", location="dc2"), cluster.process("seed", location="dc2")
    call = waiting.replicate(Newest(0))
    seed.replicate()
    assert waiting.answer(call) is None
    seed.serve()
    granted = waiting.answer(call)
    assert isinstance(granted, m.Granted)
    assert granted.source.seat.replica == "seed"


def test_wait_in_vain_ends_when_the_last_holder_goes() -> None:
    """An exact version that vanishes while it is waited for is refused then, not at the deadline."""
    cluster = Cluster(shards=2)
    t0, other = cluster.process("trainer#0"), cluster.process("other#0")
    t0.publish(3)
    other.publish(4)
    reader = cluster.process("roll#0")
    call = reader.replicate(Exactly(3))
    assert reader.answer(call) is None
    t0.leave()
    refused = reader.answer(call)
    assert isinstance(refused, m.Refused)
    assert refused.error == "VersionUnavailable"


def refused(answer: object) -> str:
    assert isinstance(answer, m.Refused), answer
    assert answer.message
    assert answer.where.model == "actor"
    assert answer.where.replica is not None
    assert answer.where.shard is not None
    return answer.error


def test_version_order() -> None:
    """Within a lineage numbers rise: for a seat always, for others unless the version still lives."""
    cluster = holders(5)
    other = cluster.process("other")
    first = cluster.processes["t5"]
    assert refused(other.publish(4)) == "VersionOrder"
    assert isinstance(other.publish(5), m.Announced)
    first.unpublish()
    assert refused(first.publish(5)) == "VersionOrder"
    assert isinstance(first.publish(6), m.Announced)


def test_lineage_retires() -> None:
    """A new lineage retires versions at or above its first; the old lineage is closed; running reads go on."""
    cluster = holders(3, 7)
    reader = cluster.process("reader")
    granted = reader.answer(reader.replicate(Exactly(7)))
    assert isinstance(granted, m.Granted)
    resumed = cluster.process("resumed")
    assert isinstance(resumed.publish(5, lineage="retry"), m.Announced)
    assert cluster.state_of(7) == "retired"
    assert cluster.state_of(3) == "readable"
    assert found(cluster, Latest()) == "5@retry"
    assert found(cluster, Latest(1)) == "3"
    assert isinstance(reader.answer(reader.done(7)), m.Committed)
    assert refused(cluster.process("late").publish(9)) == "VersionOrder"
    assert resumed.location.parts == ()


def test_draft_vs_target_namespace() -> None:
    """`draft_vs_target_namespace`, `two_jobs_same_cluster`: same names and numbers in other models never mix."""
    cluster = Cluster()
    keys = [ACTOR, ModelKey("default", "draft"), ModelKey("other", "actor")]
    trainers = [cluster.process("trainer", model=key) for key in keys]
    for number, trainer in enumerate(trainers):
        trainer.publish(1, what=content(number))
    for number, key in enumerate(keys):
        reader = cluster.process("roll", model=key)
        granted = reader.answer(reader.replicate())
        assert isinstance(granted, m.Granted)
        assert granted.content == content(number)
        assert granted.source.seat.model == key


def test_missing_shard_refused() -> None:
    """`missing_shard_refused`: three holders of shard 0 make no version of two shards; the missing one does."""
    cluster = Cluster(shards=2)
    for name in ("a", "b", "c"):
        process = cluster.process(f"{name}#0")
        process.publish(1)
        process.seal(1)
    reader = cluster.process("roll#0")
    call = reader.replicate()
    assert reader.answer(call) is None
    assert cluster.state_of(1) == "incomplete"
    cluster.process("c#1").publish(1)
    assert isinstance(reader.answer(call), m.Granted)


def test_readable_is_counted_per_shard() -> None:
    """A lost shard 1, B lost shard 0: the version is still readable, each shard from who has it."""
    cluster = Cluster(shards=2)
    a0, b1 = cluster.process("a#0"), cluster.process("b#1")
    a0.publish(1)
    b1.publish(1)
    readers = cluster.group("roll")
    granted = [reader.answer(reader.replicate()) for reader in readers]
    assert [answer.source.seat.replica for answer in granted if isinstance(answer, m.Granted)] == ["a", "b"]


@pytest.mark.slow
def test_metadata_bounded() -> None:
    """`metadata_bounded`, `repeat_update_many`: 10 000 versions leave no trace but the highest number."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    machine = cluster.machine
    for number in range(10_000):
        generation = trainer.fresh()
        publish = m.Publish(trainer.seat, "a", Version("main", number), generation, content(), (), b"")
        machine.receive(number, trainer.session, 5, publish)
        machine.receive(number, trainer.session, 6, m.Seal(trainer.seat, generation, root(1)))
        out = machine.receive(number, trainer.session, 7, m.Unpublish(trainer.seat, "a", generation, SECONDS))
        assert out[0].message == m.Unpublished(())
    machine.check()
    model = machine.state.models[ACTOR]
    assert model.versions == {}
    assert model.current == {}
    assert model.readable == []
    assert model.lineages["main"].highest == 9_999
    assert machine.state.generations == {}
    assert len(machine.state.deadlines.at) == 1
    assert len(machine.state.deadlines.heap) < 200
    cluster.now_ns = 10_000
    cluster.wait(20)
    assert machine.state.sessions == {}
    assert model.replicas == {}


def test_models_never_published_are_forgotten() -> None:
    """A model that nobody published and nobody uses any more is gone."""
    cluster = Cluster()
    process = cluster.process("roll", model=ModelKey("default", "typo"))
    process.leave()
    assert cluster.machine.state.models == {}


def second(cluster: Cluster, number: int, **how: bool) -> Process:
    process = cluster.process("second")
    assert isinstance(process.publish(number, what=content(number, **how)), m.Announced)
    return process


def test_second_publisher_waits_for_its_root() -> None:
    """One content per version: the second publisher is offered only once its root equals the first's."""
    cluster = holders(1)
    other = second(cluster, 1)
    cluster.processes["t1"].unpublish()
    assert cluster.state_of(1) == "hidden"
    assert other.seal(1) == m.Ok()
    assert cluster.state_of(1) == "readable"


def test_conflicting_publisher_is_withdrawn() -> None:
    """Other bytes under one version: an event, a notice and an error for the second; the first is untouched."""
    cluster = holders(1)
    watcher = cluster.process("watcher")
    call = watcher.ask(m.Watch(ACTOR))
    other = second(cluster, 1)
    answer = other.do(m.Seal(other.seat, other.published, root(2)))
    assert refused(answer) == "VersionConflict"
    assert len(other.notices(m.Conflicted)) == 1
    kinds = [out.message.kind for out in cluster.log if out.id == call and isinstance(out.message, m.Event)]
    assert kinds.count("conflict") == 1
    assert cluster.state_of(1) == "readable"
    assert refused(other.answer(other.unpublish())) == "NotPublished"


@pytest.mark.parametrize("change", ["content", "layout", "unverified"])
def test_second_publisher_refused_at_once(change: str) -> None:
    """What differs in manifest, layout or verification is refused before anything is offered."""
    cluster = Cluster()
    first = cluster.process("first")
    first.publish(1, what=content(1, verified=change != "unverified"))
    other = cluster.stranger("other", shards=2 if change == "layout" else 1)
    other.hello()
    other.join()
    answer = other.publish(1, what=content(2 if change == "content" else 1, verified=change != "unverified"))
    assert refused(answer) == ("LayoutMismatch" if change == "layout" else "VersionConflict")


def test_unverified_version() -> None:
    """A version without digests is readable, says so, and is done with an empty root."""
    cluster = Cluster()
    trainer, reader = cluster.process("trainer"), cluster.process("reader")
    trainer.publish(1, what=content(1, verified=False))
    granted = reader.answer(reader.replicate())
    assert isinstance(granted, m.Granted)
    assert not granted.content.verified
    assert isinstance(reader.answer(reader.done(1, UNVERIFIED)), m.Committed)


def test_first_root_decides_when_the_publisher_dies_unsealed() -> None:
    """A `Done` waits for the seal while the publisher lives; when it is gone the first root is the version's."""
    cluster = Cluster()
    trainer, fast, slow = (cluster.process(name) for name in ("trainer", "fast", "slow"))
    trainer.publish(1)
    fast.replicate()
    slow.replicate()
    call = fast.done(1)
    assert fast.answer(call) is None
    trainer.leave()
    assert isinstance(fast.answer(call), m.Committed)
    assert refused(slow.answer(slow.done(1, root(9)))) == "SourceFailed"


def test_second_publisher_inherits_an_unsealed_version() -> None:
    """The first publisher is gone before its seal: the second's seal decides the root, and it is offered then."""
    cluster = Cluster()
    first = cluster.process("first")
    first.publish(1)
    other = second(cluster, 1)
    first.leave()
    assert cluster.state_of(1) == "hidden"
    assert other.seal(1) == m.Ok()
    assert cluster.state_of(1) == "readable"


@pytest.mark.parametrize("is_same", [True, False])
def test_roots_named_before_the_seal_are_settled_by_it(is_same: bool) -> None:
    """A second publisher and a reader are done before the first publisher's digests: its seal offers and commits them,
    or withdraws and fails them."""
    cluster = Cluster()
    first = cluster.process("first")
    first.publish(1)
    other, reader = second(cluster, 1), cluster.process("reader")
    reader.replicate()
    named = root(1) if is_same else root(2)
    assert other.do(m.Seal(other.seat, other.published, named)) == m.Ok()
    call = reader.done(1, named)
    assert reader.answer(call) is None
    assert first.seal(1) == m.Ok()
    holders_now = {holding.member.seat.replica for holding in cluster.machine.state.generations.values()}
    if is_same:
        assert isinstance(reader.answer(call), m.Committed)
        assert holders_now == {"first", "second", "reader"}
        assert len(first.cluster.machine.state.models[ACTOR].versions[Version("main", 1)].slots[0].complete) == 3
    else:
        assert refused(reader.answer(call)) == "SourceFailed"
        assert len(other.notices(m.Conflicted)) == 1
        assert holders_now == {"first"}


def test_lineages_are_numbered_and_limited() -> None:
    """Each new lineage is the last; there are at most LINEAGES_MAX of them, and names that are none are refused."""
    cluster = Cluster(checks=False)
    trainer = cluster.process("trainer")
    for number in range(LINEAGES_MAX):
        assert isinstance(trainer.publish(number + 1, lineage=f"try-{number}"), m.Announced)
        trainer.unpublish()
    model = cluster.machine.state.models[ACTOR]
    assert [lineage.order for lineage in model.lineages.values()] == list(range(LINEAGES_MAX))
    assert refused(trainer.publish(LINEAGES_MAX + 1, lineage="one more")) == "BadRequest"
    assert len(model.lineages) == LINEAGES_MAX
    nameless = cluster.process("nameless", model=ModelKey("default", "other")).publish(1, lineage="")
    assert isinstance(nameless, m.Refused)
    assert nameless.error == "BadRequest"


def test_the_highest_may_come_again() -> None:
    """Nobody holds the newest version any more: who waits for it waits, and another seat may publish it."""
    cluster = holders(5, 7)
    cluster.processes["t7"].unpublish()
    assert found(cluster, Exactly(7)) == "waits"
    assert isinstance(cluster.process("other").publish(7), m.Announced)
    assert found(cluster, Exactly(7)) == "7"


def test_what_exists_is_told_to_who_waits_in_vain() -> None:
    """Which versions can be read, newest first, and why the others cannot."""
    cluster = Cluster(shards=2)
    for number in (3, 4, 7):
        for process in cluster.group(f"t{number}"):
            process.publish(number)
            process.seal(number)
    watcher = cluster.process("watcher")
    call = watcher.ask(m.Watch(ACTOR))
    cluster.process("half#0").publish(6, lineage="retry")
    asking = cluster.process("asking")
    answer = asking.do(m.Wait(ACTOR, Exactly(2), asking.location, SECONDS))
    assert isinstance(answer, m.Refused)
    assert answer.message.endswith("readable: 4, 3; not readable: 7 (retired), 6@retry (1 of 2 shards)")
    told = [out.message for out in cluster.log if out.id == call and isinstance(out.message, m.Event)]
    assert [str(event.version) for event in told if event.kind == "retired"] == ["7"]
    whole = holders(3, 4)
    asking = whole.process("asking")
    answer = asking.do(m.Wait(ACTOR, Exactly(2), asking.location, SECONDS))
    assert isinstance(answer, m.Refused)
    assert answer.message.endswith("readable: 4, 3")


def test_a_lineage_retires_the_version_of_its_first_number() -> None:
    """A training that goes on from a checkpoint makes the same number again: the new one counts."""
    cluster = holders(3, 7)
    assert isinstance(cluster.process("resumed").publish(7, lineage="retry"), m.Announced)
    assert (found(cluster, Latest()), found(cluster, Exactly(7))) == ("7@retry", "7@retry")
    retired = [str(each.version) for each in cluster.machine.state.models[ACTOR].versions.values() if each.retired]
    assert retired == ["7"]
