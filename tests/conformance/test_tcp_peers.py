"""The tcp engine and the fates of its peers in other processes: dead, stopped, busy, restarted, met by many at once."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import EngineUnavailable, SourceFailed
from tensorhub.ports import Ranges
from tensorhub.transport.endpoints import Endpoint
from tensorhub.transport.tcp import TcpEngine
from tests.conformance.peer import pattern
from tests.conformance.sources import SourceProcess

pytestmark = pytest.mark.slow

MIB = 1 << 20
TIMEOUT_S = 60.0


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.fixture
def source():
    opened = SourceProcess("tcp")
    yield opened
    opened.end()


@pytest.fixture
def engine():
    opened = TcpEngine("127.0.0.1")
    yield opened
    asyncio.run(opened.close())


async def read(engine: TcpEngine, peer: bytes, address: int, target: np.ndarray, timeout_s: float = TIMEOUT_S) -> None:
    await engine.read(peer, Ranges(u64(address), u64(target.ctypes.data), u64(target.nbytes)), timeout_s)


def served(source: SourceProcess, nbytes: int) -> tuple[bytes, int]:
    """Locator of the source and address of its bytes."""
    address = source.map(nbytes)
    source.write(address, 1, nbytes)
    source.register(address, nbytes)
    return source.locate(), address


@pytest.mark.parametrize("met_before", [False, True])
def test_a_killed_peer_is_a_failed_source(engine, source, met_before):
    """source_killed_midchunk: a dead process is noticed at once, met alive before or not; no descriptor stays."""
    peer, address = served(source, 64)
    target = np.zeros(64, dtype=np.uint8)
    fds = len(os.listdir("/proc/self/fd"))
    if met_before:
        asyncio.run(read(engine, peer, address, target))
        assert len(os.listdir("/proc/self/fd")) == fds + 1
    source.kill()
    for _ in range(2):
        with pytest.raises(SourceFailed, match=r"is dead: Connection refused"):
            asyncio.run(read(engine, peer, address, target))
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize("met_before", [False, True])
def test_a_peer_killed_during_a_read_ends_it(engine, source, met_before):
    """source_killed_midchunk: the read ends with the process, not with its deadline. Stopped first, so that it is
    under way for sure."""
    peer, address = served(source, 9 * MIB)
    target = np.zeros(9 * MIB, dtype=np.uint8)
    if met_before:
        asyncio.run(read(engine, peer, address, target))
    source.stop()

    async def kill_early() -> None:
        reading = asyncio.create_task(read(engine, peer, address, target))
        await asyncio.sleep(0)
        source.kill()
        with pytest.raises(SourceFailed, match=r"ended during a read|is dead|no source greets"):
            await reading

    asyncio.run(kill_early())


@pytest.mark.parametrize("met_before", [False, True])
def test_a_stopped_peer_is_bounded_by_the_deadline(engine, source, met_before):
    """source_stopped, timeout_then_late_write: its kernel takes connections, but no byte comes, also not later."""
    peer, address = served(source, 64)
    target = np.zeros(64, dtype=np.uint8)
    if met_before:
        asyncio.run(read(engine, peer, address, target))
    target[:] = 0xEE
    source.stop()
    with pytest.raises(SourceFailed, match=r"was not done within 0\.1 s"):
        asyncio.run(read(engine, peer, address, target, timeout_s=0.1))
    source.go_on()
    asyncio.run(read(engine, peer, address, np.zeros(64, dtype=np.uint8)))
    assert (target == 0xEE).all()


def test_a_peer_that_holds_the_interpreter_serves(engine, source):
    """Reads are one-sided: a trainer in one long call of C that never gives the interpreter up serves as before."""
    peer, address = served(source, 9 * MIB)
    source.hold_interpreter()
    target = np.zeros(9 * MIB, dtype=np.uint8)
    asyncio.run(read(engine, peer, address, target))
    assert (target == pattern(1, 9 * MIB)).all()


def test_a_restarted_process_at_the_same_port_is_somebody_else(engine):
    """restart_same_name_same_addr: same host, same port, same addresses, another incarnation: no byte is read."""
    data = pattern(1, 64)
    target = np.zeros(64, dtype=np.uint8)

    def live(port: int) -> tuple[native.StreamServer, Endpoint]:
        listener, incarnation = socket.create_server(("127.0.0.1", port)), os.urandom(16)
        port = listener.getsockname()[1]
        server = native.StreamServer(listener, incarnation)
        server.add(data.ctypes.data, data.nbytes)
        return server, Endpoint.own("127.0.0.1", port, incarnation)

    first, endpoint = live(0)
    asyncio.run(read(engine, endpoint.pack(), data.ctypes.data, target))
    assert (target == data).all()
    first.stop()
    second, _ = live(endpoint.port)
    target[:] = 0xEE
    with pytest.raises(SourceFailed, match=f"not incarnation {endpoint.incarnation.hex()}"):
        asyncio.run(read(engine, endpoint.pack(), data.ctypes.data, target))
    assert (target == 0xEE).all()
    second.stop()


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_ways_to_write_this_host(host):
    """ipv6_endpoint: a peer behind an IPv6 number, or behind a name."""
    source, engine = SourceProcess("tcp", host), TcpEngine(host)
    try:
        peer, address = served(source, 9 * MIB)
        assert Endpoint.unpack(peer).host == host
        target = np.zeros(9 * MIB, dtype=np.uint8)
        asyncio.run(read(engine, peer, address, target))
        assert (target == pattern(1, 9 * MIB)).all()
    finally:
        source.end()
        asyncio.run(engine.close())


def test_an_address_that_leads_here_by_translation(engine, monkeypatch):
    """TENSORHUB_ADVERTISE: what is advertised need not be what is bound; whoever is led here is served."""
    source = SourceProcess("tcp", "192.0.2.7")
    try:
        peer, address = served(source, 64)
        translated = replace(Endpoint.unpack(peer), host="127.0.0.1")
        target = np.zeros(64, dtype=np.uint8)
        asyncio.run(read(engine, translated.pack(), address, target))
        assert (target == pattern(1, 64)).all()
    finally:
        source.end()


def test_loopback_of_another_host_is_refused_without_a_try(engine, source):
    """loopback_refused: its 127.0.0.1 is not ours, whoever listens here."""
    peer, address = served(source, 64)
    elsewhere = replace(Endpoint.unpack(peer), network=1).pack()
    with pytest.raises(EngineUnavailable, match="loopback"):
        asyncio.run(read(engine, elsewhere, address, np.zeros(64, dtype=np.uint8)))


def test_many_reads_meet_a_peer_first_at_once(engine, source):
    """concurrent_first_contact: large and small reads of one unknown peer start together; each gets its own bytes."""
    peer, address = served(source, 9 * MIB)
    data = pattern(1, 9 * MIB)
    targets = [np.zeros(nbytes, dtype=np.uint8) for nbytes in (9 * MIB, 64, 5 * MIB, 100, 8, 9 * MIB)]

    async def meet() -> None:
        await asyncio.gather(*(read(engine, peer, address, target) for target in targets))

    asyncio.run(meet())
    for target in targets:
        assert (target == data[: len(target)]).all()


def test_engines_of_one_host_have_ports_of_their_own():
    """64_clients_one_host: each is bound with port 0 and reports what it got."""
    engines = [TcpEngine("127.0.0.1") for _ in range(64)]
    assert len({Endpoint.unpack(engine.locate()).port for engine in engines}) == 64
    for engine in engines:
        asyncio.run(engine.close())


def test_deregistering_during_a_read_fails_it_untorn(engine, source):
    """Once `deregister` has returned at the source, its memory may go: a read that overlaps fails, or was complete."""
    peer, address = served(source, 64 * MIB)
    target = np.zeros(64 * MIB, dtype=np.uint8)

    async def take_away() -> None:
        reading = asyncio.create_task(read(engine, peer, address, target))
        await asyncio.to_thread(source.deregister, address, 64 * MIB)
        source.unmap(address)
        (outcome,) = await asyncio.gather(reading, return_exceptions=True)
        if outcome is None:
            assert (target == pattern(1, 64 * MIB)).all()
        else:
            assert isinstance(outcome, SourceFailed)
            with pytest.raises(SourceFailed, match="not registered"):
                await read(engine, peer, address, target)

    asyncio.run(take_away())


def test_a_forked_child_leaves_its_parents_engine_alone(engine, source):
    """The child's copy is dead and closed; the parent's goes on, and its port is free when it closes."""
    data = pattern(1, 64)
    engine.register(data.ctypes.data, data.nbytes)
    peer = engine.locate()
    child = os.fork()
    if child == 0:
        try:
            engine.locate()
        except Exception:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    target = np.zeros(64, dtype=np.uint8)
    asyncio.run(read(engine, peer, data.ctypes.data, target))
    assert (target == data).all()


def test_a_hundred_thousand_tiny_ranges_are_a_few_calls(engine, source):
    """100k_tiny_tensors: ranges of 64 bytes, scattered on both sides, go a thousand to a request."""
    count, stride = 100_000, 80
    peer, address = served(source, count * stride)
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(stride)
    target = np.zeros(count * stride, dtype=np.uint8)
    ranges = Ranges(
        offsets + np.uint64(address), offsets[::-1] + np.uint64(target.ctypes.data), np.full(count, 64, dtype=np.uint64)
    )
    asyncio.run(engine.read(peer, ranges, TIMEOUT_S))
    rows = pattern(1, count * stride).reshape(count, stride)[::-1]
    expected = np.zeros((count, stride), dtype=np.uint8)
    expected[:, :64] = rows[:, :64]
    assert (target.reshape(count, stride) == expected).all()


def test_register_cycles_leave_nothing_behind(engine, source):
    """register_cycle_1000: descriptors and threads are flat over a thousand registrations and reads."""
    peer, address = served(source, 64)
    target = np.zeros(64, dtype=np.uint8)
    data = pattern(2, 4096)

    async def cycle(times: int) -> tuple[int, int]:
        for _ in range(times):
            engine.register(data.ctypes.data, data.nbytes)
            await read(engine, peer, address, target)
            engine.deregister(data.ctypes.data, data.nbytes)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    async def both() -> None:
        assert await cycle(10) == await cycle(1000)

    asyncio.run(both())
