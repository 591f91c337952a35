"""The engine between processes of one host whose memory is on CUDA devices: IPC handles, and `local` for host memory.

Decides over which way each range goes. A handle opens a whole allocation, so what lies beside a registered range can be
read, too: as with `local`, every process of the same user is trusted. What is enforced is identity: a read counts only
if the process that was located is alive after the last byte.

    source \\ destination   host                          device
    host                   process_vm_readv              process_vm_readv, then a copy by the device
    device                 opened handle, a copy by a device, either way
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest, Broken, Closed, EngineUnavailable, SourceFailed
from tensorhub.ports import Chunks, Ranges
from tensorhub.transport.crew import Crews
from tensorhub.transport.cuda_copies import Copies, Copy, Stop
from tensorhub.transport.cuda_driver import CudaDriver, CudaFailure
from tensorhub.transport.cuda_exports import ROW, Exports, Locator, Rows, rows_of
from tensorhub.transport.landing import digest_landed
from tensorhub.transport.local import LocalEngine
from tensorhub.transport.processes import Identity, Peers
from tensorhub.transport.ranges import check_ranges, slices

#: Host memory of another process passes here on its way to a device.
BOUNCE_BYTES = 16 << 20
#: Tables of peers that are kept: a host has no more accelerators, and a peer one or two buffer sets.
TABLES_FETCHED_MAX = 64
#: Which device copies to host memory: any can, and every process has a first one.
HOST_ORDINAL = 0


class CudaIpcEngine:
    """`ports.Engine` between processes of one host and user, for host and CUDA memory."""

    name = "cuda_ipc"
    kinds = frozenset({"host", "cuda"})

    def __init__(self, driver: CudaDriver | None = None) -> None:
        self._driver = driver if driver is not None else CudaDriver()
        self._local = LocalEngine()
        self._exports = Exports(self._driver)
        self._peers = Peers()
        #: Touched in the pool's one thread only, or while it is idle.
        self._copies = Copies(self._driver)
        self._pool: ThreadPoolExecutor | None = None
        self._crews = Crews()
        self._closed = False
        #: {locator: its table}, the last ones.
        self._tables: dict[bytes, tuple[Locator, Rows]] = {}

    def locate(self) -> bytes:
        return self._exports.locator(self._local.locate()).pack()

    def reaches(self, peer: bytes) -> str | None:
        """Why a peer is out of reach, or None."""
        try:
            return self._local.reaches(Locator.unpack(peer).identity)
        except EngineUnavailable as error:
            return error.message

    def register(self, address: int, nbytes: int) -> None:
        """`EngineUnavailable` for device memory that cannot be exported: then it has to be staged."""
        if self._closed:
            raise Closed("this engine is closed; open another")
        if nbytes <= 0 or address <= 0 or not self._exports.add(address, nbytes):
            self._local.register(address, nbytes)

    def deregister(self, address: int, nbytes: int) -> None:
        if not self._exports.remove(address, nbytes):
            self._local.deregister(address, nbytes)

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        """As the port says; digests only of chunks that land in host memory."""
        deadline = time.monotonic() + timeout_s
        check_ranges(ranges)
        if self._closed:
            raise Closed("this engine is closed; open another")
        locator, table = await self._table(peer, timeout_s)
        there = rows_of(table["base"], table["nbytes"], ranges.remote, ranges.nbytes)
        here = self._exports.devices_of(ranges.local, ranges.nbytes)
        if ((there < 0) & (here < 0)).all():
            await self._local.read(locator.identity, ranges, _left_s(deadline), chunks)
            return
        if chunks is not None and (here[: int(chunks.firsts[-1])] >= 0).any():
            raise BadRequest("what lands on a device is digested there, by its reader, not by this engine")
        process = self._peers.enter(Identity.unpack(locator.identity))
        try:
            await self._read(locator, table, ranges, (there, here), deadline)
            if not process.alive():
                await self._in_thread(_done(lambda: self._copies.unmap(locator.identity)), Stop(), deadline)
                raise SourceFailed(f"the source's process {process.identity.pid} died")
            if chunks is not None:
                await self._in_thread(_done(lambda: digest_landed(ranges, chunks)), Stop(), deadline)
        except _Late:
            raise SourceFailed(f"a read of {ranges.total_bytes} bytes was not done within {timeout_s:g} s") from None
        finally:
            self._peers.leave(process)

    async def close(self) -> None:
        self._closed = True
        await self._crews.end()
        if self._pool is not None:
            self._pool.shutdown()  # its thread is idle by now
            self._pool = None
        self._peers.close()
        await self._local.close()
        self._exports.clear()
        self._tables.clear()
        try:
            self._copies.close()
            self._driver.close()
        except CudaFailure as error:
            raise Broken(f"CUDA memory of peers could not be given back: {error}") from error

    async def _read(
        self,
        locator: Locator,
        table: Rows,
        ranges: Ranges,
        places: tuple[NDArray[np.int64], NDArray[np.int64]],
        deadline: float,
    ) -> None:
        """Each range its way; `places` are the rows of the source's table, and the devices here."""
        there, here = places
        if (near := (there < 0) & (here < 0)).any():
            await self._local.read(locator.identity, _some(ranges, near), _left_s(deadline))
        if (through := (there < 0) & (here >= 0)).any():
            await self._bounce(locator, _some(ranges, through), here[through], deadline)
        if (across := there >= 0).any():
            far, rows = _some(ranges, across), there[across]
            ordinals = np.where(here[across] >= 0, here[across], HOST_ORDINAL)
            stop = Stop()

            def copy() -> bool:
                bases = table["base"][rows]
                mapped = bases
                if locator.origin != self._driver.origin:  # a process cannot open its own handles
                    mapped = self._copies.map(locator.identity, table, rows, ordinals)
                sources = mapped + (far.remote - bases)
                return self._copies.run(Copy(sources, far.local, far.nbytes, ordinals), deadline, stop)

            await self._in_thread(copy, stop, deadline)

    async def _bounce(self, locator: Locator, ranges: Ranges, ordinals: NDArray[np.int64], deadline: float) -> None:
        """From another process's host memory to devices of ours, through memory of this process."""
        bounce = np.empty(min(BOUNCE_BYTES, ranges.total_bytes), dtype=np.uint8)
        for ordinal in np.unique(ordinals):
            for piece in slices(_some(ranges, ordinals == ordinal), BOUNCE_BYTES):
                places = np.cumsum(piece.nbytes, dtype=np.uint64) - piece.nbytes + np.uint64(bounce.ctypes.data)
                landing = Ranges(piece.remote, places, piece.nbytes)
                await self._local.read(locator.identity, landing, _left_s(deadline))
                copy = Copy(places, piece.local, piece.nbytes, np.full(len(places), ordinal))
                stop = Stop()
                await self._in_thread(_work(self._copies, copy, deadline, stop), stop, deadline)

    async def _table(self, peer: bytes, timeout_s: float) -> tuple[Locator, Rows]:
        """The peer's exported allocations, ascending; `SourceFailed` when it has others by now."""
        if (known := self._tables.get(peer)) is not None:
            return known
        locator = Locator.unpack(peer)
        table = np.zeros(locator.table_bytes // ROW.itemsize, dtype=ROW)
        if len(table):
            place = (np.array([value], dtype=np.uint64) for value in (locator.table, table.ctypes.data, table.nbytes))
            await self._local.read(locator.identity, Ranges(*place), timeout_s)
        if not locator.is_of(table):
            raise SourceFailed("the source's table of CUDA allocations is not the one that was offered")
        if len(self._tables) >= TABLES_FETCHED_MAX:
            del self._tables[next(iter(self._tables))]
        self._tables[peer] = locator, table
        return locator, table

    async def _in_thread(self, work: Callable[[], bool], stop: Stop, deadline: float) -> None:
        """Work in the one thread that copies; return when it is over, also when cancelled. `_Late` if not done by then,
        `Closed` if that is because the engine closes."""
        done = threading.Event()

        def run() -> None:
            if work():
                done.set()

        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="tensorhub-cuda")
        try:
            await self._crews.run(self._pool, run, stop.set, 1, int(deadline * 1e9))
        except CudaFailure as error:
            raise EngineUnavailable(f"CUDA memory of the source could not be copied: {error}") from error
        if self._closed:
            raise Closed("the engine was closed during a read")
        if not done.is_set():
            raise _Late


class _Late(Exception):
    """The deadline passed before every byte had landed; `read` says of what."""


def _done(work: Callable[[], None]) -> Callable[[], bool]:
    """Work that is done when it returns."""

    def run() -> bool:
        work()
        return True

    return run


def _work(copies: Copies, copy: Copy, deadline: float, stop: Stop) -> Callable[[], bool]:
    return lambda: copies.run(copy, deadline, stop)


def _some(ranges: Ranges, chosen: NDArray[np.bool_]) -> Ranges:
    return Ranges(ranges.remote[chosen], ranges.local[chosen], ranges.nbytes[chosen])


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
