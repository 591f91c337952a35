"""The sources that a stream engine reads from: names and numbers, how many are kept, what being turned away means."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading

import numpy as np
import pytest

from tensorhub.errors import Closed, EngineUnavailable, SourceFailed
from tensorhub.native import Opening
from tensorhub.transport import stream_peers
from tensorhub.transport.endpoints import Endpoint
from tensorhub.transport.stream_peers import Peer, StreamPeers, Trouble
from tensorhub.transport.tcp import TcpEngine
from tests.support import streams
from tests.support.streams import PAGE, PATIENCE_S, SOON_S, leave, read, scripted, serve_zeros
from tests.support.virtual_time import run_virtual


@pytest.fixture
def engine():
    opened = TcpEngine("127.0.0.1")
    yield opened
    asyncio.run(opened.close())


def test_an_engine_closed_while_a_name_is_looked_up_reads_nothing(monkeypatch):
    """Nothing begins once `close` has returned."""
    release, asked = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        asked.set()
        release.wait(streams.PATIENCE_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 7))]

    engine = TcpEngine("127.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def run() -> None:
        task = asyncio.create_task(
            read(engine, Endpoint("slow.example", 7, bytes(16), "boot", 1).pack(), np.zeros(8, dtype=np.uint8))
        )
        while not asked.is_set():
            await asyncio.sleep(0)
        await engine.close()
        release.set()
        with pytest.raises(Closed):
            await task

    asyncio.run(run())


def test_a_name_is_looked_up_and_each_of_its_numbers_tried(engine, monkeypatch):
    """ipv6_endpoint: a host may have several numbers, and the first may lead nowhere."""
    with scripted(serve_zeros) as source:
        endpoint = Endpoint.unpack(source.locator())
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nowhere = closed.getsockname()
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        found = [(*stream, nowhere), (*stream, ("127.0.0.1", endpoint.port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        named = Endpoint("weights.example", *[getattr(endpoint, name) for name in Endpoint.__slots__[1:]])
        target = np.full(PAGE, 0xEE, dtype=np.uint8)
        asyncio.run(read(engine, named.pack(), target))
        assert not target.any()


def test_an_unknown_name_is_out_of_reach(engine, monkeypatch):
    """No number, no source: EngineUnavailable names the host."""

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    peer = Endpoint("nobody.example", 7, bytes(16), "boot", 1).pack()
    with pytest.raises(EngineUnavailable, match=r"'nobody.example' is unknown here"):
        asyncio.run(read(engine, peer, np.zeros(8, dtype=np.uint8)))


def test_a_resolver_that_hangs_does_not_outlast_the_read(engine, monkeypatch):
    """Looking a name up has a deadline, whatever the resolver's own is."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [release.wait(streams.PATIENCE_S)])
    peer = Endpoint("slow.example", 7, bytes(16), "boot", 1).pack()

    async def look() -> None:
        try:
            with pytest.raises(EngineUnavailable, match="was not found within"):
                await read(engine, peer, np.zeros(8, dtype=np.uint8), SOON_S)
        finally:
            release.set()

    asyncio.run(look())


def test_a_host_that_drops_packets_is_out_of_reach_before_the_deadline(monkeypatch):
    """A connection that does not come about within its own limit is no slow source, but one that cannot be reached."""
    engine = TcpEngine("127.0.0.1")
    monkeypatch.setattr(stream_peers, "CONNECT_S", SOON_S)
    with socket.socket() as deaf:  # never accepts, and its queue of one is full: further packets are dropped
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        with socket.create_connection(deaf.getsockname()):
            peer = Endpoint.own("127.0.0.1", deaf.getsockname()[1], bytes(16)).pack()
            with pytest.raises(EngineUnavailable, match="cannot be reached: Connection timed out"):
                asyncio.run(read(engine, peer, np.zeros(8, dtype=np.uint8)))
    asyncio.run(engine.close())


HERE = Endpoint("10.0.0.1", 7, bytes(16), "boot", 1)
REFUSED = Trouble(Opening.NOT_REACHED, errno.ECONNREFUSED)
UNREACHABLE = Trouble(Opening.NOT_REACHED, errno.EHOSTUNREACH)
NO_DESCRIPTOR = Trouble(Opening.NOT_REACHED, errno.EMFILE)


@pytest.mark.parametrize(
    ("trouble", "met", "same_network", "kind"),
    [
        (REFUSED, False, False, EngineUnavailable),  # a firewall, or dead: nobody can tell
        (REFUSED, True, False, SourceFailed),
        (REFUSED, False, True, SourceFailed),  # nothing stands between: nobody listens
        (UNREACHABLE, False, True, EngineUnavailable),
        (UNREACHABLE, True, False, SourceFailed),
        (NO_DESCRIPTOR, False, True, EngineUnavailable),  # what we lack says nothing about the source
        (NO_DESCRIPTOR, True, True, EngineUnavailable),
        (Trouble(Opening.LATE, 0), False, False, type(None)),
        (Trouble(Opening.OVER, 0), False, False, type(None)),
    ],
)
def test_what_a_stream_that_was_not_opened_means(trouble, met, same_network, kind):
    """A source that was there and is not any more is dead; one that never was may be out of reach."""
    peer = Peer(Endpoint("10.0.0.2", 7, bytes(16), "boot", 1 if same_network else 2), met=met)
    explained = peer.explain(trouble, HERE)
    assert type(explained) is kind
    assert explained is None or "10.0.0.2:7" in explained.message


def test_peers_are_bounded_and_those_in_use_stay():
    """register_cycle_1000: a reader that meets thousands of sources keeps threads and streams for a few."""
    peers = StreamPeers(limit=2)
    endpoints = [Endpoint("h", port, bytes(16), "boot", 1) for port in range(1, 6)]
    held = peers.enter(endpoints[0])
    for endpoint in endpoints[1:]:
        asyncio.run(leave(peers, peers.enter(endpoint)))
    assert list(peers._peers) == [endpoints[0], endpoints[4]]
    asyncio.run(leave(peers, held))
    peers.close()
    assert not peers._peers


def test_what_many_rounds_have_met_does_not_stay():
    """200_versions_flat: sources that nothing is read from any more keep neither thread nor descriptor, also when no
    other is read from; one in use stays, and goes in its turn."""

    async def run() -> None:
        peers, before = StreamPeers(), (len(os.listdir("/proc/self/fd")), threading.active_count())
        held = peers.enter(Endpoint("h", 99, bytes(16), "boot", 1))
        pairs = []
        for port in range(1, 9):
            peer = peers.enter(Endpoint("h", port, bytes(16), "boot", 1))
            peer.bulk.pool.submit(lambda: None).result(PATIENCE_S)
            peer.bulk.give(pair := Pair())
            pairs.append(pair)
            peers.leave(peer)
            await asyncio.sleep(1.0)
        await asyncio.sleep(stream_peers.IDLE_S - 5.5)
        assert len(peers._peers) == 1 + 5, "each goes in its own time"
        await asyncio.sleep(6.0)
        assert list(peers._peers) == [held.endpoint]
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        peers.leave(held)
        await asyncio.sleep(2 * stream_peers.IDLE_S + 1.0)
        assert not peers._peers
        assert peers._look is None, "nothing looks for ever"

    run_virtual(run())


class Pair:
    """Holds two descriptors, as an open stream holds one."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()

    def close(self) -> None:
        for end in self._ends:
            end.close()
