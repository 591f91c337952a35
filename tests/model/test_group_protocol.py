"""The group protocol, explored whole: two reading groups and a publisher, every order of their steps, one crash, one
late duplicate. Small scripts per process; states already seen are not explored again.

Asserted in every state: the invariants, one version per replica, no call answered twice, and Drained by the letter: no
living process may still read what its holder was told is unpublished. A reader reads from its grant until it has said
that it stopped, and hears of what others did as late as can be. Asserted at every end, after
time has healed everything: every call of a living process answered, nothing pending, nothing hidden for ever.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tensorhub import messages as m
from tensorhub.server.machine import Machine
from tensorhub.server.turn import Outgoing
from tensorhub.types import NO_GENERATION, Epoch, Generation, Latest, Location, ReplicaId, Seat, SessionId, Version
from tests.unit.server.kit import ACTOR, content, ident, root

#: Explored worlds at most: a run beyond this has lost its pruning.
WORLDS_MAX = 40_000


#: What a correct client may be told. `VersionOrder`: a publisher that lags a whole version behind its sibling.
EXPECTED = ("GroupAborted", "WaitTimeout", "DrainTimeout", "VersionUnavailable", "Busy", "VersionOrder")


@dataclass
class Shard:
    """A client of one seat, as small as can be: a list of things to do, and what it was told."""

    seat: Seat
    session: SessionId
    script: tuple[str, ...]
    at: int = 0
    group: int = 0
    sequence: int = 0
    version: int | None = None
    committed: int | None = None
    is_dead: bool = False
    failed: bool = False
    #: What it holds as a publisher.
    shown: Generation | None = None
    #: The generation it may be reading, from its grant to its own word, and the transaction it was granted in.
    reads: Generation | None = None
    granted: tuple[int, int] = (0, 0)
    #: {call: what}, of calls not answered.
    open: dict[int, str] = field(default_factory=dict)

    @property
    def filling(self) -> Generation:
        return Generation(ident(f"{self.seat} {self.group} {self.sequence}"))

    def key(self) -> tuple[object, ...]:
        state = (self.at, self.group, self.sequence, self.version, self.committed, self.is_dead, self.failed)
        state += (self.reads is not None,)
        return (*state, tuple(sorted(self.open.values())))


@dataclass
class World:
    machine: Machine
    shards: list[Shard]
    calls: int = 0
    crashes: int = 1
    #: A request that is delivered a second time, later.
    late: tuple[int, m.Request] | None = None
    lates: int = 1
    trace: tuple[str, ...] = ()

    def key(self, marked: tuple[str, ...]) -> object:
        """What decides the future. Columns (the seats of one shard index) that nothing singles out are alike."""
        group_level, columns = facts(self)
        special = {int(name.partition("#")[2].split()[0]) for name in marked}
        alike = sorted(repr(column) for index, column in columns.items() if index not in special)
        singled = [repr(columns[index]) for index in sorted(special) if index in columns]
        return repr((group_level, singled, alike, self.crashes, self.lates, self.late))


def clone(world: World) -> World:
    copied: World = pickle.loads(freeze(world))
    return copied


def freeze(world: World) -> bytes:
    for model in world.machine.state.models.values():
        for replica in model.replicas.values():
            replica.story.lines.clear()
    return pickle.dumps(world, -1)


def facts(world: World) -> tuple[list[object], dict[int, list[object]]]:
    """The server's and the clients' state without counters and times, which decide nothing while no time passes."""
    whole: list[object] = []
    columns: dict[int, list[object]] = {shard.seat.shard: [] for shard in world.shards}
    for shard in world.shards:
        columns[shard.seat.shard].append((shard.seat.replica, shard.key()))
    for model in world.machine.state.models.values():
        for replica in sorted(model.replicas.values(), key=lambda each: each.id):
            outcomes = [(key, str(value.version)) for key, value in replica.outcomes.items()]
            transaction = replica.transaction
            whole.append((replica.id, replica.group, replica.sequence, outcomes))
            if transaction:
                whole.append((str(transaction.record and transaction.record.version), transaction.source))
                for index, part in transaction.parts.items():
                    columns[index].append((replica.id, part.phase, part.call is None))
                for index, held in sorted(transaction.pins.items()):
                    columns[index].append((replica.id, "pins", held.member.replica.id, str(held.slot.record.version)))
                for index in sorted(transaction.hidden):
                    columns[index].append((replica.id, "hides"))
            for index, member in sorted(replica.members.items()):
                for lingerer in member.session.lingers.values():
                    source = lingerer.source
                    version = str(source.slot.record.version)
                    columns[index].append((replica.id, "lingers", source.member.replica.id, version))
                for holding in member.holdings.values():
                    upstream = holding.upstream and holding.upstream.member.replica.id
                    columns[index].append((replica.id, str(holding.slot.record.version), holding.state, holding.hidden))
                    columns[index].append((holding.serves, upstream, holding.drain is None, holding.root))
    return whole, columns


def begin(scripts: dict[str, tuple[str, ...]], groups: dict[str, int], prelude: tuple[str, ...] = ()) -> World:
    machine = Machine(Epoch(ident("epoch")))
    world = World(machine, [])
    for name, script in scripts.items():
        replica, _, number = name.partition("#")
        seat = Seat(ACTOR, ReplicaId(replica), int(number or 0))
        shard = Shard(seat, SessionId(ident(name)), script)
        machine.receive(0, shard.session, 1, m.Hello(m.PROTOCOL, shard.session, b"", name, 1, Epoch(b"")))
        join = m.Join(seat, groups[replica], "flat", False, Location())
        answer = machine.receive(0, shard.session, 2, join)[0].message
        assert isinstance(answer, m.Joined)
        shard.group = answer.group
        world.shards.append(shard)
    world.calls = 10
    for line in prelude:
        name, _, step = line.partition(" ")
        shard = next(each for each in world.shards if f"{each.seat}" == name)
        world.calls += 1
        shard.open[world.calls] = step
        hear(world, machine.receive(0, shard.session, world.calls, request_of(shard, step)))
    return world


def request_of(shard: Shard, step: str) -> m.Request:
    what, _, number = step.partition(" ")
    seat, version = shard.seat, int(number or 0)
    match what:
        case "publish":
            generation = Generation(ident(f"{seat} publishes {version}"))
            return m.Publish(seat, "a", Version("main", version), generation, content(version), (), b"")
        case "seal":
            return m.Seal(seat, Generation(ident(f"{seat} publishes {version}")), root(version))
        case "unpublish":
            return m.Unpublish(seat, "a", shard.shown or NO_GENERATION, 3_000_000_000)
        case "ask":
            return m.Replicate(seat, "a", shard.group, shard.sequence, Latest(), 4_000_000_000, shard.filling)
        case "serve":
            return m.Serve(seat, shard.filling, (), b"")
        case "done":
            return m.Done(seat, shard.group, shard.sequence, shard.filling, root(shard.version or 0), 1)
        case "abort":
            return m.Abort(seat, shard.group, shard.sequence, "no space")
        case "stop":
            return m.Abort(seat, *shard.granted, "")
    raise ValueError(step)


def moves(world: World, victims: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """What may happen next: a process goes on, crashes, or a late message arrives again."""
    for index, shard in enumerate(world.shards):
        if shard.is_dead:
            continue
        if not shard.open and not shard.failed and shard.at < len(shard.script):
            yield "step", index
        if shard.failed and shard.reads is not None:
            yield "stop", index
        if world.crashes and str(shard.seat) in victims:
            yield "crash", index
    if world.late is not None:
        yield "late", 0


def apply(after: World, move: tuple[str, int], duplicated: str) -> World:
    """The world after a move; the one given is used up."""
    what, index = move
    shard = after.shards[index]
    if what == "crash":
        after.crashes -= 1
        shard.is_dead = True
        shard.open.clear()
        after.trace += (f"crash {shard.seat}",)
        hear(after, after.machine.disconnected(0, shard.session))
        # The process's lease ends now; no other's does.
        after.machine.state.deadlines.set(("lease", shard.session), 0)
        hear(after, after.machine.tick(0))
    elif what == "late" and after.late is not None:
        sender, request = after.late
        after.late = None
        after.calls += 1
        after.trace += (f"late {type(request).__name__} of {after.shards[sender].seat}",)
        if not after.shards[sender].is_dead:
            # The duplicate has a call id of its own: its answer is nobody's, but it must come.
            after.shards[sender].open[after.calls] = "late"
            hear(after, after.machine.receive(0, after.shards[sender].session, after.calls, request))
    else:
        step = "stop" if what == "stop" else shard.script[shard.at]
        shard.at += what == "step"
        if step in ("done", "abort", "stop"):
            shard.reads = None
        request = request_of(shard, step)
        after.calls += 1
        after.trace += (f"{shard.seat} {step}",)
        shard.open[after.calls] = step
        if after.lates and f"{shard.seat} {step}" == duplicated:
            after.lates, after.late = 0, (index, request)
        hear(after, after.machine.receive(0, shard.session, after.calls, request))
    return after


def hear(world: World, out: list[Outgoing]) -> None:
    """Clients take their answers; an answer to no open call is a fault."""
    for message in out:
        shard = next(each for each in world.shards if each.session == message.to)
        assert not shard.is_dead or message.id == 0, f"{world.trace}: {message}"
        match message.message:
            case m.Moved(_, group):
                shard.group, shard.sequence = group, 0
            case m.Granted(version) | m.Held(version):
                shard.version = version.number
                if isinstance(message.message, m.Granted):
                    shard.reads, shard.granted = message.message.source.generation, (shard.group, shard.sequence)
            case m.Announced():
                shard.shown = Generation(ident(f"{shard.seat} publishes {shard.open[message.id].split()[1]}"))
            case m.Unpublished():
                late = [str(each.seat) for each in world.shards if each.reads == shard.shown and not each.is_dead]
                assert not late, f"not drained: {late} may read: {world.trace}"
            case m.Committed(version):
                shard.committed = version.number
                shard.sequence += shard.open.get(message.id) != "late"
            case m.Refused(error) if shard.open.get(message.id) not in ("late", None):
                assert error in EXPECTED, f"{world.trace}: {message}"
                shard.failed = True
            case m.TransactionAborted():
                shard.failed = True
        if message.id != 0:
            assert message.id in shard.open, f"answered twice: {world.trace}: {message}"
            del shard.open[message.id]


def one_version(world: World) -> None:
    """One version per replica: of a commit all shards hear the same, and no two versions are granted at once."""
    by_group: dict[tuple[str, int], set[int]] = {}
    for shard in world.shards:
        if shard.committed is not None:
            by_group.setdefault((shard.seat.replica, shard.sequence), set()).add(shard.committed)
    assert all(len(versions) == 1 for versions in by_group.values()), world.trace


def heal(world: World) -> None:
    """Let all deadlines of the living pass while they beat: every call is answered, nothing waits or hides."""
    machine, now = world.machine, 0
    while now < 20_000_000_000:
        now += 1_000_000_000
        for shard in world.shards:
            if not shard.is_dead:
                machine.receive(now, shard.session, 0, m.Beat(shard.session))
        hear(world, machine.tick(now))
        machine.check()
    for shard in world.shards:
        assert shard.is_dead or not shard.open, f"lost wake-up: {shard.seat} waits for {shard.open}: {world.trace}"
    for model in machine.state.models.values():
        for replica in model.replicas.values():
            assert replica.transaction is None, world.trace
    for holding in machine.state.generations.values():
        assert not holding.readers, world.trace
        assert not holding.lingering, world.trace
        assert not holding.pins, world.trace
        assert holding.drain is None, world.trace


def explore(first: World, duplicated: str = "", victims: tuple[str, ...] = ()) -> set[str]:
    """All worlds reachable from the first; the situations that were met."""
    first.crashes = 1 if victims else 0
    marked = (*victims, duplicated) if duplicated else victims
    seen, todo, met = {first.key(marked)}, [first], set[str]()
    while todo:
        world = todo.pop()
        frozen, choices = freeze(world), list(moves(world, victims))
        for move in choices:
            after = apply(pickle.loads(frozen), move, duplicated)
            key = after.key(marked)
            if key not in seen:
                after.machine.check()
                one_version(after)
                seen.add(key)
                todo.append(after)
                met |= situations(after)
                assert len(seen) < WORLDS_MAX, "the exploration is no longer small"
        if not choices:
            heal(world)
    return met | {f"{len(seen)} worlds"}


def situations(world: World) -> set[str]:
    """What makes a world worth having been in."""
    met = {
        f"{name} {'committed' if shard.committed else 'failed' if shard.failed else 'goes on'}"
        for shard in world.shards
        if (name := str(shard.seat))[0] != "t"
    }
    for model in world.machine.state.models.values():
        for replica in model.replicas.values():
            for part in replica.transaction.parts.values() if replica.transaction else ():
                met.add(part.phase.name)
    return met


PULL = ("ask", "serve", "done")
SHORT = ("ask", "done")
TRAIN = ("publish 1", "seal 1", "unpublish", "publish 2")
AGAIN = ("unpublish", "publish 2")


def shards_of(name: str, count: int, script: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {f"{name}#{index}": script for index in range(count)}


def published(count: int) -> tuple[str, ...]:
    """A trainer of so many shards that has published version 1."""
    return tuple(f"trainer#{index} {step}" for step in ("publish 1", "seal 1") for index in range(count))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["roll#0", "roll#1", "trainer#0"])
def test_one_group_around_a_publish(victim: str) -> None:
    """`one_version_per_replica`, `sibling_dies`: shards that ask around an unpublish and a publish agree, whoever
    dies when, with a `Done` that comes twice; nobody waits for ever."""
    scripts = shards_of("trainer", 2, TRAIN) | {"roll#0": PULL, "roll#1": SHORT}
    met = explore(begin(scripts, {"trainer": 2, "roll": 2}), "roll#0 done", (victim,))
    survivor = "roll#0" if victim == "roll#1" else "roll#1"
    assert {"roll#0 committed", f"{survivor} failed", "WAITING", "READING", "DONE"} <= met


@pytest.mark.slow
@pytest.mark.parametrize("late", ["a#0 done", "b#0 serve"])
def test_two_replicas_and_a_relay(late: str) -> None:
    """Two replicas that may read from each other, twice in a row: holding, draining, overwriting in every order."""
    scripts = {"trainer": TRAIN, "a": PULL + SHORT, "b": PULL}
    met = explore(begin(scripts, {"trainer": 1, "a": 1, "b": 1}), late, ("trainer#0",))
    assert {"a#0 committed", "b#0 committed", "HELD", "DRAINING"} <= met


@pytest.mark.slow
def test_two_groups_of_three() -> None:
    """Two groups of three shards and a trainer of three: all orders of asking and finishing commit both groups."""
    scripts = shards_of("trainer", 3, ()) | shards_of("a", 3, SHORT) | shards_of("b", 3, SHORT)
    met = explore(begin(scripts, {"trainer": 3, "a": 3, "b": 3}, published(3)))
    assert {"a#2 committed", "b#2 committed"} <= met
    assert not {name for name in met if "failed" in name}


@pytest.mark.slow
def test_two_groups_of_three_a_crash_and_a_late_message() -> None:
    """`sibling_dies`: a shard of one group dies at any moment, a `Done` of the other comes twice at any later moment:
    the other group is not touched, the survivors of the first all hear of it."""
    scripts = shards_of("trainer", 3, ()) | shards_of("a", 3, SHORT) | shards_of("b", 3, SHORT)
    met = explore(begin(scripts, {"trainer": 3, "a": 3, "b": 3}, published(3)), "b#0 done", ("a#0",))
    assert {"a#1 committed", "a#1 failed", "a#2 failed", "b#1 committed"} <= met
    assert not {"b#1 failed", "b#2 failed"} & met


@pytest.mark.slow
def test_a_source_dies() -> None:
    """A shard of the trainer dies at any moment while three shards pull, one of whose requests comes twice."""
    scripts = shards_of("trainer", 3, ()) | shards_of("a", 3, SHORT)
    met = explore(begin(scripts, {"trainer": 3, "a": 3}, published(3)), "a#0 ask", ("trainer#0",))
    assert {"a#1 committed", "a#1 failed"} <= met


@pytest.mark.slow
def test_unpublish_among_two_groups() -> None:
    """Drained: the trainer goes on to version 2 while two groups of two pull version 1, one of them aborting."""
    scripts = (
        shards_of("trainer", 2, ("unpublish",)) | shards_of("a", 2, SHORT) | {"b#0": SHORT, "b#1": ("ask", "abort")}
    )
    met = explore(begin(scripts, {"trainer": 2, "a": 2, "b": 2}, published(2)))
    assert {"a#0 committed", "b#0 failed", "WAITING"} <= met
