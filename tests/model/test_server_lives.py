"""The death of a server, explored whole: at any moment of a group's pull, whoever comes back in which order, early or
late. Clients are as small as can be: a script, what they were told, and what they bring back.

Asserted in every state: the invariants, one version per replica, decisions that stay through both lives, `latest` that
does not go backwards, Drained by the letter. Asserted at every end: every call is answered; and nobody has failed where
nobody died and all came back in time. (server_restart_midtransfer, server_recreated_same_name)
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tensorhub import messages as m
from tensorhub.server.machine import Machine
from tensorhub.server.settings import DEFAULTS
from tensorhub.server.turn import Outgoing
from tensorhub.types import (
    NO_GENERATION,
    UNVERIFIED,
    Epoch,
    Generation,
    Latest,
    Location,
    ReplicaId,
    Seat,
    SessionId,
    Version,
)
from tests.unit.server.kit import ACTOR, content, ident, root

#: Explored worlds at most: a run beyond this has lost its pruning.
WORLDS_MAX = 20_000
SECOND = 1_000_000_000
LIVES = (Epoch(ident("first life")), Epoch(ident("second life")))
MARK = m.LineageMark("main", 0, 1)
LONG = 100 * SECOND
#: When a wait of the clock ends: the grace, and the lease that began with the new life.
CLOCK = (0, DEFAULTS.grace_ns + 1, DEFAULTS.lease_ns + DEFAULTS.grace_ns + 1)


@dataclass
class Shard:
    """One seat. Its process may be away from the server; only then may it come back."""

    seat: Seat
    shards: int
    session: SessionId
    script: tuple[str, ...]
    at: int = 0
    is_away: bool = False
    #: What the server says to it now is lost with the server.
    is_deaf: bool = False
    #: It came back only after time had passed.
    is_late: bool = False
    failed: str = ""
    group: int = 0
    sequence: int = 0
    #: What it shows: generation, version, whether published, whether it is being withdrawn.
    shown: tuple[Generation, int, bool, bool] | None = None
    #: Its transaction: numbers, version, generation of its filling (empty when it holds the version) and its source.
    under: tuple[int, int, int, Generation, Generation] | None = None
    is_done: bool = False
    committed: tuple[int, int, int] | None = None
    seen: int = 0
    #: {call: (step, request)}, of calls not answered.
    open: dict[int, tuple[str, m.Request]] = field(default_factory=dict)

    @property
    def reads(self) -> Generation:
        """What it may be reading: from its grant to its `Done`."""
        return self.under[4] if self.under is not None and not self.is_done else NO_GENERATION


@dataclass
class World:
    machine: Machine
    shards: list[Shard]
    life: int = 0
    clock: int = 0
    calls: int = 0
    #: {replica: {(group, sequence): version that it was given or told}}.
    decided: dict[tuple[str, int, int], int] = field(default_factory=dict)
    trace: tuple[str, ...] = ()

    @property
    def now(self) -> int:
        return CLOCK[self.clock]

    def key(self) -> object:
        """What decides the future."""
        clients = [
            (s.at, s.is_away, s.is_late, s.failed, s.group, s.sequence, s.shown, s.under, s.is_done, s.committed)
            for s in self.shards
        ]
        calls = [sorted(step for step, _ in shard.open.values()) for shard in self.shards]
        return repr((self.life, self.clock, clients, calls, sorted(self.decided.items()), facts(self.machine)))


def facts(machine: Machine) -> object:
    """What the server knows, without counters, times and stories."""
    state, found = machine.state, []
    for model in state.models.values():
        found.append((model.readable, model.floor, model.vouched, sorted(model.undecided)))
        for replica in model.replicas.values():
            tx = replica.transaction
            parts = () if tx is None else sorted((at, p.phase.name, p.call is None) for at, p in tx.parts.items())
            pins = () if tx is None else sorted((at, str(p.member.seat)) for at, p in tx.pins.items())
            record = tx.record.version.number if tx is not None and tx.record is not None else None
            found.append((replica.id, sorted(replica.members), replica.sequence, parts, pins, record))
    holdings = sorted(
        (
            str(h.member.seat),
            h.state.name,
            h.hidden,
            h.is_unsure,
            h.drain is None,
            str(h.upstream and h.upstream.member.seat),
        )
        for h in state.generations.values()
    )
    return state.grace, found, holdings, sorted((k.hex(), len(v)) for k, v in state.awaited.items())


def begin(scripts: dict[str, tuple[str, ...]], prelude: tuple[str, ...]) -> World:
    world = World(Machine(LIVES[0]), [])
    counts: dict[str, int] = {}
    for name in scripts:
        counts[name.split("#")[0]] = counts.get(name.split("#")[0], 0) + 1
    for name, script in scripts.items():
        replica, _, number = name.partition("#")
        seat = Seat(ACTOR, ReplicaId(replica), int(number))
        shard = Shard(seat, counts[replica], SessionId(ident(name)), script)
        world.shards.append(shard)
        arrive(world, shard, Epoch(b""))
    for line in prelude:
        name, _, step = line.partition(" ")
        say(world, next(each for each in world.shards if str(each.seat) == name), step)
    return world


def moves(world: World) -> Iterator[tuple[str, int]]:
    for index, shard in enumerate(world.shards):
        if shard.is_away:
            yield "return", index
        elif not shard.open and not shard.failed and shard.at < len(shard.script):
            yield "step", index
    if world.life == 0:
        yield "die", 0
    elif world.clock + 1 < len(CLOCK):
        yield "wait", 0


def apply(world: World, move: tuple[str, int]) -> World:
    what, index = move
    shard = world.shards[index]
    world.trace += (f"{what} {shard.seat}" if what == "return" else shard.script[shard.at] if what == "step" else what,)
    match what:
        case "die":
            world.life = 1
            world.machine = Machine(LIVES[1], groups=100)
            for each in world.shards:
                each.is_away, each.is_deaf = True, False
        case "wait":
            world.clock += 1
            for each in world.shards:
                if not each.is_away:
                    world.machine.receive(world.now, each.session, 0, m.Beat(each.session))
            hear(world, world.machine.tick(world.now))
        case "return":
            shard.is_away, shard.is_late = False, world.clock > 0
            arrive(world, shard, LIVES[0])
        case _:
            shard.at += 1
            say(world, shard, shard.script[shard.at - 1])
    return world


def arrive(world: World, shard: Shard, epoch: Epoch) -> None:
    """Hello, Join with all that it knows, then every call that waits, as `client/session.py` does."""
    send(world, shard, "hello", m.Hello(m.PROTOCOL, shard.session, b"", str(shard.seat), 1, epoch))
    send(world, shard, "join", join_of(shard))
    for call, (step, request) in list(shard.open.items()):
        if isinstance(request, m.Replicate) and (request.group, request.sequence) != (shard.group, shard.sequence):
            del shard.open[call]
            say(world, shard, step)  # refused by its old numbers, it is asked in the new ones
        else:
            hear(world, world.machine.receive(world.now, shard.session, call, request))


def join_of(shard: Shard) -> m.Join:
    claims, undertaking = (), None
    if shard.shown is not None and (shard.under is None or shard.under[3] == NO_GENERATION):
        generation, number, is_published, is_hidden = shard.shown
        claims = (
            m.Claim(
                "a",
                Version("main", number),
                generation,
                content(number),
                root(number),
                is_published,
                8,
                (),
                b"x",
                is_hidden,
            ),
        )
    if shard.under is not None:
        _, _, number, generation, source = shard.under
        held = generation == NO_GENERATION
        whole = root(number) if shard.is_done else UNVERIFIED
        undertaking = m.Undertaking(
            "a", Latest(), Version("main", number), content(number), filling_of(shard), LONG, held, True,
            source, 0, 0, whole, (), b"y", True,
        )  # fmt: skip
    at, version = (-1, None) if shard.committed is None else (shard.committed[1], Version("main", shard.committed[2]))
    published = Version("main", shard.shown[1]) if shard.shown is not None and shard.shown[2] else None
    seen = Version("main", shard.seen) if shard.seen else None
    marks = (MARK,) if published or seen or version else ()
    standing = m.Standing(shard.group, shard.sequence, at, version, published, seen, marks, undertaking)
    return m.Join(shard.seat, shard.shards, "flat", False, Location(), claims, standing)


def filling_of(shard: Shard) -> Generation:
    group, sequence = (shard.under[0], shard.under[1]) if shard.under is not None else (shard.group, shard.sequence)
    return Generation(ident(f"{shard.seat} {group} {sequence}"))


def say(world: World, shard: Shard, step: str) -> None:
    what, _, text = step.partition(" ")
    seat, number = shard.seat, int(text or 0)
    match what:
        case "publish":
            generation = Generation(ident(f"{seat} publishes {number}"))
            shard.shown = (generation, number, True, False)
            request: m.Request = m.Publish(seat, "a", Version("main", number), generation, content(number), (), b"x")
        case "seal":
            request = m.Seal(seat, Generation(ident(f"{seat} publishes {number}")), root(number))
        case "unpublish":
            assert shard.shown is not None
            shard.shown = (*shard.shown[:3], True)
            request = m.Unpublish(seat, "a", shard.shown[0], LONG)
        case "ask":
            request = m.Replicate(seat, "a", shard.group, shard.sequence, Latest(), LONG, filling_of(shard))
        case "done" if shard.under is not None:
            group, sequence, version, _, _ = shard.under
            shard.is_done = True
            request = m.Done(seat, group, sequence, filling_of(shard), root(version), 1)
        case _:
            raise AssertionError(step)
    send(world, shard, step, request)


def send(world: World, shard: Shard, step: str, request: m.Request) -> None:
    world.calls += 1
    shard.open[world.calls] = (step, request)
    hear(world, world.machine.receive(world.now, shard.session, world.calls, request))


def hear(world: World, out: list[Outgoing]) -> None:
    for message in out:
        shard = next(each for each in world.shards if each.session == message.to)
        if shard.is_deaf:
            continue
        step, _ = shard.open.get(message.id, ("", None))
        match message.message:
            case m.Joined(group, sequence):
                went_on(shard, group, sequence)
            case m.Moved(_, group, sequence):
                shard.group, shard.sequence = group, sequence
            case m.Granted(version=version, source=source):
                took(world, shard, version.number, filling_of(shard), source.generation)
            case m.Held(version=version):
                took(world, shard, version.number, NO_GENERATION, NO_GENERATION)
            case m.Committed(version) if shard.under is not None:
                assert version.number == shard.under[2], f"another version is committed: {world.trace}"
                group, sequence, number, _, _ = shard.under
                shard.committed = (group, sequence, number)
                shard.shown, shard.under, shard.is_done = (filling_of(shard), number, False, False), None, False
                if (shard.group, shard.sequence) == (group, sequence):
                    shard.sequence += 1
            case m.Unpublished():
                assert shard.shown is not None
                late = [
                    str(s.seat) for s in world.shards if s.reads == shard.shown[0] and not (s.is_away and world.clock)
                ]
                assert not late, f"not drained: {late} may read: {world.trace}"
                shard.shown = None
            case m.TransactionAborted() if shard.under is not None or step == "":
                fail(shard, "aborted")
            case m.Refused(error) if step not in ("", "hello"):
                assert error in ("GroupAborted", "WaitTimeout", "VersionUnavailable"), f"{world.trace}: {message}"
                fail(shard, error)
            case m.Refused():
                raise AssertionError(f"{world.trace}: {message}")
        if message.id != 0:
            assert message.id in shard.open, f"answered twice: {world.trace}: {message}"
            del shard.open[message.id]


def went_on(shard: Shard, group: int, sequence: int) -> None:
    """Where the group is. A transaction before that is over, but for a `Done`, which hears how it ended."""
    if shard.under is not None and not shard.is_done and (shard.under[0] != group or sequence > shard.under[1]):
        fail(shard, "behind")
    shard.group, shard.sequence = group, sequence


def fail(shard: Shard, why: str) -> None:
    shard.failed = shard.failed or why
    shard.under = None


def took(world: World, shard: Shard, version: int, filling: Generation, source: Generation) -> None:
    """One decision per transaction, through all lives, and `latest` never goes backwards while its holders live."""
    number = (shard.seat.replica, shard.group, shard.sequence)
    siblings = [each for each in world.shards if each.seat.replica == shard.seat.replica and each is not shard]
    siblings = [each for each in siblings if not (each.is_away and world.clock)]  # too late to be waited for
    if any(each.under is not None and each.under[:2] == number[1:] for each in siblings):
        assert world.decided[number] == version, f"a second decision for {number}: {world.trace}"
    newest = max(max(each.seen, each.shown[1] if each.shown and not each.shown[3] else 0) for each in world.shards)
    holders = [
        each for each in world.shards if each.shown is not None and each.shown[1] == newest and not each.shown[3]
    ]
    is_held = (
        bool(newest) and bool(holders) and not any(each.is_late or (each.is_away and world.clock) for each in holders)
    )
    joins_late = number in world.decided
    assert joins_late or not is_held or version >= newest, f"latest fell from {newest} to {version}: {world.trace}"
    world.decided[number] = version
    shard.under = (shard.group, shard.sequence, version, filling, source)
    shard.seen = max(shard.seen, version)


def heal(world: World) -> None:
    """Time passes while everybody beats: every call is answered."""
    for seconds in range(1, 130):
        now = world.now + seconds * SECOND
        for shard in world.shards:
            if not shard.is_away:
                world.machine.receive(now, shard.session, 0, m.Beat(shard.session))
        hear(world, world.machine.tick(now))
    world.machine.check()
    for shard in world.shards:
        assert not shard.open, f"lost wake-up: {shard.seat} waits for {shard.open}: {world.trace}"


def explore(world: World) -> set[str]:
    """All worlds reachable from this one; the situations that were met."""
    seen, todo, met = {world.key()}, [world], set[str]()
    while todo:
        world = todo.pop()
        frozen, choices = freeze(world), list(moves(world))
        for move in choices:
            after = apply(pickle.loads(frozen), move)
            key = after.key()
            if key not in seen:
                after.machine.check()
                one_version(after)
                seen.add(key)
                todo.append(after)
                assert len(seen) < WORLDS_MAX, "the exploration is no longer small"
        if not any(what in ("step", "return") for what, _ in choices):
            in_time = not any(shard.is_late or shard.is_away for shard in world.shards)
            failed = {str(shard.seat): shard.failed for shard in world.shards if shard.failed}
            assert not (in_time and failed), f"all came back in time, and yet {failed}: {world.trace}"
            heal(pickle.loads(frozen))
            met |= {f"{shard.seat} {'failed' if shard.failed else 'fine'}" for shard in world.shards}
            met.add("second life" if world.life else "first life")
    return met | {f"{len(seen)} worlds"}


def freeze(world: World) -> bytes:
    for model in world.machine.state.models.values():
        for replica in model.replicas.values():
            replica.story.lines.clear()
    return pickle.dumps(world, -1)


def one_version(world: World) -> None:
    by_number: dict[tuple[str, int, int], set[int]] = {}
    for shard in world.shards:
        if shard.committed is not None:
            group, sequence, version = shard.committed
            by_number.setdefault((shard.seat.replica, group, sequence), set()).add(version)
    assert all(len(versions) == 1 for versions in by_number.values()), world.trace


PULL = ("ask", "done")


@pytest.mark.slow
def test_one_shard_and_its_source() -> None:
    """A reader and a publisher that unpublishes: whoever comes back first, the reader is waited for or is late."""
    scripts = {"trainer#0": ("unpublish",), "roll#0": PULL}
    met = explore(begin(scripts, ("trainer#0 publish 1", "trainer#0 seal 1")))
    assert {"roll#0 fine", "trainer#0 fine", "second life"} <= met


@pytest.mark.slow
def test_a_group_around_the_death_of_its_server() -> None:
    """Two shards pull while the server dies: none of them, or one, or both had heard of the decision, or the commit."""
    scripts = {"trainer#0": (), "trainer#1": (), "roll#0": PULL, "roll#1": PULL}
    prelude = tuple(f"trainer#{shard} {step}" for step in ("publish 1", "seal 1") for shard in range(2))
    met = explore(begin(scripts, prelude))
    assert {"roll#0 fine", "roll#1 fine", "roll#0 failed", "roll#1 failed"} <= met


@pytest.mark.slow
def test_a_newer_version_comes_meanwhile() -> None:
    """A copy of version 1 and a trainer that has just published 2: `latest` stays what it was, whoever is back first,
    and a group half of which pulls version 1 goes on with it."""
    scripts = {"trainer#0": ("unpublish", "publish 2", "seal 2"), "old#0": (), "roll#0": PULL}
    met = explore(begin(scripts, ("trainer#0 publish 1", "trainer#0 seal 1", "old#0 ask", "old#0 done")))
    assert {"roll#0 fine", "old#0 fine"} <= met


def returned(world: World, *names: str) -> World:
    """The server has died, and these are back."""
    world = apply(world, ("die", 0))
    for name in names:
        world = apply(world, ("return", next(i for i, each in enumerate(world.shards) if str(each.seat) == name)))
    return world


@pytest.mark.slow
def test_a_newer_version_is_on_its_way() -> None:
    """Nobody has been given the newest version but its publisher, who may be the last to come back: `latest` is not
    what others hold meanwhile."""
    prelude = ("publish 1", "seal 1", "old#0 ask", "old#0 done", "unpublish", "publish 2", "seal 2")
    lines = tuple(line if "#" in line else f"trainer#0 {line}" for line in prelude)
    met = explore(begin({"trainer#0": (), "old#0": (), "roll#0": PULL}, lines))
    assert {"roll#0 fine", "second life"} <= met


@pytest.mark.slow
def test_a_decision_is_on_its_way() -> None:
    """One shard of a group was given version 1 before version 2 came, the other asks in the new life, before its
    sibling is back or after: it is given version 1."""
    both = [f"{{}}#{shard} {{}}" for shard in range(2)]
    steps = [("trainer", "publish 1"), ("trainer", "seal 1"), ("old", "ask"), ("old", "done")]
    news = [("trainer", "unpublish"), ("trainer", "publish 2"), ("trainer", "seal 2")]
    prelude = [line.format(*step) for step in steps for line in both]
    prelude += ["roll#0 ask", *(line.format(*step) for step in news for line in both)]
    scripts = {"trainer#0": (), "trainer#1": (), "old#0": (), "old#1": (), "roll#0": ("done",), "roll#1": PULL}
    world = returned(begin(scripts, tuple(prelude)), "trainer#0", "trainer#1", "old#0", "old#1")
    assert all(not shard.open for shard in world.shards)
    assert [version for (replica, _, _), version in world.decided.items() if replica == "roll"] == [1]
    met = explore(world)
    assert {"roll#0 fine", "roll#1 fine"} <= met


@pytest.mark.slow
@pytest.mark.parametrize("deaf", [0, 1], ids=["the first to be done", "the last to be done"])
def test_a_commit_is_half_heard(deaf: int) -> None:
    """The server dies while it tells a group of its commit: one shard has heard of it, and it is a commit for both,
    whoever is back first."""
    prelude = [f"trainer#{shard} {step}" for step in ("publish 1", "seal 1") for shard in range(2)]
    scripts = {"trainer#0": (), "trainer#1": (), "roll#0": (), "roll#1": ("done",)}
    world = begin(scripts, (*prelude, "roll#0 ask", "roll#1 ask", "roll#0 done"))
    world.shards[2 + deaf].is_deaf = True
    world = apply(world, ("step", 3))
    assert [bool(shard.open) for shard in world.shards[2:]] == [deaf == 0, deaf == 1]
    met = explore(returned(world, "trainer#0"))
    assert {"roll#0 fine", "roll#1 fine"} <= met
