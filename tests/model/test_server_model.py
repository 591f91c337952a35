"""The server against its naive twin: random histories, every message predicted, every invariant checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tensorhub import messages as m
from tensorhub.server.machine import Machine
from tensorhub.server.settings import DEFAULTS
from tensorhub.server.turn import Outgoing
from tensorhub.types import (
    UNVERIFIED,
    AtLeast,
    Digest,
    Epoch,
    Exactly,
    Generation,
    Latest,
    Location,
    ReplicaId,
    SessionId,
    Version,
)
from tensorhub.types import Seat as RealSeat
from tests.model.twin import MARGIN, SECOND, Message, Twin
from tests.unit.server.kit import ACTOR, content, ident

REPLICAS = ("trainer", "roll-1", "roll-2", "roll-3")
PROCESSES = st.integers(0, 11)
NUMBERS = st.integers(1, 4)
#: The version (and flavour) whose content a reader expects, or 0 for one that will say later how it is shown.
OFFERS = st.sampled_from([0, 1, 1, 2, 3, 10])
TIMEOUTS = st.sampled_from([2 * SECOND, 3 * SECOND])
SELECTORS = st.one_of(
    st.just(("latest", 0)),
    st.just(("latest", 0)),
    st.just(("latest", 1)),
    st.tuples(st.just("exactly"), NUMBERS),
    st.tuples(st.just("at least"), NUMBERS),
)
SELECTOR_TYPES = {"latest": Latest, "exactly": Exactly, "at least": AtLeast}
ROOTS = st.sampled_from(["same", "same", "same", "same", "other"])


class ServerModel(RuleBasedStateMachine):
    @initialize(shards=st.integers(1, 3))
    def begin(self, shards: int) -> None:
        self.shards = shards
        self.machine = Machine(Epoch(ident("epoch")), replace(DEFAULTS, commit_margin_ns=MARGIN))
        self.twin = Twin(shards)
        self.now, self.calls, self.lives = 0, 0, 0
        self.names: dict[bytes, str] = {}
        self.session: dict[tuple[str, int], str] = {}
        self.reading: dict[tuple[str, int], tuple[int, int, str]] = {}
        self.published: dict[tuple[str, int], str] = {}
        for index in range(len(REPLICAS) * shards):
            self.arrive(index)

    # ------------------------------------------------------------ plumbing

    def seat(self, index: int) -> tuple[str, int]:
        return REPLICAS[index // self.shards % len(REPLICAS)], index % self.shards

    def real(self, seat: tuple[str, int]) -> RealSeat:
        return RealSeat(ACTOR, ReplicaId(seat[0]), seat[1])

    def id(self, text: str) -> Any:
        self.names[ident(text)] = text
        return ident(text)

    def step(self, who: str, request: m.Request, name: str, *args: Any) -> list[Message]:
        self.now += SECOND // 1000
        self.calls += 1
        self.twin.now = self.now
        expected = self.twin.step(who, self.calls, name, *args)
        actual = self.machine.receive(self.now, SessionId(self.id(who)), self.calls, request)
        return self.compare(actual, expected)

    def compare(self, actual: list[Outgoing], expected: list[Message]) -> list[Message]:
        self.machine.check()
        shown = sorted((self.show(out) for out in actual), key=repr)
        assert shown == sorted(expected, key=repr)
        return shown

    def show(self, out: Outgoing) -> Message:
        message = out.message
        what: Any = None
        match message:
            case m.Refused():
                what = message.error
            case m.Joined():
                what = (message.group, message.sequence)
            case m.Granted():
                source, root = message.source, message.root
                what = (message.version.number, self.plain(source.seat), self.names[source.generation])
                what += (self.names[root] if root else None, message.begun)
            case m.Held() | m.Committed():
                what = message.version.number
            case m.Unpublished():
                what = message.readers
            case m.Moved():
                what = (self.plain(message.seat), message.group)
            case m.SourceLost():
                what = (self.plain(message.seat), self.names[message.generation], self.names[message.source])
            case m.TransactionAborted():
                what = (self.plain(message.seat), message.group, message.sequence)
            case m.Conflicted():
                what = (self.plain(message.seat), self.names[message.generation])
        return self.names[out.to], out.id, type(message).__name__, what

    def plain(self, seat: RealSeat) -> tuple[str, int]:
        return str(seat.replica), seat.shard

    def fresh(self, what: str) -> str:
        self.lives += 1
        return f"{what} {self.lives}"

    # ------------------------------------------------------------ rules

    @rule(index=PROCESSES)
    def arrive(self, index: int) -> None:
        """A process starts, or one that was declared dead comes back as somebody else."""
        seat = self.seat(index)
        who = self.session.get(seat)
        if who is not None and self.twin.seats.get(seat) == who:
            return
        if who is None or who not in self.twin.leases:
            who = self.session[seat] = self.fresh(f"session {seat}")
            hello = m.Hello(m.PROTOCOL, SessionId(self.id(who)), b"", "host", 1, Epoch(b""))
            self.step(who, hello, "hello")
        self.step(who, m.Join(self.real(seat), self.shards, "flat", False, Location()), "join", seat)

    @rule(index=PROCESSES, rival=PROCESSES)
    def intrude(self, index: int, rival: int) -> None:
        """A process asks for a seat that another may hold."""
        seat, who = self.seat(index), self.session[self.seat(rival)]
        if self.twin.seats.get(seat, who) != who or who not in self.twin.leases:
            self.step(who, m.Join(self.real(seat), self.shards, "flat", False, Location()), "join", seat)

    @rule(index=PROCESSES, number=NUMBERS, flavour=st.sampled_from([0, 0, 0, 9]))
    def publish(self, index: int, number: int, flavour: int) -> None:
        seat = self.seat(index)
        generation = self.fresh("publication")
        what = content(number + flavour)
        request = m.Publish(
            self.real(seat), "a", Version("main", number), Generation(self.id(generation)), what, (), b""
        )
        shown = self.step(self.session[seat], request, "publish", seat, number, generation, flavour)
        if any(kind == "Ok" for _, _, kind, _ in shown):
            self.published[seat] = generation

    @precondition(lambda self: self.published)
    @rule(data=st.data(), root=ROOTS)
    def seal(self, data: st.DataObject, root: str) -> None:
        seat, generation = data.draw(st.sampled_from(sorted(self.published.items())))
        self.tell_root(seat, generation, root)

    def tell_root(self, seat: tuple[str, int], generation: str, root: str) -> None:
        request = m.Seal(self.real(seat), Generation(self.id(generation)), Digest(self.id(root)))
        self.step(self.session[seat], request, "seal", seat, generation, root)

    @rule(step=st.integers(1, 2), seals=st.booleans())
    def train(self, step: int, seals: bool) -> None:
        """The trainer publishes its next version with all shards."""
        for shard in range(self.shards):
            self.unpublish(shard, 2 * SECOND, False)
            self.publish(shard, max(self.twin.highest, 0) + (step if shard == 0 else 0), 0)
            if seals and ("trainer", shard) in self.published:
                self.tell_root(("trainer", shard), self.published["trainer", shard], "same")

    @rule(replica=st.integers(1, 3), selector=SELECTORS, timeout=TIMEOUTS, until=st.integers(1, 5), offers=OFFERS)
    def pull(self, replica: int, selector: tuple[str, int], timeout: int, until: int, offers: int) -> None:
        """A group replicates, as far as it gets: asks, serves, is done."""
        seats = [self.seat(replica * self.shards + shard) for shard in range(self.shards)]
        for seat in seats:
            self.ask(REPLICAS.index(seat[0]) * self.shards + seat[1], selector, timeout, 0, offers)
        for seat in seats if until > 1 else ():
            self.tell_plan(seat)
        for seat in seats[: until - 2] if until > 2 else ():
            self.tell_done(seat, "same")

    @rule(index=PROCESSES, timeout=TIMEOUTS, abandon=st.sampled_from([False, False, False, True]))
    def unpublish(self, index: int, timeout: int, abandon: bool) -> None:
        seat = self.seat(index)
        held = next((g for g, h in self.twin.holdings.items() if h["seat"] == seat), None)
        generation = Generation(bytes(16) if held is None else ident(held))
        request = m.Unpublish(self.real(seat), "a", generation, timeout, abandon)
        self.step(self.session[seat], request, "unpublish", seat, timeout, abandon)

    @rule(replica=st.integers(1, 3), selector=SELECTORS, timeout=TIMEOUTS, together=st.booleans(), offers=OFFERS)
    def replicate(self, replica: int, selector: tuple[str, int], timeout: int, together: bool, offers: int) -> None:
        """One shard of a group asks, or all one after the other."""
        for shard in range(self.shards if together else 1):
            self.ask(replica * self.shards + shard, selector, timeout, 0, offers)

    @rule(
        index=PROCESSES,
        selector=SELECTORS,
        timeout=TIMEOUTS,
        ahead=st.sampled_from([0, 0, 0, 0, 1, -1]),
        offers=OFFERS,
    )
    def ask(self, index: int, selector: tuple[str, int], timeout: int, ahead: int, offers: int) -> None:
        seat = self.seat(index)
        group, sequence = self.twin.groups.get(seat[0], (0, 0))
        generation = self.fresh("filling")
        request = m.Replicate(
            self.real(seat),
            "a",
            group,
            sequence + ahead,
            SELECTOR_TYPES[selector[0]](selector[1]),
            timeout,
            Generation(self.id(generation)),
            manifest=content(offers).manifest if offers else UNVERIFIED,
        )
        busy = self.twin.transactions.get(seat[0], {"parts": {}})["parts"].get(seat[1])
        args = (seat, group, sequence + ahead, selector, timeout, generation, offers)
        self.step(self.session[seat], request, "replicate", *args)
        if not busy or seat not in self.reading:
            self.reading[seat] = (group, sequence + ahead, generation)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        self.tell_plan(data.draw(st.sampled_from(sorted(self.reading))))

    def tell_plan(self, seat: tuple[str, int]) -> None:
        _, _, generation = self.reading[seat]
        request = m.Serve(self.real(seat), Generation(self.id(generation)), (), b"")
        self.step(self.session[seat], request, "serve", seat, generation)

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), root=ROOTS)
    def done(self, data: st.DataObject, root: str) -> None:
        self.tell_done(data.draw(st.sampled_from(sorted(self.reading))), root)

    def tell_done(self, seat: tuple[str, int], root: str) -> None:
        group, sequence, generation = self.reading[seat]
        request = m.Done(self.real(seat), group, sequence, Generation(self.id(generation)), Digest(self.id(root)), 1)
        self.step(self.session[seat], request, "done", seat, group, sequence, generation, root)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A shard cannot finish, or has stopped after its siblings could not; of its last transaction."""
        seat, (group, sequence, _) = data.draw(st.sampled_from(sorted(self.reading.items())))
        request = m.Abort(self.real(seat), group, sequence, "no space")
        self.step(self.session[seat], request, "give_up", seat, group, sequence)

    @rule(index=PROCESSES)
    def leave(self, index: int) -> None:
        seat = self.seat(index)
        self.step(self.session[seat], m.Leave(self.real(seat)), "leave", seat)

    @rule(silent=st.sets(PROCESSES, max_size=2), seconds=st.integers(1, 6))
    def time_passes(self, silent: set[int], seconds: int) -> None:
        """Some processes are silent; what is due happens, at its time."""
        end = self.now + seconds * SECOND
        for index in range(len(REPLICAS) * self.shards):
            seat = self.seat(index)
            who = self.session[seat]
            if index not in silent and who in self.twin.leases:
                self.step(who, m.Beat(SessionId(self.id(who))), "beat")
        while (due := self.twin.due()) is not None and due <= end:
            self.now = self.twin.now = due
            self.compare(self.machine.tick(due), self.twin.tick())
        self.now = max(end, self.now)
        assert self.machine.tick(self.now) == []


@pytest.mark.slow
class TestServerModel(ServerModel.TestCase):  # type: ignore[name-defined,misc]
    """Every reply and notice of the server is the one that the twin predicts, and no invariant breaks."""


TestServerModel.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
