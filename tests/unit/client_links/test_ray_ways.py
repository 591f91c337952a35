"""Which way the Ray link takes to an actor that it has found: its own address, or its methods; without Ray."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from tensorhub import messages as m
from tensorhub.addresses import Address
from tensorhub.client.frame_link import FrameConnection
from tensorhub.client.ray_calls import CallsConnection, CallsHeart
from tensorhub.client.ray_link import RayLink, _Place, ray_link
from tensorhub.errors import ServerUnavailable
from tensorhub.messages import Call
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.host import Host
from tensorhub.server.polled import PolledDoors
from tensorhub.types import Epoch, SessionId
from tests.support.fake_machine import FakeMachine
from tests.support.loop_actor import LoopActor

SESSION = SessionId(b"s" * 16)
HELLO = Call(1, m.Hello(m.PROTOCOL, SESSION, b"", "host", 1, Epoch(b"")))
BEAT_NS = 20_000_000


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a case with a link that finds one host: at `direct` if told so, and by an actor's methods."""

    def run(case: Callable[[RayLink, Host], Awaitable[None]], reachable: bool | None) -> None:
        async def main() -> None:
            host, listener = Host(FakeMachine()), listen("127.0.0.1")
            direct: Address | None = address_of(listener)
            if reachable:
                serving = asyncio.create_task(serve_direct(listener, host))
            else:
                listener.close()
                serving = asyncio.create_task(host.run())
            if reachable is None:
                direct = None
            monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())  # not called: the place is given
            place = _Place(LoopActor(PolledDoors(host)), direct, "127.0.0.1")

            async def find(self: RayLink, timeout_s: float) -> _Place:
                return place

            monkeypatch.setattr(RayLink, "_find", find)
            await case(ray_link("ray://tensorhub"), host)
            host.stop("done")
            await serving

        asyncio.run(main())

    return run


@pytest.mark.parametrize(
    ("reachable", "kind"), [(True, FrameConnection), (False, CallsConnection), (None, CallsConnection)]
)
def test_the_way_that_there_is_is_taken(linked: Callable[..., None], reachable: bool | None, kind: type) -> None:
    """The actor's address where it can be reached, its methods where it cannot; the heart goes the same way."""

    async def case(link: RayLink, host: Host) -> None:
        connection = await link.connect(5.0)
        assert isinstance(connection, kind)
        await connection.send(HELLO)
        assert isinstance((await connection.receive()).reply, m.Welcome)
        heart = await link.beat(SESSION, BEAT_NS)
        assert isinstance(heart, CallsHeart) == (kind is CallsConnection)
        async with asyncio.timeout(10.0):
            while heart.acknowledged_ns() == 0:
                await asyncio.sleep(BEAT_NS / 4e9)
        heart.stop()
        assert await link.own_host() == "127.0.0.1"
        await connection.close()

    linked(case, reachable)


def test_the_reason_is_told_once(linked: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """However often a link connects by methods, its log says once why, with the address that was tried."""

    async def case(link: RayLink, host: Host) -> None:
        for _ in range(3):
            await (await link.connect(5.0)).close()

    with caplog.at_level(logging.WARNING, "tensorhub.client"):
        linked(case, False)
    (record,) = [record for record in caplog.records if record.name == "tensorhub.client"]
    assert "by actor calls, which are slower: ray://tensorhub cannot be reached at 127.0.0.1:" in record.getMessage()


def test_a_host_that_is_full_is_no_server(linked: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the actor refuses comes out as `ServerUnavailable`, also its refusal to open one more connection."""
    monkeypatch.setattr("tensorhub.server.polled.CONNECTIONS_MAX", 0)

    async def case(link: RayLink, host: Host) -> None:
        with pytest.raises(ServerUnavailable, match="no more are taken"):
            await link.connect(5.0)

    linked(case, None)


def test_a_heart_that_is_stopped_before_it_beats_leaves_nothing(linked: Callable[..., None]) -> None:
    """`stop` right after the start ends the heart's connection, too."""

    async def case(link: RayLink, host: Host) -> None:
        heart = await link.beat(SESSION, BEAT_NS)
        heart.stop()
        await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            while any("_until_over" in repr(task) for task in asyncio.all_tasks()):
                await asyncio.sleep(0)
        assert heart.failed() == "stopped"

    linked(case, None)
