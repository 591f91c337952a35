"""Every state of a holding and of a part in a transaction, against every event: the tables are the protocol.

A cell is what the sender is told (`ok`, a reply's or an error's name, `waits`) and what the subject is afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub import messages as m
from tensorhub.server.state import HoldingState, Phase
from tests.unit.server.kit import Cluster, Process, content, root

# ---------------------------------------------------------------- holdings

HOLDINGS = ("absent", "publishing", "published", "unproven", "filling", "serving", "complete", "draining")


def holding_in(state: str) -> tuple[Cluster, Process]:
    """A cluster whose process `me` has a holding in this state in buffer set a; `trainer` has published version 1."""
    cluster = Cluster()
    trainer, me = cluster.process("trainer"), cluster.process("me")
    if state not in ("publishing", "published", "draining"):
        trainer.publish(1)
        trainer.seal(1)
    if state in ("publishing", "published", "draining", "unproven"):
        me.publish(1)
    if state in ("published", "draining"):
        me.seal(1)
    if state in ("filling", "serving", "complete"):
        me.replicate()
    if state == "serving":
        me.serve()
    if state == "complete":
        me.done(1)
        me.sequence += 1
    if state == "draining":
        cluster.process("reader").replicate()
        me.unpublish()
    return cluster, me


def shown(cluster: Cluster, me: Process) -> str:
    """The state of the holding of `me`, in the words of HOLDINGS."""
    member = cluster.machine.state.models[me.seat.model].replicas.get(me.seat.replica)
    holding = None if member is None else member.members[0].holdings.get("a")
    if holding is None:
        return "absent"
    if holding.hidden:
        return "draining"
    if not holding.proven:
        return "unproven"
    match holding.state:
        case HoldingState.PUBLISHED:
            return "publishing" if holding.root is None else "published"
        case HoldingState.FILLING:
            return "serving" if holding.serves else "filling"
        case HoldingState.COMPLETE:
            return "complete"


def serve(me: Process) -> object:
    return me.do(m.Serve(me.seat, me.generation or me.published, (), b""))


EVENTS: dict[str, Callable[[Process], object]] = {
    "publish": lambda me: me.do(_publish(me)),
    "seal": lambda me: me.do(m.Seal(me.seat, me.published or me.generation, root(1))),
    "seal other": lambda me: me.do(m.Seal(me.seat, me.published or me.generation, root(2))),
    "unpublish": lambda me: me.answer(me.unpublish()),
    "abandon": lambda me: me.answer(me.unpublish(abandon=True)),
    "serve": serve,
    "leave": lambda me: me.leave(),
}


def _publish(me: Process) -> m.Publish:
    return m.Publish(me.seat, "a", m.Version("main", 2), me.fresh(), content(2), (), b"")


#: {event: {state: (told, state afterwards)}}; what is not listed is refused as `else` and changes nothing.
HOLDING_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "publish": {
        "absent": ("Announced", "publishing"),
        "filling": ("Busy", "filling"),
        "serving": ("Busy", "serving"),
        "else": ("AlreadyPublished", ""),
    },
    "seal": {
        "absent": ("NotPublished", "absent"),
        "publishing": ("Ok", "published"),
        "published": ("Ok", "published"),
        "unproven": ("Ok", "published"),
        "draining": ("Ok", "draining"),
        "else": ("BadRequest", ""),
    },
    "seal other": {
        "absent": ("NotPublished", "absent"),
        "publishing": ("Ok", "published"),
        "unproven": ("VersionConflict", "absent"),
        "else": ("BadRequest", ""),
    },
    "unpublish": {
        "absent": ("NotPublished", "absent"),
        "filling": ("Busy", "filling"),
        "serving": ("Busy", "serving"),
        "draining": ("waits", "draining"),
        "else": ("Unpublished", "absent"),
    },
    "abandon": {
        "absent": ("NotPublished", "absent"),
        "filling": ("Busy", "filling"),
        "serving": ("Busy", "serving"),
        "else": ("Unpublished", "absent"),
    },
    "serve": {
        "filling": ("Ok", "serving"),
        "serving": ("Ok", "serving"),
        "else": ("GroupAborted", ""),
    },
    "leave": {"else": ("Ok", "absent")},
}


def told(answer: object) -> str:
    if answer is None:
        return "waits"
    return answer.error if isinstance(answer, m.Refused) else type(answer).__name__


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", HOLDINGS)
def test_holding(state: str, event: str) -> None:
    """Each event in each state of a holding does what the table says, and nothing else."""
    cluster, me = holding_in(state)
    assert shown(cluster, me) == state
    row = HOLDING_TABLE[event]
    said, after = row.get(state, row.get("else", ("", "")))
    assert told(EVENTS[event](me)) == said
    assert shown(cluster, me) == (after or state)


# ---------------------------------------------------------------- transactions

PHASES = ("none", *(phase.name for phase in Phase), "committed", "aborted", "lingering")


def part_in(phase: str) -> tuple[Cluster, Process, Process]:
    """A group of two whose shard 0 is in this phase, and its sibling; the trainer holds version 1 or 2.

    `lingering`: it was reading when its sibling ended the transaction, and has not said that it stopped.
    """
    cluster = Cluster(shards=2)
    trainers = cluster.group("trainer")
    me, sibling = cluster.group("roll")
    if phase not in ("none", "WAITING"):
        for trainer in trainers:
            trainer.publish(1)
            trainer.seal(1)
    if phase in ("HELD", "DRAINING", "committed"):
        pull(me, sibling)
    if phase == "committed":
        return cluster, me, sibling
    if phase == "DRAINING":
        reader = cluster.process("reader#0")
        trainers[0].unpublish()
        trainers[1].unpublish()
        reader.replicate(timeout_s=30)
        for trainer in trainers:
            trainer.publish(2)
            trainer.seal(2)
    if phase == "none":
        return cluster, me, sibling
    if phase == "aborted":
        me.abort("no space")
        me.sequence -= 1
        return cluster, me, sibling
    if phase in ("QUEUED", "REROUTING"):
        cluster.process("other#0").replicate(timeout_s=30)
    me.replicate(timeout_s=30)
    if phase == "REROUTING":
        cluster.wait(0.3)  # until the other is waited for no more
        me.reroute(trainers[0].published, timeout_s=30)
    if phase == "DONE":
        me.done(1)
    if phase == "lingering":
        sibling.abort("no route")
    return cluster, me, sibling


def pull(*shards: Process) -> None:
    for shard in shards:
        shard.replicate()
    for shard in shards:
        shard.done(1)
    for shard in shards:
        shard.sequence += 1


def phase_of(cluster: Cluster, me: Process) -> str:
    replica = cluster.machine.state.models[me.seat.model].replicas.get(me.seat.replica)
    if replica is None or me.seat.shard not in replica.members:
        return "gone"
    if me.seat in cluster.machine.state.sessions[me.session].lingers:
        return "lingering"
    part = replica.transaction.parts.get(0) if replica.transaction else None
    return "none" if part is None else part.phase.name


def ask(me: Process) -> object:
    generation, answer = me.generation, me.answer(me.replicate(timeout_s=30))
    me.generation = generation or me.generation
    return answer


def ask_next(me: Process) -> object:
    me.sequence += 1
    answer = ask(me)
    me.sequence -= 1
    return answer


def sibling_aborts(me: Process) -> object:
    sibling = me.cluster.processes["roll#1"]
    sibling.sequence = me.sequence
    return sibling.abort("no route")


PART_EVENTS: dict[str, Callable[[Process], object]] = {
    "replicate": ask,
    "replicate next": ask_next,
    "serve": serve,
    "reroute": lambda me: me.answer(me.reroute(me.cluster.processes["trainer#0"].published, timeout_s=30)),
    "done": lambda me: me.answer(me.done(1)),
    "done wrong": lambda me: me.answer(me.done(9)),
    "abort": lambda me: me.do(m.Abort(me.seat, me.group, me.sequence, "no space")),
    "sibling aborts": sibling_aborts,
    "leave": lambda me: me.leave(),
}

#: {event: {phase: (told, phase afterwards)}}; "" is: as before.
PART_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "replicate": {
        "none": ("waits", "WAITING"),
        "committed": ("Held", "HELD"),
        "aborted": ("GroupAborted", "none"),
        "lingering": ("GroupAborted", "lingering"),
        "else": ("GroupAborted", ""),
    },
    "replicate next": {
        "aborted": ("Granted", "READING"),
        "lingering": ("Granted", "READING"),
        "else": ("BadRequest", ""),
    },
    "serve": {
        "READING": ("Ok", "READING"),
        "REROUTING": ("Ok", "REROUTING"),
        "DONE": ("BadRequest", "DONE"),
        "else": ("GroupAborted", ""),
    },
    "reroute": {
        "READING": ("VersionUnavailable", "none"),
        "REROUTING": ("waits", "REROUTING"),
        "DONE": ("BadRequest", "DONE"),
        "else": ("GroupAborted", ""),
    },
    "done": {
        "READING": ("waits", "DONE"),
        "REROUTING": ("waits", "DONE"),
        "HELD": ("waits", "DONE"),
        "DONE": ("waits", "DONE"),
        "aborted": ("GroupAborted", "none"),
        "lingering": ("GroupAborted", "lingering"),
        "else": ("BadRequest", ""),
    },
    "done wrong": {
        "READING": ("SourceFailed", "none"),
        "REROUTING": ("SourceFailed", "none"),
        "HELD": ("waits", "DONE"),
        "DONE": ("waits", "DONE"),
        "aborted": ("GroupAborted", "none"),
        "lingering": ("GroupAborted", "lingering"),
        "else": ("BadRequest", ""),
    },
    "abort": {"else": ("Ok", "none")},
    "sibling aborts": {
        "READING": ("Ok", "lingering"),
        "lingering": ("Ok", "lingering"),
        "else": ("Ok", "none"),
    },
    "leave": {"else": ("Ok", "gone")},
}


@pytest.mark.parametrize("event", PART_EVENTS)
@pytest.mark.parametrize("phase", PHASES)
def test_part(phase: str, event: str) -> None:
    """Each event in each phase of a shard's part does what the table says, and nothing else."""
    cluster, me, _ = part_in(phase)
    before = phase_of(cluster, me)
    assert before == ("none" if phase in ("committed", "aborted") else phase)
    row = PART_TABLE[event]
    said, after = row.get(phase, row.get("else", ("", "")))
    assert told(PART_EVENTS[event](me)) == said
    assert phase_of(cluster, me) == (after or before)


def test_tables_are_whole() -> None:
    """Every event has a row that covers every state."""
    assert set(HOLDING_TABLE) == set(EVENTS)
    assert set(PART_TABLE) == set(PART_EVENTS)
    assert {phase.name for phase in Phase} < set(PHASES)
