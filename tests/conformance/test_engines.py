"""One suite over every engine: what `ports.Engine` promises, whoever implements it, and that the suite can fail."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest
import xxhash

from tensorhub.errors import BadRequest, Closed, EngineUnavailable, NotRegistered, SourceFailed
from tensorhub.ports import Chunks, Engine, Ranges
from tests.conformance.peer import Memory, pattern
from tests.conformance.sources import CASES, Case, Liar, Source, usable

MIB = 1 << 20
GIB = 1 << 30
TIMEOUT_S = 60.0
PAGE = 4096


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.fixture(
    params=[
        "memory",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cuda_ipc", "local", "tcp", "mooncake")),
    ]
)
def case(request) -> Case:
    return CASES[usable(request.param)]


@pytest.fixture
def memory():
    mapped = Memory()
    yield mapped
    mapped.close()


def served(source: Source, nbytes: int, seed: int = 1) -> int:
    """Address of registered bytes of the source."""
    address = source.map(nbytes)
    source.write(address, seed, nbytes)
    source.register(address, nbytes)
    return address


def check_exact(engine: Engine, source: Source, nbytes: int, cuts: list[int]) -> None:
    """Read `nbytes` cut into ranges, landing in reverse order with gaps: every byte arrives, and no other changes."""
    address = served(source, nbytes)
    bounds = u64(0, *cuts, nbytes)
    starts, sizes = bounds[:-1], np.diff(bounds)
    gap = 3
    places = np.cumsum(sizes[::-1] + np.uint64(gap))[::-1] - np.uint64(gap) - sizes
    target = np.full(nbytes + gap * len(sizes), 0xEE, dtype=np.uint8)
    ranges = Ranges(starts + np.uint64(address), places + np.uint64(target.ctypes.data), sizes)
    asyncio.run(engine.read(source.locate(), ranges, TIMEOUT_S))
    expected = np.full(len(target), 0xEE, dtype=np.uint8)
    data = pattern(1, nbytes)
    for start, place, size in zip(starts.tolist(), places.tolist(), sizes.tolist(), strict=True):
        expected[place : place + size] = data[start : start + size]
    assert (target == expected).all()


@pytest.mark.parametrize(
    "nbytes", [1, 7, MIB - 1, MIB, MIB + 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB + 1, 17 * MIB - 1]
)
def test_exact_bytes_at_every_slice_boundary(engine, source, nbytes):
    """slice_boundary: sizes around one call, one thread, one slab and one slice, in one range and in uneven ones."""
    check_exact(engine, source, nbytes, [])
    if nbytes > 7:
        check_exact(engine, source, nbytes, [1, nbytes // 3, nbytes - 1])


def test_many_ranges_in_one_batch(engine, source):
    """100k_tiny_tensors: more ranges than one call of the kernel takes, by far."""
    check_exact(engine, source, 20_000 * 64, [64 * i for i in range(1, 20_000)])


@pytest.mark.parametrize("chunk_bytes", [1, 4096, MIB, 5 * MIB])
@pytest.mark.parametrize("apart", [0, 3], ids=["contiguous", "scattered"])
def test_chunks_are_digested_as_they_land(engine, source, chunk_bytes, apart):
    """chunk_size_invariance: each chunk's digest is of its bytes as they landed; a range behind them is only read."""
    count, tail = (300 if chunk_bytes == 1 else 3), 11
    nbytes = chunk_bytes * count
    address = served(source, nbytes + tail)
    # Every chunk comes in two ranges, if it has two bytes, so that scattered ones must be gathered.
    firsts, remote, sizes = [0], [], []
    for _ in range(count):
        cut = [chunk_bytes // 3, chunk_bytes - chunk_bytes // 3]
        for size in [size for size in cut if size]:
            remote.append(address + sum(sizes))
            sizes.append(size)
        firsts.append(len(sizes))
    remote.append(address + nbytes)
    sizes.append(tail)
    target = np.zeros(nbytes + tail + apart * (len(sizes) - 1), dtype=np.uint8)
    places = np.cumsum([0, *sizes[:-1]]) + apart * np.arange(len(sizes)) + target.ctypes.data
    digests = np.zeros(count, dtype=np.uint64)
    batch = Ranges(u64(*remote), u64(*places.tolist()), u64(*sizes))
    asyncio.run(engine.read(source.locate(), batch, TIMEOUT_S, Chunks(u64(*firsts), digests)))
    data = pattern(1, nbytes + tail)
    wanted = [xxhash.xxh3_64_intdigest(data[c * chunk_bytes : (c + 1) * chunk_bytes].tobytes()) for c in range(count)]
    assert digests.tolist() == wanted
    assert target[-tail:].tobytes() == data[-tail:].tobytes()


@pytest.mark.parametrize("lie", ["nothing", "truncates", "reorders", "spills"])
def test_the_suite_catches_a_lying_engine(engine, source, lie):
    """transport_lies: an engine that reports success with other bytes does not pass."""
    with pytest.raises(AssertionError):
        check_exact(Liar(engine, lie), source, PAGE, [100, 200, 300])


def test_offset_past_4gib(engine, source, memory):
    """offset_past_4GiB: sparse mappings on both sides, bytes around and beyond 2^32."""
    nbytes = 5 * GIB
    remote, local = source.map(nbytes), memory.map(nbytes)
    source.register(remote, nbytes)
    offsets = [2**31 - 5, 2**32 - 5, 4 * GIB + 12345, nbytes - 10]
    for offset in offsets:
        source.write(remote + offset, offset, 10)
    batch = Ranges(u64(*(remote + o for o in offsets)), u64(*(local + o for o in offsets)), u64(*[10] * len(offsets)))
    asyncio.run(engine.read(source.locate(), batch, TIMEOUT_S))
    for offset in offsets:
        outcome = np.empty(10, dtype=np.uint8)
        asyncio.run(read_one(engine, source, remote + offset, outcome))
        assert (outcome == pattern(offset, 10)).all()
        assert memory.peek(local + offset, 10) == pattern(offset, 10).tobytes()


async def read_one(
    engine: Engine, source: Source, address: int, target: np.ndarray, timeout_s: float = TIMEOUT_S
) -> None:
    await engine.read(source.locate(), Ranges(u64(address), u64(target.ctypes.data), u64(target.nbytes)), timeout_s)


def test_zero_ranges_are_refused(engine, source):
    """zero_size_not_registered: no batch without ranges, no range without bytes, nothing registered of no size."""
    for nbytes in (u64(), u64(0), u64(8, 0)):
        with pytest.raises(BadRequest):
            asyncio.run(engine.read(source.locate(), Ranges(nbytes + PAGE, nbytes + PAGE, nbytes), TIMEOUT_S))
    with pytest.raises(BadRequest):
        engine.register(PAGE, 0)


def test_memory_that_is_gone_is_not_served(engine, source):
    """A range the source has taken back and unmapped fails the read; it never yields stale or zero bytes as success."""
    address = served(source, 2 * PAGE)
    source.deregister(address, 2 * PAGE)
    source.unmap(address)
    target = np.zeros(2 * PAGE, dtype=np.uint8)
    with pytest.raises(SourceFailed):
        asyncio.run(read_one(engine, source, address, target))


def test_only_registered_bytes_are_served(case, engine, source):
    """Unregistered and partly registered ranges fail before a byte is read, where the engine can decide that.

    Between processes of one user the kernel serves whatever is mapped: that this is so is stated, and checked, too.
    """
    address = source.map(4 * PAGE)
    target = np.full(2 * PAGE, 0xEE, dtype=np.uint8)
    if not case.enforces_registration:
        asyncio.run(read_one(engine, source, address, target))
        assert not target.any()
        return
    with pytest.raises(SourceFailed, match="not registered"):
        asyncio.run(read_one(engine, source, address, target))
    source.register(address, PAGE)
    with pytest.raises(SourceFailed, match="not registered"):
        asyncio.run(read_one(engine, source, address, target))
    assert (target == 0xEE).all()
    source.register(address + PAGE, PAGE)
    asyncio.run(read_one(engine, source, address, target))
    assert not target.any()


def test_register_twice_and_overlapping_views(case, engine, source):
    """register_twice, overlapping_views: each registration needs its own end; what is left stays readable."""
    address = served(source, 2 * PAGE)
    source.register(address, 2 * PAGE)
    source.register(address + 100, PAGE)
    target = np.zeros(PAGE, dtype=np.uint8)
    source.deregister(address, 2 * PAGE)
    asyncio.run(read_one(engine, source, address + PAGE, target))
    source.deregister(address, 2 * PAGE)
    asyncio.run(read_one(engine, source, address + 100, target))
    assert (target == pattern(1, 2 * PAGE)[100 : 100 + PAGE]).all()
    if case.enforces_registration:
        with pytest.raises(SourceFailed, match="not registered"):
            asyncio.run(read_one(engine, source, address + 99, target))


def test_deregistering_what_is_not_registered_is_an_error(engine):
    """One end too many would take away somebody else's registration."""
    engine.register(PAGE, 8)
    engine.deregister(PAGE, 8)
    for nbytes in (8, 4):
        with pytest.raises(NotRegistered):
            engine.deregister(PAGE, nbytes)


def test_a_passed_deadline_is_a_failed_source(engine, source):
    """No read outlives its deadline, a small one or a large one."""
    address = served(source, 9 * MIB)
    for nbytes in (8, 9 * MIB):
        with pytest.raises(SourceFailed, match=r"not done within 0"):
            asyncio.run(read_one(engine, source, address, np.zeros(nbytes, dtype=np.uint8), timeout_s=0.0))


def test_concurrent_reads_do_not_mix(engine, source):
    """Several reads in flight, large and small, each with its own bytes."""
    sizes = [9 * MIB, 8, 10 * MIB, MIB, 12 * MIB]
    addresses = [served(source, nbytes, seed) for seed, nbytes in enumerate(sizes)]
    targets = [np.zeros(nbytes, dtype=np.uint8) for nbytes in sizes]

    async def read_all() -> None:
        await asyncio.gather(*(read_one(engine, source, a, t) for a, t in zip(addresses, targets, strict=True)))

    asyncio.run(read_all())
    for seed, target in enumerate(targets):
        assert (target == pattern(seed, len(target))).all()


def test_a_cancelled_read_leaves_local_memory_alone(engine, source):
    """timeout_then_late_write: once a cancelled read has raised, no late byte lands."""
    address = served(source, 48 * MIB)
    target = np.zeros(48 * MIB, dtype=np.uint8)

    async def cancel_early() -> None:
        task = asyncio.create_task(read_one(engine, source, address, target))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        target[:] = 0xEE

    asyncio.run(cancel_early())
    asyncio.run(read_one(engine, source, address, np.zeros(9 * MIB, dtype=np.uint8)))
    assert (target == 0xEE).all()


def test_a_malformed_locator_is_no_peer(engine):
    """Bytes that are no locator of this engine reach nobody."""
    for locator in (b"", b"\xc1", b"another engine's"):
        with pytest.raises(EngineUnavailable):
            asyncio.run(engine.read(locator, Ranges(u64(PAGE), u64(PAGE), u64(8)), TIMEOUT_S))


def test_close_is_idempotent_and_gives_everything_back(case, source):
    """register_cycle_1000: descriptors and threads are as before; a closed engine says so instead of working on."""
    address = served(source, 9 * MIB)
    asyncio.run(case.open_engine().close())  # what it takes to load a library stays
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    engine = case.open_engine()
    target = np.zeros(9 * MIB, dtype=np.uint8)

    async def live() -> None:
        await read_one(engine, source, address, target)
        await engine.close()
        await engine.close()
        with pytest.raises(Closed):
            await read_one(engine, source, address, target)

    asyncio.run(live())
    with pytest.raises(Closed):
        engine.register(PAGE, 8)
    assert len(os.listdir("/proc/self/fd")) <= fds  # what an earlier test left may have gone meanwhile
    while len(os.listdir("/proc/self/task")) > threads:  # a joined thread is listed a moment longer
        os.sched_yield()


def test_close_ends_reads_in_flight(case, source):
    """A read under way when its engine closes ends, and says why."""
    address = served(source, 64 * MIB)
    engine = case.open_engine()
    target = np.zeros(64 * MIB, dtype=np.uint8)

    async def close_early() -> None:
        task = asyncio.create_task(read_one(engine, source, address, target))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(Closed, match="during a read"):
            await task

    asyncio.run(close_early())
