"""Well-formed but senseless requests, many sessions' worth, made from any bytes and fed to a real machine.

It decides which lies are told: foreign seats and generations, groups that were never, watermarks beyond the end, claims
that contradict each other. It knows the fields of messages by their types alone, so it learns of new ones by itself.
"""

from __future__ import annotations

import dataclasses
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from tensorhub import messages as m
from tensorhub import types as t
from tensorhub.references import Content
from tests.unit.server.kit import ACTOR, OTHER_LIFE, Cluster, ident

_PAIRS = t.ModelKey("default", "pairs")
#: Of each session: where it sits when it makes sense. Four replicas of one shard, two of two.
SEATS = [
    *(t.Seat(ACTOR, t.ReplicaId(replica), 0) for replica in "rsuv"),
    *(t.Seat(_PAIRS, t.ReplicaId(replica), shard) for replica in "rs" for shard in (0, 1)),
]
SESSIONS = [t.SessionId(ident(f"liar {number}")) for number in range(len(SEATS))]
GENERATIONS = [t.Generation(ident(f"filling {number}")) for number in range(10)]
_ODD_SEATS = [t.Seat(t.ModelKey("", "x" * 300), t.ReplicaId("\n"), -1), t.Seat(ACTOR, t.ReplicaId("r"), 2**40)]
_MANIFEST = t.Digest(ident("manifest 1"))
_CONTENTS = [
    Content(_MANIFEST, 8 * 65536, 8, True),
    Content(_MANIFEST, 8 * 65536, 8, False),
    Content(_MANIFEST, 0, 0, True),
    Content(_MANIFEST, 2**62, 2**40, True),
    Content(t.Digest(b""), -1, -1, True),
]
#: By type: a few values, so that they meet; sensible ones first, since small bytes choose those.
_POOLS: dict[object, list[Any]] = {
    t.SessionId: [*SESSIONS, t.SessionId(bytes(16))],
    t.Seat: [*SEATS, *_ODD_SEATS],
    t.Generation: [*GENERATIONS, t.Generation(b""), t.Generation(bytes(16))],
    t.Digest: [t.Digest(ident("root 1")), t.Digest(ident("root 2")), t.Digest(b"")],
    t.Epoch: [t.Epoch(b""), t.Epoch(ident("epoch"))],
    t.ModelKey: [ACTOR, t.ModelKey("default", "other"), t.ModelKey("", "")],
    t.Version: [t.Version("main", 1), t.Version("main", 2), t.Version("again", 2), t.Version("", -1)],
    t.Location: [t.Location(), t.Location(("dc0", "r0", "h0")), t.Location(("dc1",)), t.Location(("x",) * 40)],
    Content: _CONTENTS,
    m.Locator: [m.Locator("tcp", b"here"), m.Locator("tcp", b"x" * 5000), m.Locator("", b"")],
    int: [0, 1, 2, 3, 8, 9, -1, 65536, 10**9, 2**63 - 1, -(2**63)],
    str: ["a", "b", "", "x" * 300, "\n"],
    bytes: [b"here", b"", b"x" * 5000],
}
#: By name, where the type says too little for anything deep to be reached.
_NAMED: dict[str, list[Any]] = {
    "protocol": [m.PROTOCOL, m.PROTOCOL - 1, 2**62],
    "shards": [1, 2, 0, 2**40, -1],
    "layout": ["flat", "round"],
    "buffers": ["a", "b", "c", ""],
    "abandon": [False, True],
    "watermark": [8, 4, 0, -1, 2**62],
    "root": [t.Digest(ident("root 1")), t.Digest(ident("root 2")), t.Digest(b"")],
    "manifest": [_MANIFEST, t.Digest(b"")],
    "timeout_ns": [10**9, 5 * 10**9, 0, -1, 2**63 - 1],
}
_REQUESTS = [cls for cls in get_args(m.Request) if cls is not m.Beat]
#: What moves the world most, more often than the rest.
_OFTEN = [m.Join, m.Join, m.Publish, m.Publish, m.Seal, m.Replicate, m.Replicate, m.Replicate, m.Serve, m.Progress]


@dataclasses.dataclass(frozen=True)
class Truth:
    """What an honest request of a session would say."""

    seat: t.Seat
    shards: int
    group: int
    sequence: int
    #: Of what it holds or fills, and of what that is read from.
    generation: t.Generation
    source: t.Generation
    #: Nobody's yet.
    fresh: t.Generation


class Chooser:
    """Choices made by the bytes of an input, one byte each, until none is left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def below(self, count: int) -> int:
        """0 once all bytes are used."""
        byte = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return byte % count

    def of(self, options: list[Any]) -> Any:
        return options[self.below(len(options))]

    def instance(self, cls: Any, truth: Truth) -> Any:
        """One of a message class, or of a part of one; now and then a field of it is a lie."""
        hints = get_type_hints(cls)
        honest = {field.name: getattr(truth, field.name) for field in dataclasses.fields(truth)}
        if cls in (m.Publish, m.Replicate):
            honest["generation"] = truth.fresh
        values = {}
        for field in dataclasses.fields(cls):
            tells_truth = field.name in honest and self.below(12)
            values[field.name] = honest[field.name] if tells_truth else self.value(hints[field.name], field.name, truth)
        return cls(**values)

    def value(self, hint: object, name: str, truth: Truth) -> Any:
        """Any value of this type, mostly the sensible one that comes first, for the field of this name."""
        pool = _NAMED.get(name) or _POOLS.get(hint)
        if pool is not None:
            return self.of(pool) if self.below(4) == 3 else pool[0]
        if isinstance(hint, NewType):
            return self.value(hint.__supertype__, name, truth)
        if hint is bool:
            return self.below(4) != 3
        origin = get_origin(hint)
        if origin is tuple:
            return tuple(self.value(get_args(hint)[0], "", truth) for _ in range(self.of([0, 1, 1, 2, 20])))
        if origin in (Union, UnionType):
            members = get_args(hint)
            chosen = members[self.below(len(members))]
            return None if chosen is NoneType else self.value(chosen, "", truth)
        return self.instance(hint, truth)


def torment(data: bytes) -> Cluster:
    """A machine after all that these bytes say; it checked itself after every step."""
    cluster = Cluster()
    chooser = Chooser(data)
    for session, seat in zip(SESSIONS, SEATS, strict=True):
        cluster.send(session, m.Hello(m.PROTOCOL, session, b"", "host", 1, t.Epoch(b"")))
        cluster.send(session, m.Join(seat, _shards(seat), "flat", False, t.Location()))
    while chooser.left > 0:
        _one_step(cluster, chooser)
    return cluster


def _one_step(cluster: Cluster, chooser: Chooser) -> None:
    number = chooser.below(len(SESSIONS))
    session = SESSIONS[number]
    match chooser.below(24):
        case 0:
            cluster.wait(chooser.of([0.1, 0.5, 1.0, 11.0]))
        case 1:
            cluster.log += cluster.machine.disconnected(cluster.now_ns, session)
            cluster.machine.check()
        case 2 | 3:
            epoch = chooser.of([t.Epoch(b""), OTHER_LIFE, cluster.machine.state.epoch])
            cluster.send(session, m.Hello(m.PROTOCOL, session, b"", "host", 1, epoch))
        case often:
            kind = chooser.of(_OFTEN if often > 7 else _REQUESTS)
            call = None if chooser.below(8) else chooser.below(4)
            cluster.send(session, chooser.instance(kind, _truth(cluster, SEATS[number])), call)


def _shards(seat: t.Seat) -> int:
    return 2 if seat.model == _PAIRS else 1


def _truth(cluster: Cluster, seat: t.Seat) -> Truth:
    fresh = t.Generation(ident(f"{seat} {cluster.calls}"))
    model = cluster.machine.state.models.get(seat.model)
    replica = None if model is None else model.replicas.get(seat.replica)
    member = None if replica is None else replica.members.get(seat.shard)
    if replica is None or member is None:
        return Truth(seat, _shards(seat), 0, 0, fresh, fresh, fresh)
    held = next(reversed(member.holdings.values()), None)
    generation = fresh if held is None else held.generation
    source = fresh if held is None or held.upstream is None else held.upstream.generation
    return Truth(seat, _shards(seat), replica.group, replica.sequence, generation, source, fresh)


def prove_unharmed(cluster: Cluster) -> None:
    """An honest pair still publishes and replicates, in a model of its own and in the midst of the liars' one."""
    cluster.wait(cluster.settings.grace_ns / 1e9)  # who lied about another life of the server has opened it
    for model in (t.ModelKey("honest", "actor"), t.ModelKey("default", "honest")):
        trainer = cluster.process(f"trainer-{model}", model=model)
        rollout = cluster.process(f"rollout-{model}", model=model)
        assert isinstance(trainer.publish(1), m.Announced)
        assert isinstance(trainer.seal(1), m.Ok)
        cluster.fetched(rollout, 1)
        drained = trainer.unpublish()
        assert isinstance(trainer.answer(drained), m.Unpublished)
