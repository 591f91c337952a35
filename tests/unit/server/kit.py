"""A cluster in a few words: drives one `Machine` by the names of processes, checks it after every step, keeps answers.

Process `roll-1` with shards 0 and 1 is written `roll-1#0`, `roll-1#1`; each is a session of its own unless told.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from tensorhub import messages as m
from tensorhub.references import NO_PAST
from tensorhub.server import views
from tensorhub.server.machine import Machine
from tensorhub.server.settings import DEFAULTS, SECOND_NS, Settings
from tensorhub.server.turn import Outgoing
from tensorhub.types import (
    Digest,
    Epoch,
    Generation,
    Latest,
    Location,
    ModelKey,
    ReplicaId,
    Seat,
    Selector,
    SessionId,
    Version,
)

ACTOR = ModelKey("default", "actor")
LATEST = Latest()
NO_EPOCH = Epoch(b"")
#: The epoch of a server that died.
OTHER_LIFE = Epoch(b"another life    ")


def ident(text: str) -> bytes:
    """16 bytes that are the same for the same text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def content(version: int = 1, *, chunks: int = 8, verified: bool = True) -> m.Content:
    return m.Content(Digest(ident(f"manifest {version}")), chunks * 65536, chunks, verified)


def root(version: int) -> Digest:
    return Digest(ident(f"root {version}"))


@dataclass
class Process:
    """One session with one seat."""

    cluster: Cluster
    name: str
    seat: Seat
    shards: int
    session: SessionId
    group: int = 0
    sequence: int = 0
    fillings: int = 0
    #: When it last told how far it is, or began to read.
    told_ns: int = 0
    generation: Generation = field(default=Generation(b""))
    published: Generation = field(default=Generation(b""))
    location: Location = field(default=Location())

    def ask(self, request: m.Request) -> int:
        """Send a request; its call id."""
        return self.cluster.send(self.session, request)

    def answer(self, call: int) -> m.Reply | m.Notice | None:
        """The only answer to a call so far, or None."""
        found = [out.message for out in self.cluster.log if out.to == self.session and out.id == call]
        assert len(found) <= 1, f"call {call} of {self.name} answered {len(found)} times: {found}"
        return found[0] if found else None

    def do(self, request: m.Request) -> m.Reply | m.Notice | None:
        return self.answer(self.ask(request))

    def notices(self, kind: type[m.Notice]) -> list[m.Notice]:
        return [out.message for out in self.cluster.log if out.to == self.session and isinstance(out.message, kind)]

    # ------------------------------------------------------------ requests

    def hello(self, epoch: Epoch = NO_EPOCH) -> m.Reply | m.Notice | None:
        return self.do(m.Hello(m.PROTOCOL, self.session, b"", f"host-{self.name}", 7, epoch))

    def join(
        self, claims: tuple[m.Claim, ...] = (), layout: str = "flat", standing: m.Standing = NO_PAST
    ) -> m.Reply | m.Notice | None:
        answer = self.do(m.Join(self.seat, self.shards, layout, False, self.location, claims, standing))
        if isinstance(answer, m.Joined):
            self.group, self.sequence = answer.group, answer.sequence
        return answer

    def fresh(self) -> Generation:
        self.fillings += 1
        return Generation(ident(f"{self.name} {self.session.hex()} {self.fillings}"))

    def publish(
        self, number: int, *, lineage: str = "main", buffers: str = "a", what: m.Content | None = None
    ) -> m.Reply | m.Notice | None:
        self.published = self.fresh()
        version = Version(lineage, number)
        what = content(number) if what is None else what
        return self.do(m.Publish(self.seat, buffers, version, self.published, what, self.locators(), b"here"))

    def locators(self) -> tuple[m.Locator, ...]:
        return (m.Locator("memory", self.name.encode()),)

    def seal(self, number: int) -> m.Reply | m.Notice | None:
        return self.do(m.Seal(self.seat, self.published, root(number)))

    def unpublish(self, timeout_s: float = 5, *, abandon: bool = False, buffers: str = "a") -> int:
        return self.ask(m.Unpublish(self.seat, buffers, self.held(buffers), int(timeout_s * SECOND_NS), abandon))

    def held(self, buffers: str) -> Generation:
        """What the server has of this buffer set; some generation when it has nothing."""
        session = self.cluster.machine.state.sessions.get(self.session)
        member = None if session is None else session.members.get(self.seat)
        holding = None if member is None else member.holdings.get(buffers)
        return Generation(bytes(16)) if holding is None else holding.generation

    def replicate(
        self,
        selector: Selector = LATEST,
        timeout_s: float = 5,
        *,
        buffers: str = "a",
        serves: bool = True,
        shown: m.Content | None = None,
    ) -> int:
        """`shown`: what the filling will be, if the version is that."""
        self.generation, self.told_ns = self.fresh(), self.cluster.now_ns
        timeout_ns = int(timeout_s * SECOND_NS)
        asked = m.Replicate(
            self.seat, buffers, self.group, self.sequence, selector, timeout_ns, self.generation, serves
        )
        if shown is not None:
            asked = replace(asked, manifest=shown.manifest, locators=self.locators(), exposure=b"there")
        return self.ask(asked)

    def serve(self) -> m.Reply | m.Notice | None:
        return self.do(m.Serve(self.seat, self.generation, self.locators(), b"there"))

    def progress(self, watermark: int) -> None:
        now_ns = self.cluster.now_ns
        period_ns, self.told_ns = now_ns - self.told_ns, now_ns
        told = m.Progress(self.seat, self.generation, watermark, watermark * 65536, period_ns=period_ns)
        self.cluster.send(self.session, told, call=0)

    def reroute(self, source: Generation, watermark: int = 0, timeout_s: float = 5) -> int:
        self.told_ns = self.cluster.now_ns
        return self.ask(
            m.Reroute(
                self.seat, self.generation, source, "stalled", watermark, watermark * 65536, int(timeout_s * SECOND_NS)
            )
        )

    def done(self, number: int, digest: Digest | None = None) -> int:
        digest = root(number) if digest is None else digest
        return self.ask(m.Done(self.seat, self.group, self.sequence, self.generation, digest, 8 * 65536))

    def abort(self, reason: str = "no space") -> m.Reply | m.Notice | None:
        answer = self.do(m.Abort(self.seat, self.group, self.sequence, reason))
        self.sequence += 1
        return answer

    def leave(self) -> m.Reply | m.Notice | None:
        return self.do(m.Leave(self.seat))


def claim(process: Process, **change: object) -> m.Claim:
    """Version 4, replicated and committed, unless told otherwise."""
    values: dict[str, object] = {
        "buffers": "a",
        "version": Version("main", 4),
        "generation": Generation(ident(f"claim of {process.name}")),
        "content": content(4),
        "root": root(4),
        "published": False,
        "watermark": 8,
        "locators": (),
        "exposure": b"",
    }
    return m.Claim(**(values | change))  # type: ignore[arg-type]


def undertaking(process: Process, **change: object) -> m.Undertaking:
    """A filling with version 4, two of its eight chunks done, for somebody who asked for `latest` a while ago."""
    values: dict[str, object] = {
        "buffers": "a",
        "selector": LATEST,
        "version": Version("main", 4),
        "content": content(4),
        "generation": process.generation,
        "timeout_ns": 60 * SECOND_NS,
        "held": False,
        "serves": True,
        "upstream": Generation(b""),
        "watermark": 2,
        "bytes_done": 2 * 65536,
        "root": Digest(b""),
        "locators": process.locators(),
        "exposure": b"there",
        "begun": True,
    }
    return m.Undertaking(**(values | change))  # type: ignore[arg-type]


@dataclass
class Cluster:
    settings: Settings = DEFAULTS
    shards: int = 1
    #: Off for crowds: checking everything after every step takes longer than all the steps.
    checks: bool = True
    now_ns: int = 0
    calls: int = 0
    machine: Machine = field(init=False)
    log: list[Outgoing] = field(default_factory=list)
    processes: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = Machine(Epoch(ident("epoch")), self.settings)

    def send(self, session: SessionId, request: m.Request, call: int | None = None) -> int:
        if call is None:
            self.calls += 1
            call = self.calls
        self.log += self.machine.receive(self.now_ns, session, call, request)
        self._check()
        return call

    def _check(self) -> None:
        if self.checks:
            self.machine.check()

    def process(
        self, name: str, *, shards: int | None = None, location: str = "", model: ModelKey = ACTOR, life: int = 1
    ) -> Process:
        """A process that has said hello and joined."""
        process = self.stranger(name, shards=shards, location=location, model=model, life=life)
        assert isinstance(process.hello(), m.Welcome)
        answer = process.join()
        assert isinstance(answer, m.Joined), answer
        return process

    def stranger(
        self, name: str, *, shards: int | None = None, location: str = "", model: ModelKey = ACTOR, life: int = 1
    ) -> Process:
        """A process that has said nothing yet."""
        replica, _, shard = name.partition("#")
        seat = Seat(model, ReplicaId(replica), int(shard or 0))
        session = SessionId(ident(f"{model}/{name}/{life}"))
        count = self.shards if shards is None else shards
        process = Process(self, name, seat, count, session, location=Location.parse(location))
        self.processes[name] = process
        return process

    def group(self, name: str, shards: int = 2, **how: str) -> list[Process]:
        return [
            self.process(f"{name}#{shard}", shards=shards, location=how.get("location", "")) for shard in range(shards)
        ]

    def wait(self, seconds: float) -> None:
        """Let time pass, ticking at every deadline on the way."""
        end = self.now_ns + int(seconds * SECOND_NS)
        while (due := self.machine.next_deadline_ns()) is not None and due <= end:
            self.now_ns = max(due, self.now_ns)
            self.log += self.machine.tick(self.now_ns)
            self._check()
        self.now_ns = end

    def alive(self, seconds: float, *processes: Process) -> None:
        """Let time pass while these processes beat every second."""
        for _ in range(round(seconds)):
            self.wait(1)
            for process in processes:
                process.do(m.Beat(process.session))

    def disconnect(self, process: Process) -> None:
        self.log += self.machine.disconnected(self.now_ns, process.session)
        self.machine.check()

    def fetched(self, reader: Process, number: int, selector: Selector = LATEST) -> m.Granted:
        """A whole replicate of a replica of one shard."""
        granted = reader.answer(reader.replicate(selector))
        assert isinstance(granted, m.Granted), granted
        reader.serve()
        committed = reader.answer(reader.done(number))
        assert isinstance(committed, m.Committed), committed
        reader.sequence += 1
        return granted

    def state_of(self, number: int, model: ModelKey = ACTOR) -> str:
        """How `tensorhub versions` shows a version; "absent" for none."""
        table = self.machine.state.models.get(model)
        rows = () if table is None else views.versions(table)
        return next((row.state for row in rows if row.version.number == number), "absent")


def pair() -> tuple[Cluster, list[Process], list[Process]]:
    """A trainer of two that has published version 1, and a rollout of two."""
    cluster = Cluster(shards=2)
    trainers, rolls = cluster.group("trainer"), cluster.group("roll")
    for trainer in trainers:
        trainer.publish(1)
        trainer.seal(1)
    return cluster, trainers, rolls
