"""Requests that no honest client sends: each is refused by name, and leaves a machine whose promises all hold."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.server import holdings
from tensorhub.server.settings import DEPTH_MAX, REASON_TEXT_MAX, SESSIONS_MAX
from tensorhub.server.state import HoldingState
from tensorhub.server.turn import Turn
from tensorhub.types import NAME_BYTES_MAX, Epoch, Generation, Location, ModelKey, ReplicaId, Seat, SessionId, Version
from tests.unit.server.kit import (
    ACTOR,
    LATEST,
    NO_EPOCH,
    OTHER_LIFE,
    Cluster,
    Process,
    claim,
    content,
    ident,
    root,
    undertaking,
)


def refusal(answer: object) -> m.Refused:
    assert isinstance(answer, m.Refused), answer
    return answer


def filling(cluster: Cluster, name: str, **what: object) -> Process:
    """A process that comes from another life of the server, in the midst of a transfer."""
    process = cluster.stranger(name)
    process.hello(OTHER_LIFE)
    process.generation = Generation(ident(name))
    process.join(standing=m.Standing(7, 0, undertaking=undertaking(process, watermark=4, **what)))
    return process


def test_the_last_seat_of_a_model_may_watch_it() -> None:
    """A process that watches, waits for, and alone sits in a model nobody published in ends: nothing is left of it."""
    cluster = Cluster()
    process = cluster.process("trainer")
    process.ask(m.Watch(ACTOR))
    process.ask(m.Wait(ACTOR, LATEST, Location(), 10**9))
    cluster.wait(60)
    assert not cluster.machine.state.models
    assert not cluster.machine.state.sessions


def test_a_generation_taken_while_its_reader_waits() -> None:
    """Whoever waits for a version under a generation that another takes meanwhile is refused; the other keeps it."""
    cluster = Cluster()
    reader, trainer = cluster.process("reader"), cluster.process("trainer")
    call = reader.replicate()
    taken = m.Publish(trainer.seat, "a", Version("main", 1), reader.generation, content(1), trainer.locators(), b"here")
    assert isinstance(trainer.do(taken), m.Announced)
    assert "in use" in refusal(reader.answer(call)).message
    assert cluster.machine.state.generations[reader.generation].member.seat == trainer.seat


def test_a_claim_below_nothing_is_not_taken() -> None:
    """A negative watermark is told to whoever claims it, and nothing of the claim is kept."""
    cluster = Cluster()
    liar = cluster.stranger("liar")
    liar.hello()
    liar.join((claim(liar, watermark=-1),))
    (notice,) = liar.notices(m.Conflicted)
    assert "watermark" in notice.reason
    assert not cluster.machine.state.generations


def test_claims_of_a_cycle_make_none() -> None:
    """Three fillings that claim to read from each other in a circle: two links are believed, the third is not."""
    cluster = Cluster()
    circle = {"a": "b", "b": "c", "c": "a"}
    for name, source in circle.items():
        filling(cluster, name, upstream=Generation(ident(source)))
    links = [holding.upstream for holding in cluster.machine.state.generations.values()]
    assert sum(source is not None for source in links) == 2


def test_claims_of_a_chain_end_at_its_limit() -> None:
    """A chain that is claimed longer than any that is granted is cut where it is too long, from either end."""
    cluster = Cluster(checks=False)
    for number in range(DEPTH_MAX):
        filling(cluster, f"upper-{number}", upstream=Generation(ident(f"upper-{number - 1}")))
        filling(cluster, f"lower-{number}", upstream=Generation(ident(f"lower-{number - 1}")))
    # Its source comes last: the chain below it is as long as the one above.
    top = cluster.machine.state.generations[Generation(ident("lower-0"))]
    assert top.height == DEPTH_MAX - 1
    filling(cluster, "joint", upstream=Generation(ident(f"upper-{DEPTH_MAX - 2}")))
    holdings.link(_turn(cluster), top, cluster.machine.state.generations[Generation(ident("joint"))])
    assert top.upstream is None
    cluster.machine.check()


def _turn(cluster: Cluster) -> Turn:
    return Turn(cluster.machine.state, cluster.settings, cluster.now_ns, "test")


def test_heights_end_on_a_cycle() -> None:
    """Were there ever a cycle, by a mistake of ours, counting heights along it ends at `DEPTH_MAX`."""
    cluster = Cluster(checks=False)
    for name in "ab":
        filling(cluster, name)
    one, other = cluster.machine.state.generations.values()
    assert {one.state, other.state} == {HoldingState.FILLING}
    turn = _turn(cluster)
    holdings.attach(turn, one, other)
    holdings.attach(turn, other, one)
    assert max(one.height, other.height) == DEPTH_MAX


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": "x" * (NAME_BYTES_MAX + 1)}, "layout"),
        ({"location": Location(("x" * (NAME_BYTES_MAX + 1),))}, "location"),
        ({"location": Location(("x",) * 1000)}, "location"),
        ({"seat": Seat(ModelKey("x" * 300, "actor"), ReplicaId("r"), 0)}, "job"),
        ({"seat": Seat(ACTOR, ReplicaId("\x00"), 0)}, "replica"),
        ({"shards": 2**40}, "shard"),
        ({"seat": Seat(ACTOR, ReplicaId("r"), -1)}, "shard"),
    ],
)
def test_absurd_joins_are_refused_by_name(change: dict[str, object], named: str) -> None:
    """Names, places and counts without bound are refused before anything is kept of them."""
    cluster = Cluster()
    process = cluster.stranger("liar")
    process.hello()
    join = m.Join(process.seat, 1, "flat", False, Location())
    assert named in refusal(process.do(replace(join, **change))).message
    assert not cluster.machine.state.models


def test_an_engine_without_bound_is_refused() -> None:
    """The name of an engine in a reference is as short as any name."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    locators = (m.Locator("x" * (NAME_BYTES_MAX + 1), b""),)
    answer = trainer.do(m.Publish(trainer.seat, "a", Version("main", 1), trainer.fresh(), content(1), locators, b""))
    assert "engine" in refusal(answer).message


def test_reasons_are_cut() -> None:
    """A reason as long as a frame is neither kept nor told to every sibling."""
    cluster = Cluster(shards=2)
    one, other = cluster.group("roll")
    call = other.replicate()
    one.abort("x" * 10**6)
    assert len(refusal(other.answer(call)).message) < 2 * REASON_TEXT_MAX


def test_another_protocol_is_refused_with_both_numbers() -> None:
    """A peer of another release learns which protocol each side speaks."""
    cluster = Cluster()
    process = cluster.stranger("late")
    answer = process.do(m.Hello(m.PROTOCOL + 1, process.session, b"", "host", 1, NO_EPOCH))
    assert {str(m.PROTOCOL), str(m.PROTOCOL + 1)} <= set(
        refusal(answer).message.replace(",", " ").replace(";", " ").split()
    )


def test_foreign_seats_and_generations_are_refused() -> None:
    """Whatever names the seat of another session, or a filling of another generation, changes nothing of either."""
    cluster = Cluster()
    trainer, reader, liar = (cluster.process(name) for name in ("trainer", "reader", "liar"))
    trainer.publish(1)
    trainer.seal(1)
    reader.replicate()
    foreign = Generation(ident("foreign"))
    for request in (
        m.Unpublish(trainer.seat, "a", trainer.published, 10**9),
        m.Leave(reader.seat),
        m.Progress(reader.seat, reader.generation, 8, 8),
        m.Done(reader.seat, reader.group, 0, reader.generation, root(1), 8),
        m.Abort(reader.seat, reader.group, 0, "mine"),
        m.Reroute(liar.seat, foreign, trainer.published, "sick", 8, 8, 10**9),
        m.Progress(liar.seat, reader.generation, 8, 8),
        m.Serve(liar.seat, reader.generation, (), b""),
        m.Done(liar.seat, liar.group, 0, reader.generation, root(1), 8),
        m.Seal(liar.seat, trainer.published, root(2)),
    ):
        refusal(liar.do(request))
    reader.serve()
    assert isinstance(reader.answer(reader.done(1)), m.Committed)


# ---------------------------------------------------------------- many


def _calls_of(step: object) -> int:
    """How many functions a step calls: its cost, the same on every machine."""
    count = 0

    def note(_frame: object, event: str, _what: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.slow
def test_ten_thousand_sessions_cost_what_the_first_ones_did() -> None:
    """The last thousand of 10 000 sessions come in as many steps as the first; each costs the server a few kilobytes,
    and all of it goes when the leases end."""
    cluster, count = Cluster(checks=False), 10_000
    assert count < SESSIONS_MAX
    first = _calls_of(lambda: _come(cluster, 0, 1000))
    tracemalloc.start()
    try:
        _come(cluster, 1000, count - 2000)
        nbytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    last = _calls_of(lambda: _come(cluster, count - 1000, 1000))
    assert len(cluster.machine.state.sessions) == count
    assert last < 1.2 * first
    assert nbytes / (count - 2000) < 8192
    cluster.wait(60)
    assert not cluster.machine.state.sessions
    assert not cluster.machine.state.models


def _come(cluster: Cluster, first: int, count: int) -> None:
    for number in range(first, first + count):
        session = SessionId(number.to_bytes(16, "big"))
        seat = Seat(ModelKey("default", "crowd"), ReplicaId(f"r{number}"), 0)
        for call, request in enumerate(
            (
                m.Hello(m.PROTOCOL, session, b"", "host", 1, Epoch(b"")),
                m.Join(seat, 1, "flat", False, Location(("dc", f"rack{number % 100}"))),
                m.Beat(session),
            ),
            1,
        ):
            cluster.machine.receive(cluster.now_ns, session, call, request)
