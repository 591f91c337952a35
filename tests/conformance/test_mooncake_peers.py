"""Mooncake's own Transfer Engine, over TCP, and the fates of its peers: stopped, killed, restarted, met at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from tensorhub.errors import EngineUnavailable, SourceFailed
from tensorhub.ports import Ranges
from tensorhub.transport.mooncake import MooncakeEngine
from tensorhub.transport.mooncake_library import acquire, release
from tensorhub.transport.mooncake_read import Place
from tests.conformance.peer import Memory, pattern
from tests.conformance.sources import SourceProcess, usable
from tests.support.mooncake import FakeTransferEngine

pytestmark = pytest.mark.slow

MIB = 1 << 20
TIMEOUT_S = 60.0
#: Long enough to be in mid-read, short enough to wait for.
SHORT_S = 1.0


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.fixture
def source():
    usable("mooncake")
    opened = SourceProcess("mooncake")
    yield opened
    opened.end()


@pytest.fixture
def engine(source):
    opened = MooncakeEngine("127.0.0.1")
    yield opened
    source.kill()  # a call of the library that still waits for a stopped one ends
    asyncio.run(opened.close())


def served(source: SourceProcess, nbytes: int, seed: int = 1) -> tuple[bytes, int]:
    """Locator of the source and address of its bytes."""
    address = source.map(nbytes)
    source.write(address, seed, nbytes)
    source.register(address, nbytes)
    return source.locate(), address


async def read(
    engine: MooncakeEngine, peer: bytes, address: int, target: np.ndarray, timeout_s: float = TIMEOUT_S
) -> None:
    await engine.read(peer, Ranges(u64(address), u64(target.ctypes.data), u64(target.nbytes)), timeout_s)


async def interrupted(
    engine: MooncakeEngine,
    peer: bytes,
    address: int,
    target: np.ndarray,
    timeout_s: float,
    interrupt: Callable[[], None],
) -> SourceFailed:
    """What a read says whose source is interrupted once its first bytes have landed."""
    task = asyncio.create_task(read(engine, peer, address, target, timeout_s))
    while not target[0] and not task.done():
        await asyncio.sleep(0)
    interrupt()
    with pytest.raises(SourceFailed) as caught:
        await task
    return caught.value


def test_a_stopped_source_is_left_at_the_deadline_and_its_late_bytes_corrupt_nobody(engine, source):
    """source_stopped, timeout_then_late_write: what arrives when it wakes up lands in no tensor and no later read."""
    nbytes = 64 * MIB
    peer, address = served(source, nbytes)
    target = np.zeros(nbytes, dtype=np.uint8)

    async def stop_and_wake() -> None:
        failure = await interrupted(engine, peer, address, target, SHORT_S, source.stop)
        assert failure.where.bytes_done is not None
        assert 0 < failure.where.bytes_done < nbytes
        assert "not done within" in failure.message
        target[:] = 0xEE
        assert engine._library.slabs.quarantined > 0
        source.process.send_signal(signal.SIGCONT)
        fresh = np.zeros(16 * MIB, dtype=np.uint8)
        await read(engine, peer, address, fresh)
        assert (fresh == pattern(1, nbytes)[: len(fresh)]).all()

    asyncio.run(stop_and_wake())
    while engine._library.slabs.quarantined:  # they land, now that the source is awake
        os.sched_yield()
    assert (target == 0xEE).all()


def test_a_killed_source_ends_its_reads_with_what_was_done(engine, source):
    """source_killed_midchunk: SIGKILL in mid-read ends it long before its deadline; reading again says it is gone."""
    nbytes = 64 * MIB
    peer, address = served(source, nbytes)
    target = np.zeros(nbytes, dtype=np.uint8)
    failure = asyncio.run(interrupted(engine, peer, address, target, TIMEOUT_S, source.kill))
    done = failure.where.bytes_done
    assert done is not None
    assert 0 < done < nbytes
    assert (target[:done] == pattern(1, nbytes)[:done]).all()
    with pytest.raises((SourceFailed, EngineUnavailable), match=r"dead|no answer"):
        asyncio.run(read(engine, peer, address, target))


def test_a_stopped_peer_at_first_contact_keeps_nobody_else_waiting(engine, source):
    """source_stopped: Mooncake waits a minute for it; the read that wanted it ends at its deadline, others go on."""
    peer, address = served(source, MIB)
    source.stop()
    other = SourceProcess("mooncake")
    try:
        other_peer, other_address = served(other, MIB)
        target, theirs = np.zeros(MIB, dtype=np.uint8), np.zeros(MIB, dtype=np.uint8)

        async def meet_both() -> None:
            stuck = asyncio.create_task(read(engine, peer, address, target, SHORT_S))
            await asyncio.sleep(0)
            await read(engine, other_peer, other_address, theirs)
            with pytest.raises(SourceFailed, match="not done within"):
                await stuck

        asyncio.run(meet_both())
        assert (theirs == pattern(1, MIB)).all()
        assert not target.any()
    finally:
        other.end()


def test_many_meet_a_peer_at_once(engine, source):
    """concurrent_first_contact: two engines, two threads, several reads each, one peer that nobody had met."""
    peer, address = served(source, MIB)
    second = MooncakeEngine("127.0.0.1")
    outcomes: list[bool] = []

    async def several(reader: MooncakeEngine) -> None:
        targets = [np.zeros(MIB, dtype=np.uint8) for _ in range(5)]
        await asyncio.gather(*(read(reader, peer, address, target) for target in targets))
        outcomes.extend(bool((target == pattern(1, MIB)).all()) for target in targets)

    threads = [threading.Thread(target=asyncio.run, args=(several(reader),)) for reader in (engine, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    asyncio.run(second.close())
    assert outcomes == [True] * 10


def test_a_later_life_at_the_same_port_is_reached(engine, source):
    """restart_same_name_same_addr: Mooncake forgets no address; another spelling of it reaches who is there."""
    peer, address = served(source, MIB)
    place = Place.unpack(peer)
    for earlier in (b"an earlier life", b"one more"):
        engine._library.peer_name(place.address, earlier)
    target = np.zeros(MIB, dtype=np.uint8)
    asyncio.run(read(engine, peer, address, target))
    assert engine._library.peer_name(place.address, place.incarnation) == f"127.0x0.0.1:{place.address.port}"
    assert (target == pattern(1, MIB)).all()


def test_tiny_tensors_cost_few_requests(engine, source, monkeypatch):
    """100k_tiny_tensors: 100 000 tensors of 64 bytes, as an allocator places them, in a few dozen requests."""
    count, stride = 100_000, 128
    peer, address = served(source, count * stride)
    order = np.arange(count, dtype=np.uint64)
    target = np.zeros(count * 64, dtype=np.uint8)
    requests: list[int] = []
    submit = engine._library.submit

    def counted(peer: str, local: int, remote: int, nbytes: int) -> int:
        requests.append(nbytes)
        return submit(peer, local, remote, nbytes)

    monkeypatch.setattr(engine._library, "submit", counted)
    ranges = Ranges(
        order * np.uint64(stride) + np.uint64(address),
        order * np.uint64(64) + np.uint64(target.ctypes.data),
        np.full(count, 64, dtype=np.uint64),
    )
    asyncio.run(engine.read(peer, ranges, TIMEOUT_S))
    expected = pattern(1, count * stride).reshape(count, stride)[:, :64].ravel()
    assert (target == expected).all()
    assert len(requests) < 50


def test_tensors_on_neighbouring_pages_are_read_in_one_request(engine, source, monkeypatch):
    """Small tensors of an allocator are registered one by one; the source serves the bytes between them, too."""
    address = source.map(MIB)
    source.write(address, 1, MIB)
    places = [0, 1000, 3000, 3 * 4096 - 1]
    for place in places:
        source.register(address + place, 100)
    peer, target = source.locate(), np.zeros(400, dtype=np.uint8)
    await_first = Ranges(u64(address), u64(target.ctypes.data), u64(100))
    asyncio.run(engine.read(peer, await_first, TIMEOUT_S))
    asked: list[int] = []
    submit = engine._library.submit
    monkeypatch.setattr(engine._library, "submit", lambda *request: asked.append(request[3]) or submit(*request))
    local = u64(0, 100, 200, 300) + np.uint64(target.ctypes.data)
    ranges = Ranges(u64(*places) + np.uint64(address), local, u64(100, 100, 100, 100))
    asyncio.run(engine.read(peer, ranges, TIMEOUT_S))
    data = pattern(1, MIB)
    assert target.tolist() == np.concatenate([data[place : place + 100] for place in places]).tolist()
    assert asked == [3100, 100]


def test_registrations_that_overlap_touch_and_repeat_are_all_taken():
    """register_twice, overlapping_views: the real library answers -7 to a second registration; it never sees one."""
    usable("mooncake")
    engine, memory = MooncakeEngine("127.0.0.1"), Memory()
    address = memory.map(16 * MIB)
    ranges = [(0, MIB), (0, MIB), (100, 50), (MIB, MIB), (MIB - 5, 10), (4 * MIB, MIB), (0, 8 * MIB), (9 * MIB, 1)]
    for place, nbytes in ranges:
        engine.register(address + place, nbytes)
    assert engine._library.registered.regions() == [(address, 8 * MIB), (address + 9 * MIB, 1)]
    for place, nbytes in ranges[:-2]:
        engine.deregister(address + place, nbytes)
    engine.deregister(address, 8 * MIB)
    assert engine._library.registered.regions() == [(address + 9 * MIB, 1)]
    asyncio.run(engine.close())
    memory.close()


@pytest.mark.parametrize("open_library", ["real", "fake"])
def test_the_fake_answers_as_the_real_one(open_library):
    """What tests of RDMA's path rely on: answers to second, overlapping, empty and unknown ranges; who is read."""
    usable("mooncake")
    library = acquire("127.0.0.1", "tcp")
    engine = library._running() if open_library == "real" else FakeTransferEngine()
    if open_library == "fake":
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    me = f"127.0.0.1:{engine.get_rpc_port()}"
    data, target = np.arange(8192, dtype=np.uint8), np.zeros(8192, dtype=np.uint8)
    here, there = data.ctypes.data, target.ctypes.data
    assert [engine.register_memory(here, 4096), engine.register_memory(there, 8192)] == [0, 0]
    assert [engine.register_memory(here, 4096), engine.register_memory(here + 8, 8)] == [-7, -7]
    assert engine.register_memory(here + 4096, 0) == -1
    assert engine.unregister_memory(here + 8) == -3
    assert engine.send_probe(me) == 0
    assert engine.send_probe("127.0.0.1:1") != 0
    assert engine.batch_transfer_async_read("127.0.0.1:1", [there], [here], [8]) == 0

    def status(remote: int, nbytes: int) -> int:
        batch = engine.batch_transfer_async_read(me, [there], [remote], [nbytes])
        while (code := engine.transfer_check_status(batch)) == 0:
            pass
        return code

    assert status(here + 100, 200) == 1
    assert (target[:200] == data[100:300]).all()
    assert status(here + 4000, 200) == -1
    assert [engine.unregister_memory(here), engine.unregister_memory(there)] == [0, 0]
    release(library)


async def _read_over_ipv6(source: SourceProcess) -> None:
    peer, address = served(source, 3 * MIB)
    engine = MooncakeEngine("::1")
    target = np.zeros(3 * MIB, dtype=np.uint8)
    await read(engine, peer, address, target)
    assert (target == pattern(1, 3 * MIB)).all()
    assert str(Place.unpack(peer).address).startswith("[::1]:")
    await engine.close()


async def _fail_quietly(source: SourceProcess) -> None:
    peer, _ = served(source, MIB)
    engine = MooncakeEngine("127.0.0.1")
    target = np.zeros(64, dtype=np.uint8)
    for unmapped in (4096, 8192):
        with pytest.raises(SourceFailed):
            await read(engine, peer, unmapped, target)
    source.kill()
    with pytest.raises((SourceFailed, EngineUnavailable)):
        await read(engine, peer, 4096, target)
    await engine.close()


#: Each runs in a fresh process: the library is loaded once per process, for one family of addresses.
ALONE: dict[str, tuple[str, Callable[[SourceProcess], Awaitable[None]]]] = {
    "ipv6": ("::1", _read_over_ipv6),
    "quiet": ("127.0.0.1", _fail_quietly),
}


@pytest.mark.parametrize("what", ALONE)
def test_alone_in_a_process(what):
    """ipv6_endpoint: bytes move between IPv6 addresses. Nothing of Mooncake's appears on stderr, even of failures."""
    usable("mooncake")
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.test_mooncake_peers", what],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def main() -> None:
    """Run one of `ALONE`."""
    host, run = ALONE[sys.argv[1]]
    source = SourceProcess("mooncake", host)
    try:
        asyncio.run(run(source))  # type: ignore[arg-type]
    finally:
        source.end()


if __name__ == "__main__":
    main()
