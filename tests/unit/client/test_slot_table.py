"""Every state of a buffer set against every call of its hub: the table is the contract of `client/slot.py`.

A cell is how the call ends (`ok`, or the name of its error) and what the buffer set is then. The states are brought
about by real calls, in a world of a trainer and two readers on virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tensorhub.client.slot import State
from tensorhub.types import Latest, Location, ReplicaId, Seat
from tests.leaks.operations import CALL_S, READER, RELAY, Stage
from tests.leaks.run import LAYOUT, MODEL
from tests.sim.memory import Meddling, Rule
from tests.sim.process import BUFFERS, Place, Process
from tests.sim.strands import run_stranded
from tests.sim.world import World

STATES = ("empty", "publishing", "published", "hidden", "filling", "complete", "torn", "suspended", "closed")
#: The trainer's version, the one that the subject publishes, and the one that it tries to publish.
OTHERS, MINE, NEXT = 1, 5, 6
SHORT_S = 0.3

CALLS: dict[str, Callable[[Process], Awaitable[object]]] = {
    "publish": lambda me: me.publish(NEXT, "now", CALL_S),
    "unpublish": lambda me: me.unpublish(SHORT_S, abandon=False),
    "abandon": lambda me: me.unpublish(SHORT_S, abandon=True),
    "replicate": lambda me: me.replicate(Latest(), CALL_S, None),
    "register": lambda me: _at_once(lambda: me.member.register(me.buffers)),
    "suspend": lambda me: me.member.suspend(SHORT_S),
    "resume": lambda me: _at_once(lambda: me.member.resume([me.buffers])),
    "close": lambda me: me.member.close(CALL_S),
}

#: Nobody may do anything to these, but close the hub.
_BUSY = {"publishing": ("Busy", "publishing"), "filling": ("Busy", "filling"), "closed": ("Closed", "closed")}
_SLEEPS = {"suspended": ("UsageError", "suspended")}
_SHOWN = {state: ("AlreadyPublished", state) for state in ("published", "hidden", "complete")}
_TAKEN_BACK = {"published": ("ok", "empty"), "complete": ("ok", "empty")}
#: {call: {state: (how it ends, what the buffer set is then)}}; every other state is in "else".
TABLE: dict[str, dict[str, tuple[str, str]]] = {
    "publish": _BUSY | _SLEEPS | _SHOWN | {"else": ("ok", "published")},
    "unpublish": _BUSY
    | _SLEEPS
    | _TAKEN_BACK
    | {"hidden": ("DrainTimeout", "hidden"), "empty": ("NotPublished", "empty"), "torn": ("NotPublished", "torn")},
    "abandon": _BUSY
    | _SLEEPS
    | _TAKEN_BACK
    | {"hidden": ("ok", "empty"), "empty": ("NotPublished", "empty"), "torn": ("NotPublished", "torn")},
    "replicate": _BUSY | _SLEEPS | _SHOWN | {"complete": ("ok", "complete"), "else": ("ok", "complete")},
    "register": _BUSY | _SHOWN | {"else": ("ok", "empty")},
    "suspend": _BUSY | {"hidden": ("DrainTimeout", "hidden"), "else": ("ok", "suspended")},
    "resume": _BUSY | _SHOWN | {"else": ("ok", "empty")},
    "close": {"else": ("ok", "closed")},
}


async def _at_once(work: Callable[[], object]) -> object:
    return work()


def shown(me: Process) -> str:
    """The state in the words of STATES."""
    slot = me.member.slots.get(BUFFERS)
    if me.member.closed:
        return "closed"
    if slot is None:
        return "absent"
    if slot.state is State.PUBLISHED and slot.hidden:
        return "hidden"
    return "publishing" if slot.offered is not None else slot.state.value


async def brought_to(state: str) -> tuple[Stage, Process]:
    """A stage whose reader is in this state."""
    world = World(0, echo=False, check_every=4, stall_s=1.0)
    world.plane.bytes_per_s, world.digest_lateness_s = 4e6, 0.001
    names = ("trainer", "reader", "relay")
    world.places = [
        Place(Seat(MODEL, ReplicaId(name), 0), 1, LAYOUT, name == "trainer", False, _near(name)) for name in names
    ]
    stage = Stage(world, [world.place_anew(place) for place in world.places])
    for process in stage.cast:
        await stage.must(process, process.start())
    me, relay = stage.cast[READER], stage.cast[RELAY]
    if state not in ("publishing", "published", "hidden"):
        await stage.publish(OTHERS)
    match state:
        case "publishing":
            world.network.part(me)
            stage.meanwhile(me, me.publish(MINE, "now", 0.5))
            await asyncio.sleep(0.1)
        case "published" | "hidden":
            await stage.must(me, me.publish(MINE, "now", CALL_S))
        case "filling":
            world.plane.bytes_per_s = 0.1e6
            stage.meanwhile(me, me.replicate(Latest(), CALL_S, None))
            await asyncio.sleep(0.5)
        case "complete":
            await stage.must(me, me.replicate(Latest(), CALL_S, None))
        case "torn":
            asyncio.get_running_loop().call_later(
                0.03, world.plane.rules.append, Rule(Meddling.FAIL, "reader", 1.0, 0.0)
            )
            await stage.do(me, me.replicate(Latest(), CALL_S, None))
            world.plane.rules.clear()
        case "suspended":
            await stage.must(me, me.member.suspend(CALL_S))
        case "closed":
            await stage.must(me, me.member.close(CALL_S))
    if state == "hidden":
        world.plane.bytes_per_s = 0.02e6
        stage.meanwhile(relay, relay.replicate(Latest(), CALL_S, None))
        await asyncio.sleep(0.2)
        await stage.do(me, me.unpublish(0.1, abandon=False))
    assert shown(me) == state
    return stage, me


def _place(name: str) -> Place:
    location = Location(("dc1", "r1", name))
    return Place(Seat(MODEL, ReplicaId(name), 0), 1, LAYOUT, name == "trainer", False, location)


def play(state: str, call: str) -> tuple[str, str]:
    async def scene() -> tuple[str, str]:
        stage, me = await brought_to(state)
        outcome = await stage.do(me, CALLS[call](me))
        cell = (type(outcome).__name__ if isinstance(outcome, BaseException) else "ok", shown(me))
        for process in stage.cast:
            await process.kill()
        await stage.world.end()
        await asyncio.gather(*stage.beside, return_exceptions=True)
        return cell

    found: tuple[str, str] = run_stranded(scene())
    return found


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", STATES)
def test_call_in_state(state: str, call: str) -> None:
    """What the call says and what it leaves is what the table says, and nothing else ever happens."""
    row = TABLE[call]
    assert play(state, call) == (row[state] if state in row else row["else"])
