"""How the graph grows: who reads from whom when readers come at once, late, from several racks or data centres.

A shape is told by the depth of the deepest reader, the readers of the busiest source, and who reads from the publisher.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

import tensorhub.server
from tensorhub import messages as m
from tensorhub.errors import BadRequest
from tensorhub.server.settings import DEFAULTS, DEPTH_MAX, READERS_PER_SOURCE_MAX, SECOND_NS, Settings
from tests.unit.server.kit import LATEST, Cluster, Process, content

FOLDER = str(next(iter(tensorhub.server.__path__)))


class Crowd:
    """Readers of version 1 that ask, serve as soon as they are granted, and remember from whom."""

    def __init__(
        self, trainers: dict[str, str], settings: Settings = DEFAULTS, *, checks: bool = True, shown: bool = False
    ) -> None:
        self.shown = content(1) if shown else None
        self.cluster = Cluster(settings, checks=checks)
        self.sources: dict[str, str] = {}
        self.waiting: dict[str, int] = {}
        self.served: set[str] = set()
        for name, place in trainers.items():
            trainer = self.cluster.process(name, location=place)
            trainer.publish(1)
            trainer.seal(1)

    def ask(self, name: str, place: str = "", timeout_s: float = 60) -> Process:
        reader = self.cluster.process(name, location=place)
        self.waiting[name] = reader.replicate(timeout_s=timeout_s, shown=self.shown)
        self.take(name)
        return reader

    def take(self, name: str) -> bool:
        """Whether its grant has come."""
        answer = self.cluster.processes[name].answer(self.waiting[name])
        if not isinstance(answer, m.Granted):
            return False
        del self.waiting[name]
        self.sources[name] = str(answer.source.seat.replica)
        return True

    def serve(self) -> None:
        """Everybody who has a grant serves, and whoever gets one by that, until all wait for others."""
        while todo := [name for name in self.sources if name not in self.served]:
            for name in todo:
                self.served.add(name)
                if self.shown is None:
                    self.cluster.processes[name].serve()
            for name in list(self.waiting):
                self.take(name)

    def done(self, name: str) -> None:
        reader = self.cluster.processes[name]
        assert isinstance(reader.answer(reader.done(1)), m.Committed)

    @property
    def fan_out(self) -> int:
        return max(Counter(self.sources.values()).values())

    @property
    def depth(self) -> int:
        return max(self.depth_of(name) for name in self.sources)

    def depth_of(self, name: str) -> int:
        hops = 0
        while (source := self.sources.get(name)) is not None:
            name, hops = source, hops + 1
        return hops

    def rack_of(self, name: str) -> str:
        return "/".join(self.cluster.processes[name].location.parts[:2])

    def host_of(self, name: str) -> str:
        return "/".join(self.cluster.processes[name].location.parts)

    def centre_of(self, name: str) -> str:
        return self.cluster.processes[name].location.parts[0]


def test_a_crowd_becomes_a_chain() -> None:
    """All that ask at once form one chain: nobody shares an uplink."""
    crowd = Crowd({"trainer": ""})
    for number in range(16):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    assert (len(crowd.sources), crowd.depth, crowd.fan_out) == (16, 16, 1)


def test_readers_that_come_one_by_one_become_a_chain() -> None:
    """So do those that come one after the other, each while the ones before still read."""
    crowd = Crowd({"trainer": ""})
    for number in range(16):
        crowd.ask(f"roll-{number}")
        crowd.serve()
    assert (crowd.depth, crowd.fan_out) == (16, 1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("one_by_one", [True, False], ids=["one by one", "at once"])
@pytest.mark.parametrize("shown", [True, False], ids=["shown with the request", "shown later"])
def test_a_version_crosses_to_a_host_once(seed: int, one_by_one: bool, shown: bool) -> None:
    """Workers of some hosts ask in any order: one of each host reads from another host, and every host is read by one
    other at most, so that no uplink is shared."""
    places = [f"dc/r{number % 2}/h{number % 5}" for number in range(20)]
    random.Random(seed).shuffle(places)
    crowd = Crowd({"trainer": "dc/r0/trainer"}, shown=shown)
    for number, place in enumerate(places):
        crowd.ask(f"roll-{number}", place)
        if one_by_one:
            crowd.serve()
    crowd.serve()
    assert len(crowd.sources) == len(places)
    crossings = [
        (crowd.host_of(source), crowd.host_of(reader))
        for reader, source in crowd.sources.items()
        if crowd.host_of(source) != crowd.host_of(reader)
    ]
    assert sorted(into for _, into in crossings) == sorted(set(places))
    assert max(Counter(out for out, _ in crossings).values()) == 1


def test_a_host_that_is_full_is_left() -> None:
    """A source has a bounded number of readers, also on its own host; those who come after read from these."""
    crowd = Crowd({"trainer": "dc/r/h"})
    for number in range(3 * READERS_PER_SOURCE_MAX):
        crowd.ask(f"roll-{number}", "dc/r/h")
    crowd.serve()
    assert crowd.fan_out == READERS_PER_SOURCE_MAX
    assert len(crowd.sources) == 3 * READERS_PER_SOURCE_MAX


def test_several_publishers_head_a_chain_each() -> None:
    """Four trainers that published the same version share the readers: four chains of four."""
    crowd = Crowd({f"trainer-{number}": "" for number in range(4)})
    for number in range(16):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    assert (crowd.depth, crowd.fan_out) == (4, 1)


def test_late_joiners_lengthen_the_chain() -> None:
    """Who joins while the others are half done reads from the end of the chain, not from the trainer."""
    crowd = Crowd({"trainer": ""})
    for number in range(3):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    for number in range(3):
        crowd.cluster.processes[f"roll-{number}"].progress(4)
    crowd.ask("late-0")
    crowd.serve()
    crowd.ask("late-1")
    assert (crowd.sources["late-0"], crowd.sources["late-1"]) == ("roll-2", "late-0")


def test_joiners_after_the_end_spread_over_the_replicas() -> None:
    """When all are done each of them is idle: who joins then gets one for itself, and the trainer comes last."""
    crowd = Crowd({"trainer": ""})
    for number in range(3):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    for number in range(3):
        crowd.done(f"roll-{number}")
    for number in range(4):
        crowd.ask(f"late-{number}")
    assert [crowd.sources[f"late-{number}"] for number in range(4)] == ["roll-0", "roll-1", "roll-2", "trainer"]


def test_an_idle_source_in_the_own_rack_comes_first() -> None:
    """Of several idle sources a reader gets the one in its own rack, though others are older."""
    crowd = Crowd({"trainer": "dc/r1/h0"})
    for rack in ("r1", "r2", "r3"):
        crowd.ask(f"first-{rack}", f"dc/{rack}/h1")
        crowd.serve()
        crowd.done(f"first-{rack}")
    for rack in ("r3", "r2"):
        crowd.ask(f"late-{rack}", f"dc/{rack}/h2")
        assert crowd.sources[f"late-{rack}"] == f"first-{rack}"


def test_a_chain_runs_through_one_rack_after_the_other() -> None:
    """Readers of three racks that ask at once in any order: the chain enters each rack once."""
    crowd = Crowd({"trainer": "dc/r1/t"})
    for number in range(12):
        crowd.ask(f"roll-{number}", f"dc/r{1 + number % 3}/h{number}")
    crowd.serve()
    assert (crowd.depth, crowd.fan_out) == (12, 1)
    entering = [name for name, source in crowd.sources.items() if crowd.rack_of(name) != crowd.rack_of(source)]
    assert sorted(crowd.rack_of(name) for name in entering) == ["dc/r2", "dc/r3"]


def test_a_chain_runs_through_racks_when_all_wait_for_the_version() -> None:
    """The same when they asked before it was published, and say beforehand how they will be shown: the whole chain is
    made in the step that publishes."""
    cluster = Cluster()
    trainer = cluster.process("trainer", location="dc/r1/h0")
    readers = [cluster.process(f"roll-{number}", location=f"dc/r{number % 3}/h{number}") for number in range(12)]
    for reader in readers:
        reader.generation = reader.fresh()
        cluster.send(
            reader.session,
            m.Replicate(
                reader.seat, "a", reader.group, 0, LATEST, SECOND_NS, reader.generation, manifest=content(1).manifest
            ),
        )
    trainer.publish(1)
    chain = [cluster.machine.state.generations[trainer.published]]
    while chain[-1].readers:
        (following,) = chain[-1].readers.values()
        chain.append(following)
    racks = ["/".join(holding.member.location.parts[:2]) for holding in chain[1:]]
    assert racks == [f"dc/r{rack}" for rack in range(3) for _ in range(4)]


def test_one_seed_crosses_to_another_data_centre() -> None:
    """Readers of another data centre that ask at once: one of them crosses, the others wait for it and chain behind."""
    crowd = Crowd({"trainer": "dc1/r1/h0"})
    for number in range(4):
        crowd.ask(f"far-{number}", f"dc2/r1/h{number}")
        crowd.ask(f"near-{number}", f"dc1/r1/h{number}")
    crowd.serve()
    crossing = [name for name, source in crowd.sources.items() if crowd.centre_of(name) != crowd.centre_of(source)]
    assert len(crossing) == 1
    assert len(crowd.sources) == 8


def test_a_seed_is_waited_for_longer() -> None:
    """A plan over a long link takes longer than one nearby: nobody else crosses before `far_patience_ns`."""
    crowd = Crowd({"trainer": "dc1/r1/h0"})
    crowd.ask("seed", "dc2/r1/h0")
    crowd.ask("second", "dc2/r1/h1")
    crowd.cluster.wait(1)
    assert not crowd.take("second")
    crowd.serve()
    assert crowd.sources["second"] == "seed"


def test_a_source_is_shared_as_far_down_as_can_be() -> None:
    """Who must share a source shares one with few below it: all of those get half from then on."""
    crowd = Crowd({"trainer": ""})
    for number in range(4):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    subset = crowd.cluster.process("subset")
    subset.replicate(serves=False)  # takes the end of the chain, and offers none
    crowd.ask("late")
    assert crowd.sources["late"] == "roll-3"


@pytest.mark.slow
def test_chains_are_bounded() -> None:
    """A chain has at most DEPTH_MAX hops; who comes then shares a source higher up, and begins another chain."""
    crowd = Crowd({"trainer": ""}, checks=False)
    for number in range(DEPTH_MAX + 2):
        crowd.ask(f"roll-{number}")
        crowd.serve()
    crowd.cluster.machine.check()
    assert crowd.depth == DEPTH_MAX
    assert crowd.depth_of(f"roll-{DEPTH_MAX}") < DEPTH_MAX
    assert crowd.sources[f"roll-{DEPTH_MAX + 1}"] == f"roll-{DEPTH_MAX}"


def test_a_chain_mends_without_a_cycle() -> None:
    """Whoever dies in mid-chain, the reader behind goes on from the one before; what reads behind it stays there."""
    crowd = Crowd({"trainer": ""})
    for number in range(5):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    readers = [crowd.cluster.processes[f"roll-{number}"] for number in range(5)]
    for number, reader in enumerate(readers):
        reader.progress(6 - number)
    readers[2].leave()
    answer = readers[3].answer(readers[3].reroute(readers[2].generation, 3))
    assert isinstance(answer, m.Granted)
    assert answer.source.seat.replica == "roll-1"


def test_complete_sources_only() -> None:
    """With `sources="complete"` nobody reads from a reader before its commit; then each is a source of its own."""
    crowd = Crowd({"trainer": ""}, replace(DEFAULTS, sources="complete"))
    for number in range(6):
        crowd.ask(f"roll-{number}")
    crowd.serve()
    assert set(crowd.sources.values()) == {"trainer"}
    assert sorted(crowd.waiting) == ["roll-4", "roll-5"]
    crowd.done("roll-0")
    assert crowd.take("roll-4")
    assert crowd.sources["roll-4"] == "roll-0"


def test_settings_are_checked() -> None:
    """A word that a server does not know, or a negative patience, is refused with what would do."""
    with pytest.raises(BadRequest, match="'complete'"):
        Settings(sources="partial")
    with pytest.raises(BadRequest, match="negative"):
        Settings(patience_ns=-1)


# ---------------------------------------------------------------- work


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Lines of the server that are executed meanwhile: work, whatever the machine is busy with."""
    lines: Counter[str] = Counter()

    def in_function(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        lines[event] += 1
        return in_function

    def on_call(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return in_function if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(before)


#: Lines that one reader costs from its join to its place in the chain, and for each hop above it; about half as many
#: are needed.
LINES_PER_READER, LINES_PER_HOP = 1500, 20


@pytest.mark.slow
def test_hundreds_at_once_are_cheap() -> None:
    """Readers in line for the next source are not looked at one by one whenever one comes: a reader costs a constant,
    and some lines for each hop above it."""
    readers = 300
    crowd = Crowd({"trainer": ""}, checks=False)
    with counted() as lines:
        for number in range(readers):
            crowd.ask(f"roll-{number}")
        crowd.serve()
    assert crowd.depth_of(f"roll-{DEPTH_MAX - 1}") == DEPTH_MAX
    assert lines["line"] < readers * LINES_PER_READER + readers**2 // 2 * LINES_PER_HOP
