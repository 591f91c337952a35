"""Reads of device memory between two engines, as between two processes, over a fake driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash

from tensorhub.errors import BadRequest, Closed, EngineUnavailable, NotRegistered, SourceFailed
from tensorhub.ports import Chunks, Ranges
from tensorhub.transport import cuda_copies, cuda_driver, cuda_ipc
from tensorhub.transport.cuda_driver import CudaDriver
from tensorhub.transport.cuda_ipc import CudaIpcEngine
from tests.conformance.peer import pattern
from tests.support.fake_cuda import FakeCuda, FakeGpu

MIB = 1 << 20
TIMEOUT_S = 20.0


class Process:
    """One process that uses the GPU: its driver, its engine."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.cuda = FakeCuda(gpu)
        self.engine = CudaIpcEngine(CudaDriver(self.cuda))

    def allocate(self, nbytes: int, seed: int | None = None, ordinal: int = 0) -> int:
        """Registered device memory."""
        address = self.cuda.allocate(nbytes, ordinal)
        if seed is not None:
            self.cuda.write(address, pattern(seed, nbytes).tobytes())
        self.engine.register(address, nbytes)
        return address


@pytest.fixture
def pair() -> Iterator[tuple[Process, Process]]:
    gpu = FakeGpu()
    found = Process(gpu), Process(gpu)
    yield found
    for process in found:
        asyncio.run(process.engine.close())
        assert (process.cuda.opened, process.cuda.retained, process.cuda.streams) == ({}, 0, 0)
        process.cuda.close()
    gpu.close()


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


async def read(
    reader: Process, peer: bytes, remote: int, local: int, nbytes: int, chunks: Chunks | None = None
) -> None:
    await reader.engine.read(peer, Ranges(u64(remote), u64(local), u64(nbytes)), TIMEOUT_S, chunks)


def test_device_to_device_opens_the_handle_once(pair: tuple[Process, Process]) -> None:
    """Bytes cross between the devices of two processes; a second read uses the mapping of the first."""
    source, reader = pair
    there, here = source.allocate(3 * MIB, seed=1), reader.allocate(3 * MIB)
    for _ in range(2):
        asyncio.run(read(reader, source.engine.locate(), there + 5, here + 7, 2 * MIB))
    assert reader.cuda.peek(here + 7, 2 * MIB) == pattern(1, 3 * MIB)[5 : 5 + 2 * MIB].tobytes()
    assert reader.cuda.peek(here, 7) == bytes([reader.cuda.gpu.scramble]) * 7
    assert len(reader.cuda.opened) == 1


@pytest.mark.parametrize("way", ["device to host", "host to device", "host to host"])
def test_each_range_goes_its_way(pair: tuple[Process, Process], way: str) -> None:
    """Every pair of memories, more than one bounce buffer long; what the host can read by itself needs no device."""
    source, reader = pair
    nbytes = cuda_ipc.BOUNCE_BYTES + 4097
    data = pattern(2, nbytes)
    there = source.allocate(nbytes, seed=2) if way == "device to host" else data.ctypes.data
    target = np.zeros(nbytes, dtype=np.uint8)
    here = reader.allocate(nbytes) if way == "host to device" else target.ctypes.data
    asyncio.run(read(reader, source.engine.locate(), there, here, nbytes))
    landed = reader.cuda.peek(here, nbytes) if way == "host to device" else target.tobytes()
    assert landed == data.tobytes()
    assert (reader.cuda.copies == 0) == (way == "host to host")


def test_one_batch_of_all_kinds(pair: tuple[Process, Process]) -> None:
    """A buffer set mixes device and host memory, and so does a batch: data on devices, digests beside it."""
    source, reader = pair
    tensors, digests = source.allocate(MIB, seed=3), pattern(4, 64)
    here, target = reader.allocate(MIB), np.zeros(64, dtype=np.uint8)
    ranges = Ranges(
        u64(tensors + 100, digests.ctypes.data, tensors),
        u64(here + 100, target.ctypes.data, here),
        u64(MIB - 100, 64, 100),
    )
    asyncio.run(reader.engine.read(source.engine.locate(), ranges, TIMEOUT_S))
    assert reader.cuda.peek(here, MIB) == pattern(3, MIB).tobytes()
    assert target.tobytes() == digests.tobytes()


def test_chunks_that_land_in_host_memory_are_digested(pair: tuple[Process, Process]) -> None:
    """A reader without devices, or that stages, gets digests as from any engine; on a device its reader computes them,
    and an engine that is asked to says so instead of digesting something else."""
    source, reader = pair
    there, target = source.allocate(MIB, seed=5), np.zeros(MIB, dtype=np.uint8)
    chunks = Chunks(u64(0, 1), np.zeros(1, dtype=np.uint64))
    asyncio.run(read(reader, source.engine.locate(), there, target.ctypes.data, MIB, chunks))
    assert int(chunks.digests[0]) == xxhash.xxh3_64_intdigest(pattern(5, MIB).tobytes())
    here = reader.allocate(MIB)
    with pytest.raises(BadRequest, match="digested there"):
        asyncio.run(read(reader, source.engine.locate(), there, here, MIB, chunks))


def test_within_a_process_no_handle_is_needed(pair: tuple[Process, Process]) -> None:
    """A process cannot open its own handles: its addresses are used as they are."""
    process = pair[0]
    there, here = process.allocate(MIB, seed=6), process.allocate(MIB)
    asyncio.run(read(process, process.engine.locate(), there, here, MIB))
    assert process.cuda.peek(here, MIB) == pattern(6, MIB).tobytes()


def test_hundreds_of_allocations_fit_behind_one_locator(pair: tuple[Process, Process]) -> None:
    """A locator is small, whatever a source has registered: the handles lie in a table that readers fetch."""
    source, reader = pair
    addresses = [source.allocate(4096, seed=i) for i in range(300)]
    peer = source.engine.locate()
    assert len(peer) < 512
    target = np.zeros(4096, dtype=np.uint8)
    for i in (0, 150, 299):
        asyncio.run(read(reader, peer, addresses[i], target.ctypes.data, 4096))
        assert target.tobytes() == pattern(i, 4096).tobytes()


def test_a_table_that_is_gone_is_noticed(pair: tuple[Process, Process]) -> None:
    """aba_same_pointer: a locator from long ago names memory that holds something else; its checksum tells."""
    source, reader = pair
    there = source.allocate(MIB, seed=7)
    peer = bytearray(source.engine.locate())
    peer[-1] ^= 1
    with pytest.raises(SourceFailed, match="not the one that was offered"):
        asyncio.run(read(reader, bytes(peer), there, reader.allocate(MIB), MIB))


def test_what_a_peer_exports_no_more_is_given_back(pair: tuple[Process, Process]) -> None:
    """slept_source_withdrawn, register_cycle_1000: mappings follow the source's registrations."""
    source, reader = pair
    target = np.zeros(MIB, dtype=np.uint8)
    for seed in range(5):
        there = source.allocate(MIB, seed=seed)
        asyncio.run(read(reader, source.engine.locate(), there, target.ctypes.data, MIB))
        assert target.tobytes() == pattern(seed, MIB).tobytes()
        assert len(reader.cuda.opened) == 1
        source.engine.deregister(there, MIB)


def test_registrations_of_one_allocation_are_counted(pair: tuple[Process, Process]) -> None:
    """register_twice, overlapping_views: an allocation is exported while any range of it is registered."""
    source, reader = pair
    there = source.allocate(MIB, seed=8)
    source.engine.register(there, MIB)
    source.engine.register(there + 4096, 4096)
    target = np.zeros(MIB, dtype=np.uint8)
    for nbytes, at in ((MIB, there), (MIB, there)):
        source.engine.deregister(at, nbytes)
        asyncio.run(read(reader, source.engine.locate(), there, target.ctypes.data, MIB))
        assert target.tobytes() == pattern(8, MIB).tobytes()
    source.engine.deregister(there + 4096, 4096)
    with pytest.raises(NotRegistered):
        source.engine.deregister(there, MIB)


def test_memory_that_cannot_be_exported_says_so(pair: tuple[Process, Process]) -> None:
    """register_failure_is_fatal: expandable segments have no handle; the error names them, and nothing is half done."""
    process = pair[0]
    address = process.cuda.allocate(MIB)
    process.cuda.unexportable.add(address)
    with pytest.raises(EngineUnavailable, match=r"cuIpcGetMemHandle returned 1 \(invalid argument\).*expandable"):
        process.engine.register(address, MIB)
    with pytest.raises(EngineUnavailable, match="more than one allocation"):
        process.engine.register(process.cuda.allocate(MIB), 2 * MIB)


def test_a_handle_that_does_not_open_is_no_source_failure(pair: tuple[Process, Process]) -> None:
    """Devices that do not reach each other: another engine may; nothing is wrong with the source."""
    source, reader = pair
    there = source.allocate(MIB, seed=1)
    peer = source.engine.locate()
    source.cuda.free(there)
    with pytest.raises(EngineUnavailable, match="cuIpcOpenMemHandle_v2 returned 1"):
        asyncio.run(read(reader, peer, there, reader.allocate(MIB), MIB))


def test_the_driver_is_left_alone_until_a_device_is_used(pair: tuple[Process, Process]) -> None:
    """A process that has initialized CUDA is of no use to it after a fork: host memory alone never does."""
    source, reader = pair
    target, data = np.zeros(100, dtype=np.uint8), pattern(1, 100)
    source.engine.register(data.ctypes.data, 100)
    asyncio.run(read(reader, source.engine.locate(), data.ctypes.data, target.ctypes.data, 100))
    assert not source.cuda.is_initialized
    assert not reader.cuda.is_initialized


def test_a_deadline_ends_a_copy_and_nothing_lands_later(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """timeout_then_late_write: what was enqueued is waited for; a device that is stuck is told apart from a source."""
    source, reader = pair
    there, here = source.allocate(MIB, seed=1), reader.allocate(MIB)
    ranges = Ranges(u64(there), u64(here), u64(MIB))
    asyncio.run(read(reader, source.engine.locate(), there, here, 10))
    with pytest.raises(SourceFailed, match="not done within 0 s"):
        asyncio.run(reader.engine.read(source.engine.locate(), ranges, 0.0))
    assert reader.cuda.queued == []
    monkeypatch.setattr(cuda_copies, "STUCK_S", 0.0)
    reader.cuda.is_stuck = True
    with pytest.raises(EngineUnavailable, match="did not finish a copy"):
        asyncio.run(reader.engine.read(source.engine.locate(), ranges, 0.01))
    reader.cuda.is_stuck = False
    reader.cuda.cuStreamQuery(7)


def test_a_closed_engine_says_so(pair: tuple[Process, Process]) -> None:
    """Reads and registrations end with the engine."""
    source, reader = pair
    there = source.allocate(MIB, seed=1)
    asyncio.run(reader.engine.close())
    with pytest.raises(Closed):
        asyncio.run(read(reader, source.engine.locate(), there, there, MIB))
    with pytest.raises(Closed):
        reader.engine.register(there, MIB)


@pytest.mark.parametrize("locator", [b"", b"\xc1", b"\x95\x01\x02\x03\x04\x05", b"\x95\xc4\x01a\xc4\x01b\x01\x07\x01"])
def test_a_malformed_locator_reaches_nobody(pair: tuple[Process, Process], locator: bytes) -> None:
    """Bytes that are no locator of this engine are refused before anything is read."""
    assert "malformed" in (pair[0].engine.reaches(locator) or "")


def test_without_a_driver_the_engine_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names it learns what to install; "auto" passes over it."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-is-not-here.so.1")
    cuda_driver._load.cache_clear()
    try:
        assert "install NVIDIA's driver" in (cuda_driver.missing() or "")
        with pytest.raises(EngineUnavailable, match="no usable CUDA driver"):
            CudaIpcEngine()
    finally:
        cuda_driver._load.cache_clear()
