"""A slow reader holds nobody up: who is told to leave whom, how soon, and what happens when others go meanwhile.

Bytes flow here in steps of 0.2 s, the time between two reports: each reader gets what its rate allows, and no more than
its source has. Readers do what they are asked to: they stop, say `Reroute`, and go on from what they are given.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import DEFAULTS, LEAD_CHUNKS, MOVES_MAX, SECOND_NS, SLOW_SHARE
from tensorhub.server.state import Holding
from tensorhub.types import AtLeast, Generation
from tests.unit.server.kit import ACTOR, Cluster, Process, content, root

STEP_S = 0.2
CHUNKS = 800
#: Chunks per step of a healthy host, and of one at a quarter of the rate.
FAST, SLOW = 40, 10


@dataclass
class Flow:
    """A cluster whose readers make progress."""

    cluster: Cluster = field(default_factory=Cluster)
    number: int = 1
    rates: dict[str, int] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    #: Readers that have stopped and wait for another source, with their calls.
    stopped: dict[str, int] = field(default_factory=dict)
    #: Notices that have been obeyed.
    heard: int = 0

    def publish(self, *names: str) -> None:
        for name in names:
            trainer = self.cluster.processes.get(name) or self.cluster.process(name)
            trainer.publish(self.number, what=content(self.number, chunks=CHUNKS))
            trainer.seal(self.number)

    def join(self, **rates: int) -> None:
        """Readers ask one after the other, and serve."""
        for name, rate in rates.items():
            reader = self.cluster.processes.get(name) or self.cluster.process(name)
            assert isinstance(reader.answer(reader.replicate(timeout_s=60)), m.Granted), name
            reader.serve()
            self.rates[name], self.marks[name] = rate, 0

    def holding(self, name: str) -> Holding:
        return self.cluster.machine.state.generations[self.cluster.processes[name].generation]

    def source(self, name: str) -> str:
        upstream = self.holding(name).upstream
        return "" if upstream is None else str(upstream.member.seat.replica)

    def step(self, steps: int = 1, obey: bool = True) -> None:
        for _ in range(steps):
            self.cluster.wait(STEP_S)
            for process in self.cluster.processes.values():
                process.do(m.Beat(process.session))
            for name in list(self.rates):
                if name in self.rates and name not in self.stopped:
                    source = self.marks.get(self.source(name), CHUNKS)
                    self.marks[name] = max(self.marks[name], min(source, self.marks[name] + self.rates[name]))
                    self.cluster.processes[name].progress(self.marks[name])
                    if self.marks[name] == CHUNKS:
                        self.done(name)
            if obey:
                self.obey()

    def done(self, name: str) -> None:
        reader = self.cluster.processes[name]
        assert isinstance(reader.answer(reader.done(self.number)), m.Committed)
        reader.sequence += 1
        del self.rates[name]

    def asked(self) -> list[str]:
        """Who has been told to leave its source, and has not heard of it yet."""
        lost = [out.message for out in self.cluster.log[self.heard :] if isinstance(out.message, m.SourceLost)]
        return [str(notice.seat.replica) for notice in lost]

    def obey(self, *order: str) -> None:
        """Those that were asked stop and reroute; in this order, if it matters."""
        told = {
            str(out.message.seat.replica): out.message
            for out in self.cluster.log[self.heard :]
            if isinstance(out.message, m.SourceLost)
        }
        self.heard = len(self.cluster.log)
        for name in order or tuple(told):
            if name in self.rates:
                self.reroute(name, told[name].source)
        self.take()

    def reroute(self, name: str, source: Generation) -> None:
        self.stopped[name] = self.cluster.processes[name].reroute(source, self.marks[name], timeout_s=30)

    def take(self) -> None:
        for name, call in list(self.stopped.items()):
            answer = self.cluster.processes[name].answer(call)
            if answer is not None:
                assert isinstance(answer, m.Granted), answer
                del self.stopped[name]

    def run(self, steps: int = 200) -> int:
        """Until all are done; how many steps that took."""
        for number in range(steps):
            if not self.rates:
                return number
            self.step()
            self.take()
        raise AssertionError(f"not done: {self.marks}")


def chain(**rates: int) -> Flow:
    """A trainer and a chain of readers."""
    flow = Flow()
    flow.publish("trainer")
    flow.join(**rates)
    return flow


def test_a_straggler_in_mid_chain_is_passed_by() -> None:
    """Within two reports its reader and it are asked to go: the reader to its source, it to the end of the chain."""
    flow = chain(a=FAST, x=SLOW, b=FAST, c=FAST)
    flow.step(2, obey=False)
    assert sorted(flow.asked()) == ["b", "x"]
    flow.obey()
    assert flow.source("b") == "a"
    flow.step(3)
    flow.take()
    assert (flow.source("x"), flow.source("c")) == ("c", "b")


def test_the_others_finish_as_if_it_were_not_there() -> None:
    """All but the straggler are done within a few steps of the time without it."""
    flow = chain(a=FAST, x=SLOW, b=FAST, c=FAST, d=FAST)
    undisturbed = CHUNKS // FAST
    for _ in range(undisturbed + 4):
        flow.step()
        flow.take()
    assert set(flow.rates) == {"x"}


@pytest.mark.parametrize("order", [("x", "b"), ("b", "x")])
def test_both_orders_of_leaving(order: tuple[str, str]) -> None:
    """Whether the straggler or its reader is heard first, both get a source and nobody waits for ever."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.step(2, obey=False)
    flow.obey(*order)
    assert flow.source("b") == "a"
    flow.run()


def test_behind_the_trainer_it_is_measured_by_what_others_did() -> None:
    """The first reader of the trainer has nobody ahead of it: it is compared with earlier fillings of the shard."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.run()
    for name in ("a", "x", "b"):
        flow.cluster.processes[name].do(
            m.Unpublish(flow.cluster.processes[name].seat, "a", flow.cluster.processes[name].held("a"), SECOND_NS)
        )
    for name in ("a", "b"):
        flow.cluster.processes[name].leave()
    flow.cluster.processes["trainer"].unpublish()
    flow.number = 2
    flow.publish("trainer")
    flow.cluster.machine.state.models[ACTOR].replicas["x"].members[0].slow = ""  # its mark is not what is tested here
    flow.cluster.process("late")
    flow.join(x=SLOW, late=FAST)
    assert (flow.source("x"), flow.source("late")) == ("trainer", "x")
    flow.step(3, obey=False)
    assert sorted(flow.asked()) == ["late", "x"]
    flow.obey()
    assert flow.source("late") == "trainer"
    flow.run()


def test_who_was_slow_is_placed_last() -> None:
    """In the next version a marked replica waits behind the others, though it asked first, and nobody reads from it."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.run()
    flow.cluster.processes["trainer"].unpublish()
    flow.number = 2
    calls = {name: flow.cluster.processes[name].replicate(AtLeast(2), 60) for name in ("x", "a", "b")}
    flow.publish("trainer")
    for _ in calls:
        for name, call in calls.items():
            if isinstance(flow.cluster.processes[name].answer(call), m.Granted):
                flow.cluster.processes[name].serve()
    assert [flow.source(name) for name in ("a", "b", "x")] == ["trainer", "a", "b"]
    late = flow.cluster.process("late")
    answer = late.answer(late.replicate())
    assert isinstance(answer, m.Granted)
    assert answer.source.seat.replica == "b"


def test_the_mark_goes_with_a_filling_as_fast_as_usual() -> None:
    """A host that is well again is an ordinary source from the end of its first ordinary filling on."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.run()
    member = flow.holding("x").member
    assert member.slow
    flow.cluster.processes["trainer"].unpublish()
    flow.number = 2
    flow.publish("trainer")
    flow.join(x=FAST)
    flow.run()
    assert not member.slow


def test_noise_moves_nobody() -> None:
    """A source that is faster than its reader by less than twice, or ahead by little, or a reader that nobody reads
    from, is left as it is."""
    flow = chain(a=FAST, x=FAST * 2 // 3, b=FAST, y=SLOW)
    flow.step(6)
    assert not flow.asked()
    small = chain(a=LEAD_CHUNKS - 1, x=1, b=1)
    small.step()
    assert not small.asked()


def test_a_shared_uplink_is_no_straggler() -> None:
    """Two readers of one source get half of its rate each: neither of them is slow for that."""
    flow = chain(a=FAST)
    for name in ("x", "y"):
        flow.cluster.process(name).replicate()
        flow.cluster.wait(DEFAULTS.patience_ns / SECOND_NS)
    # y waited for x in vain, and shares its source.
    assert (flow.source("x"), flow.source("y")) == ("a", "a")
    flow.cluster.processes["x"].serve()
    flow.rates |= {"x": FAST // 2, "y": FAST // 2}
    flow.marks |= {"x": 0, "y": 0}
    flow.join(b=FAST)
    flow.step(4)
    assert not flow.asked()


def test_it_is_no_report_against_the_source() -> None:
    """Who leaves because it was asked to leaves no doubt about its source: no report, no quarantine, no suspicion."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.step(2)
    for name in ("a", "x"):
        assert not flow.holding(name).reports
    transactions = [flow.holding(name).member.replica.transaction for name in ("b", "x")]
    assert not any(part.suspects for each in transactions if each for part in each.parts.values())


def test_the_reason_is_told() -> None:
    """An event names the straggler and the two rates, and both grants say why the reader was moved."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    watcher = flow.cluster.process("watcher")
    watcher.ask(m.Watch(ACTOR))
    flow.step(2, obey=False)
    flow.obey("x")
    status = watcher.do(m.Status(ACTOR))
    assert isinstance(status, m.StatusView)
    assert any("makes room for those behind it" in row.what for row in status.waiting)
    flow.reroute("b", flow.cluster.processes["x"].generation)
    flow.take()
    events = [out.message for out in flow.cluster.log if isinstance(out.message, m.Event)]
    (slow,) = [event for event in events if event.kind == "slow"]
    assert slow.replica == "x"
    assert slow.detail == "slower than its source: 3.3 MB/s to 13.1 MB/s of a#0"
    moved = {event.replica: event.detail for event in events if event.kind == "rerouted"}
    assert "x#0 is slower than its source" in moved["b"]
    assert "it makes room for those behind it" in moved["x"]


# ---------------------------------------------------------------- what happens meanwhile


def test_it_goes_on_where_it_was_when_there_is_no_other_place() -> None:
    """When no end of a chain is ahead of the straggler in time it gets its old source again."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.step(2, obey=False)
    flow.obey("x")
    assert flow.source("x") == "a"
    flow.cluster.processes["b"].abort("gone")
    del flow.rates["b"]
    flow.cluster.wait(DEFAULTS.slow_patience_ns / SECOND_NS)
    flow.take()
    assert not flow.stopped
    assert flow.source("x") in ("a", "trainer")
    flow.run()


def test_who_does_not_obey_is_counted_again() -> None:
    """For as long as an answer may take nothing is placed upon who was asked; then it counts as a reader as before."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.step(2, obey=False)
    flow.cluster.wait((DEFAULTS.slow_patience_ns - 1) / SECOND_NS)
    assert flow.holding("b").asked
    assert flow.holding("x").load == 0
    flow.cluster.wait(1 / SECOND_NS)
    assert not flow.holding("b").asked
    assert flow.holding("x").load > 0
    assert flow.source("b") == "x"


def events(flow: Flow, watcher: Process, kind: str) -> list[str]:
    """Of whom such events have told."""
    told = [out.message for out in flow.cluster.log if out.to == watcher.session and isinstance(out.message, m.Event)]
    return [event.replica for event in told if event.kind == kind]


def test_who_never_obeys_is_asked_a_few_times() -> None:
    """A notice that nobody acts on is repeated, each time with an event, and a bounded number of times."""
    crowd = {f"r{number:02}": FAST // 4 for number in range(2 * SLOW_SHARE)}
    flow = Flow(Cluster(checks=False))
    flow.publish("trainer")
    flow.join(a=FAST // 4, x=SLOW // 4, b=FAST // 4, **crowd)
    watcher = flow.cluster.process("watcher")
    watcher.ask(m.Watch(ACTOR))
    flow.step(50, obey=False)
    assert [flow.asked().count(name) for name in ("x", "b")] == [MOVES_MAX] * 2
    assert events(flow, watcher, "slow") == ["x"] * MOVES_MAX
    assert flow.source("b") == "x"


@pytest.mark.parametrize("who", ["x", "b"])
def test_who_was_asked_often_enough_is_left_alone(who: str) -> None:
    """The straggler holds its readers up then, and nobody is told; a reader stays behind it, which goes alone."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    watcher = flow.cluster.process("watcher")
    watcher.ask(m.Watch(ACTOR))
    flow.holding(who).moves = MOVES_MAX
    flow.step(4, obey=False)
    assert flow.asked() == ([] if who == "x" else ["x"])
    assert events(flow, watcher, "slow") == ([] if who == "x" else ["x"])


def test_where_many_are_slow_it_is_no_exception() -> None:
    """One in eight may be set aside, and one of a few: while it fills the next slow one keeps its place."""
    flow = chain(a=FAST, x=SLOW, b=FAST, y=SLOW, c=FAST)
    asked: set[str] = set()
    for _ in range(10):
        flow.step(obey=False)
        asked |= set(flow.asked())
        flow.obey()
        flow.take()
    assert asked == {"x", "b"}
    assert (flow.source("y"), flow.source("c")) == ("b", "y")


@pytest.mark.parametrize("who", ["x", "a", "b"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_of_them_dies_meanwhile(who: str, when: str) -> None:
    """The straggler, its source or its reader dies before the others have left, or while they wait for a new source:
    the survivors all finish."""
    flow = chain(a=FAST, x=SLOW, b=FAST, c=FAST)
    flow.step(2, obey=False)
    if when == "after":
        flow.obey()
    flow.cluster.processes[who].leave()
    flow.rates.pop(who)
    flow.stopped.pop(who, None)
    flow.run()


@pytest.mark.parametrize("order", [("x", "b"), ("b", "x")])
def test_the_source_is_unpublished_meanwhile(order: tuple[str, str]) -> None:
    """The only complete source hides while its straggling reader makes room: it keeps its place there, all finish, and
    the unpublish ends."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.run()
    flow.cluster.processes["trainer"].unpublish()
    for name in ("a", "b", "x"):
        flow.cluster.processes[name].leave()
    flow.number = 2
    flow.publish("trainer")
    for name in ("s", "r"):
        flow.cluster.process(name)
    flow.join(s=SLOW, r=FAST)
    flow.step(3, obey=False)
    assert sorted(flow.asked()) == ["r", "s"]
    call = flow.cluster.processes["trainer"].unpublish(60)
    flow.obey(*({"x": "s", "b": "r"}[name] for name in order))
    flow.run()
    assert isinstance(flow.cluster.processes["trainer"].answer(call), m.Unpublished)


def test_the_group_aborts_meanwhile() -> None:
    """A straggler's group ends while it waits at its old source: that one is drained once the shard has said so."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.step(2, obey=False)
    flow.obey("x")  # before those behind it have left it: there is nobody yet whom it could follow
    reader = flow.cluster.processes["x"]
    assert flow.stopped
    reader.abort("no space")
    refused = reader.answer(flow.stopped.pop("x"))
    assert isinstance(refused, m.Refused)
    del flow.rates["x"]
    flow.run()


def test_it_is_done_meanwhile() -> None:
    """A reader that was asked to leave is complete before it hears of it: nothing is left to leave."""
    flow = chain(a=FAST, x=SLOW, b=FAST)
    flow.step(2, obey=False)
    reader = flow.cluster.processes["b"]
    assert isinstance(reader.answer(reader.done(1, root(1))), m.Committed)
    del flow.rates["b"]
    flow.marks["b"] = CHUNKS
    flow.run()


# ---------------------------------------------------------------- starvation


def test_a_starving_source_is_not_blamed() -> None:
    """When a source in mid-chain stops, those below it starve: only the one that reads from it makes it suspect."""
    flow = chain(a=FAST, b=FAST, c=FAST, d=FAST)
    flow.step(2)
    for reader, source in (("b", "a"), ("c", "b"), ("d", "c")):
        flow.cluster.processes[reader].reroute(flow.cluster.processes[source].generation, flow.marks[reader])
    assert [bool(flow.holding(name).reports) for name in ("a", "b", "c")] == [True, False, False]


def test_a_dead_source_that_starved_is_not_given_again_and_again() -> None:
    """source_killed: "a" and "b" die together, "b" having told of "a". "c" may be sent to "b" once more, as it starved,
    and is then sent elsewhere."""
    flow = chain(a=FAST, b=FAST, c=FAST)
    flow.step(2)
    processes = flow.cluster.processes
    processes["b"].reroute(processes["a"].generation, flow.marks["b"])
    lost = processes["b"].generation
    for _ in range(2):
        call = processes["c"].reroute(lost, flow.marks["c"])
        flow.cluster.wait(DEFAULTS.patience_ns / SECOND_NS)
        granted = processes["c"].answer(call)
    assert isinstance(granted, m.Granted)
    assert granted.source.generation != lost
    assert flow.holding("b").reports


# ---------------------------------------------------------------- any history


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_everybody_finishes_whatever_happens(seed: int) -> None:
    """Hosts of all rates, some of which change, readers that come late, leave, or act late on what they are told: no
    invariant breaks, nobody is failed while the trainer lives, and all are done in bounded time."""
    rng = random.Random(seed)
    flow = Flow()
    flow.publish("trainer")
    names = iter([f"roll-{number}" for number in range(12)])
    for _ in range(60):
        if rng.random() < 0.4 and (name := next(names, None)) is not None:
            call = flow.cluster.process(name).replicate(timeout_s=60)
            while flow.cluster.processes[name].answer(call) is None:
                flow.step()
            flow.cluster.processes[name].serve()
            flow.rates[name], flow.marks[name] = rng.choice([FAST, FAST, FAST // 2, SLOW]), 0
        if flow.rates and rng.random() < 0.1:
            flow.rates[rng.choice(sorted(flow.rates))] = rng.choice([FAST, SLOW, 1])
        if len(flow.rates) > 2 and rng.random() < 0.05:
            gone = rng.choice(sorted(flow.rates))
            flow.cluster.processes[gone].leave()
            del flow.rates[gone]
            flow.stopped.pop(gone, None)
        flow.step(obey=rng.random() < 0.7)
        flow.take()
    flow.rates = dict.fromkeys(flow.rates, FAST)
    flow.run()
    assert all(holding.moves <= MOVES_MAX for holding in flow.cluster.machine.state.generations.values())
