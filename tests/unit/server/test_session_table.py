"""Every state of a session, and of the grace of a life, against every event: the tables are the protocol.

A cell is what the sender is told, and what the subject is afterwards.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import DEFAULTS, SECOND_NS
from tests.unit.server.kit import NO_EPOCH, OTHER_LIFE, Cluster, Process

LEASE_S, GRACE_S = DEFAULTS.lease_ns / SECOND_NS, DEFAULTS.grace_ns / SECOND_NS

# ---------------------------------------------------------------- sessions

#: Of a session with a seat: never heard of, alive, without its connection, forgotten after its lease, gone by its word.
SESSIONS = ("unknown", "connected", "disconnected", "expired", "left")
EVENTS: dict[str, Callable[[Cluster, Process], object]] = {
    "hello": lambda cluster, me: me.hello(NO_EPOCH),
    "hello again": lambda cluster, me: me.hello(cluster.machine.state.epoch),
    "hello from another life": lambda cluster, me: me.hello(OTHER_LIFE),
    "beat": lambda cluster, me: me.do(m.Beat(me.session)),
    "join": lambda cluster, me: me.join(),
    "status": lambda cluster, me: me.do(m.Status(None)),
    "goodbye": lambda cluster, me: me.do(m.Goodbye()),
    "lost connection": lambda cluster, me: cluster.disconnect(me),
    "silence": lambda cluster, me: cluster.wait(LEASE_S + 1),
}
_GONE = {"unknown", "expired", "left"}
#: {event: (told and left in a session that is known, told and left in one that is not)}.
SESSION_TABLE: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "hello": (("known", "connected"), ("welcome", "connected")),
    "hello again": (("known", "connected"), ("welcome", "connected")),
    "hello from another life": (("welcome", "connected"), ("welcome", "connected")),
    "beat": (("Ok", "as it was"), ("LeaseLost", "unknown")),
    "join": (("Joined", "as it was"), ("LeaseLost", "unknown")),
    "status": (("StatusView", "as it was"), ("LeaseLost", "unknown")),
    "goodbye": (("Ok", "unknown"), ("LeaseLost", "unknown")),
    "lost connection": (("None", "disconnected"), ("None", "unknown")),
    "silence": (("None", "unknown"), ("None", "unknown")),
}


def told(answer: object) -> str:
    match answer:
        case m.Welcome(known=known):
            return "known" if known else "welcome"
        case m.Refused(error):
            return error
        case _:
            return type(answer).__name__.removesuffix("Type")


def session_of(cluster: Cluster, me: Process) -> str:
    session = cluster.machine.state.sessions.get(me.session)
    return "unknown" if session is None else "connected" if session.connected else "disconnected"


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", SESSIONS)
def test_session(state: str, event: str) -> None:
    """What a session is told, and whether it is known afterwards; who is gone has left nothing."""
    cluster = Cluster()
    me = cluster.stranger("me")
    if state != "unknown":
        me = cluster.process("me")
        me.publish(1)
    match state:
        case "disconnected":
            cluster.disconnect(me)
        case "expired":
            cluster.wait(LEASE_S + 1)
        case "left":
            me.do(m.Goodbye())
    before = session_of(cluster, me)
    answer, after = SESSION_TABLE[event][state in _GONE]
    assert told(EVENTS[event](cluster, me)) == answer
    assert session_of(cluster, me) == (before if after == "as it was" else after)
    if session_of(cluster, me) == "unknown" or event == "hello from another life":
        assert not cluster.machine.state.generations


# ---------------------------------------------------------------- the grace

GRACES = ("NONE", "OPEN", "OVER")
GRACE_TABLE: dict[str, dict[str, str]] = {
    "hello of a stranger": {"NONE": "NONE", "OPEN": "OPEN", "OVER": "OVER"},
    "hello of this life": {"NONE": "NONE", "OPEN": "OPEN", "OVER": "OVER"},
    "hello from another life": {"NONE": "OPEN", "OPEN": "OPEN", "OVER": "OVER"},
    "half of the grace": {"NONE": "NONE", "OPEN": "OPEN", "OVER": "OVER"},
    "the grace": {"NONE": "NONE", "OPEN": "OVER", "OVER": "OVER"},
}


@pytest.mark.parametrize("event", GRACE_TABLE)
@pytest.mark.parametrize("state", GRACES)
def test_grace(state: str, event: str) -> None:
    """A life waits once, from the first session of another life on, and for its time."""
    cluster = Cluster()
    me, first = cluster.stranger("me"), cluster.stranger("first")
    if state != "NONE":
        first.hello(OTHER_LIFE)
    if state == "OVER":
        cluster.wait(GRACE_S)
    match event:
        case "hello of a stranger":
            me.hello(NO_EPOCH)
        case "hello of this life":
            me.hello(cluster.machine.state.epoch)
        case "hello from another life":
            me.hello(OTHER_LIFE)
        case "half of the grace":
            cluster.wait(GRACE_S / 2)
        case "the grace":
            cluster.wait(GRACE_S)
    assert cluster.machine.state.grace.name == GRACE_TABLE[event][state]
    assert (("grace",) in cluster.machine.state.deadlines.at) == (GRACE_TABLE[event][state] == "OPEN")
