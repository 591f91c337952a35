"""The engine over the Mooncake Transfer Engine: RDMA, TCP, EFA and Ascend, by configuration.

Decides who is reached, who a peer is, and when a read is over for its caller: at our deadline, whatever Mooncake's
may be. What moves bytes is in `mooncake_read.py`, what knows the library in `mooncake_library.py`. Whoever knows an
address of ours reads what is registered: Mooncake cannot be closed by us.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tensorhub.addresses import is_loopback
from tensorhub.errors import Closed, EngineUnavailable, NotRegistered, SourceFailed, TensorHubError
from tensorhub.ports import Chunks, Ranges
from tensorhub.transport import mooncake_library
from tensorhub.transport.mooncake_library import KINDS, PROTOCOL_ENV, Library
from tensorhub.transport.mooncake_read import CELL_S, Place, Transfer, identify
from tensorhub.transport.processes import Identity
from tensorhub.transport.ranges import check_ranges
from tensorhub.transport.route import ADVERTISE_ENV

#: Each carries one read, asks and copies; the bytes are moved by Mooncake's own threads.
READ_THREADS_MAX = 4
#: Peers that are met for the first time at once. Mooncake waits a minute for one that is stopped.
MEET_THREADS_MAX = 16
#: Peers that are remembered as met; meeting one anew costs two round trips.
PEERS_MAX = 1024
#: How long a read that ended for its caller may take to notice; afterwards it is left to itself, harmless.
SETTLE_S = 0.25
#: The same where the device writes to the caller's memory: after that it is forbidden to, for good.
TERMINAL_S = 30.0
#: Where requests that failed are known never to write later. Others land in slabs.
DIRECT_PROTOCOLS = frozenset({"rdma", "efa", "ascend"})
#: Smaller ranges are cheaper together, through slabs.
DIRECT_BYTES_MIN = 64 << 10


def is_worth_opening() -> bool:
    """Whether it has more to offer here than sockets: this host has a device for RDMA, or the user chose a protocol."""
    return mooncake_library.has_rdma_device() or PROTOCOL_ENV in os.environ


class MooncakeEngine:
    """`ports.Engine` over this process's one Transfer Engine, which all engines of one host and protocol share."""

    name = "mooncake"

    def __init__(self, host: str, library: Library | None = None) -> None:
        """`host` is this host's number for its peers; `library` stands in for the real one in tests."""
        self._library = library or mooncake_library.acquire(host, mooncake_library.default_protocol())
        self._is_shared = library is None
        self.kinds = KINDS[self._library.protocol]
        self._boot = Identity.own().boot
        self._pid = os.getpid()
        #: Guards what this engine has registered: {(address, nbytes): how often}, never 0. In any thread.
        self._lock = threading.Lock()
        self._mine: Counter[tuple[int, int]] = Counter()
        self._readers = ThreadPoolExecutor(READ_THREADS_MAX, thread_name_prefix="tensorhub-mooncake")
        self._meeters = ThreadPoolExecutor(MEET_THREADS_MAX, thread_name_prefix="tensorhub-meet")
        #: First contacts, under way or made: whoever meets a peer at the same time waits for the same one.
        self._meetings: dict[Place, Future[TensorHubError | None]] = {}
        #: {what `close` resolves: what it waits for}, one for each read in flight.
        self._reads: dict[asyncio.Future[None], asyncio.Future[None]] = {}
        #: Whether a thread was left in a call of the library that did not return; closing does not wait for it.
        self._left_behind = False
        self._closed = False

    def locate(self) -> bytes:
        self._check_open()
        mine = self._library
        return Place(self._boot, mine.address, mine.protocol, mine.incarnation, mine.cell).pack()

    def reaches(self, peer: bytes) -> str | None:
        """Why a peer is out of reach, or None. A dead one is not: reading from it tells what happened."""
        try:
            return self._why_unreachable(Place.unpack(peer))
        except EngineUnavailable as error:
            return error.message

    def register(self, address: int, nbytes: int) -> None:
        self._check_open()
        self._library.registered.add(address, nbytes)
        with self._lock:
            self._mine[address, nbytes] += 1

    def deregister(self, address: int, nbytes: int) -> None:
        with self._lock:
            if not self._mine[address, nbytes]:
                raise NotRegistered(
                    f"{nbytes} bytes at {address:#x} are not registered; deregister what was registered"
                )
            self._mine[address, nbytes] -= 1
            if not self._mine[address, nbytes]:
                del self._mine[address, nbytes]
        self._library.forget(address, nbytes)

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        check_ranges(ranges)
        self._check_open()
        place = Place.unpack(peer)
        if (why := self._why_unreachable(place)) is not None:
            raise EngineUnavailable(why)
        transfer = Transfer(self._library, place, ranges, timeout_s, chunks, is_direct=self._lands_in_place(ranges))
        loop = asyncio.get_running_loop()
        stop, gone = loop.create_future(), loop.create_future()
        self._reads[stop] = gone
        try:
            error = await self._meet(place, transfer, stop) or await self._carry_out(transfer, stop)
        finally:
            del self._reads[stop]
            gone.set_result(None)
        if error is not None:
            if isinstance(error, SourceFailed):
                self._forget(place)
            raise error

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            for stop in self._reads:
                if not stop.done():
                    stop.set_result(None)
            while self._reads:
                await asyncio.wait(list(self._reads.values()))
            self._readers.shutdown(wait=not self._left_behind, cancel_futures=True)
            self._meeters.shutdown(wait=all(meeting.done() for meeting in self._meetings.values()))
            with self._lock:
                mine, self._mine = list(self._mine.elements()), Counter()
            for address, nbytes in mine:
                self._library.forget(address, nbytes)
            if self._is_shared:
                mooncake_library.release(self._library)

    async def _meet(self, place: Place, transfer: Transfer, stop: asyncio.Future[None]) -> TensorHubError | None:
        """Ask a peer that was not met yet who it is; why it must not be read from, or None.

        In a thread of its own, by a call that holds up nobody else: Mooncake lets every other peer wait while it
        opens the way to one.
        """
        meeting = self._meetings.get(place)
        if meeting is None:
            if len(self._meetings) >= PEERS_MAX:
                self._forget(next((met for met, past in self._meetings.items() if past.done()), place))
            meeting = self._meetings[place] = self._meeters.submit(self._greet, place)
        if not meeting.done():
            await self._wait(asyncio.wrap_future(meeting), transfer.left_s(), stop)
        if stop.done():
            return Closed("the engine was closed during a read")
        if not meeting.done():
            return transfer.late()
        error = meeting.result()
        if error is not None:
            self._forget(place)
        return error

    def _forget(self, place: Place) -> None:
        """Whoever reads from it next meets it anew, or waits for the meeting that is still under way."""
        meeting = self._meetings.get(place)
        if meeting is not None and meeting.done():
            del self._meetings[place]

    def _greet(self, place: Place) -> TensorHubError | None:
        try:
            name = self._library.peer_name(place.address, place.incarnation)
            code = self._library.probe(name)
            if code != 0:
                return EngineUnavailable(f"Mooncake gets no answer from {place.address}: its probe says {code}")
            return identify(self._library, place, name, CELL_S)
        except TensorHubError as error:
            return error

    async def _carry_out(self, transfer: Transfer, stop: asyncio.Future[None]) -> TensorHubError | None:
        """Return, or raise when cancelled, when the transfer touches the caller's memory no more."""
        try:
            job = self._readers.submit(transfer.run)
        except RuntimeError as error:
            raise Closed("this process is ending") from error
        work = asyncio.wrap_future(job)
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._wait(work, transfer.left_s(), stop)
        except asyncio.CancelledError as error:
            cancelled = error
        if not job.done():
            transfer.end()
            job.cancel()  # one that still waits for a thread never starts
            settle_until = time.monotonic() + (TERMINAL_S if transfer.is_direct else SETTLE_S)
            while not job.done() and time.monotonic() < settle_until:
                try:
                    await asyncio.wait([work], timeout=settle_until - time.monotonic())
                except asyncio.CancelledError as error:
                    cancelled = error
        if not job.done():
            transfer.abandon()
            self._left_behind = True
        if cancelled is not None:
            raise cancelled
        if job.done() and not job.cancelled() and not transfer.is_ended:
            return job.result()
        return Closed("the engine was closed during a read") if stop.done() else transfer.late()

    async def _wait(
        self, work: asyncio.Future[TensorHubError | None], timeout_s: float, stop: asyncio.Future[None]
    ) -> None:
        pending: list[asyncio.Future[Any]] = [work, stop]
        await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    def _lands_in_place(self, ranges: Ranges) -> bool:
        if self._library.protocol not in DIRECT_PROTOCOLS or ranges.total_bytes < DIRECT_BYTES_MIN * len(ranges.nbytes):
            return False
        places = zip(ranges.local.tolist(), ranges.nbytes.tolist(), strict=True)
        return all(self._library.registered.covers(address, nbytes) for address, nbytes in places)

    def _why_unreachable(self, place: Place) -> str | None:
        mine = self._library
        if place.protocol != mine.protocol:
            return f"the source's Mooncake speaks {place.protocol}, this one {mine.protocol}"
        if is_loopback(place.address.host) and place.boot != self._boot:
            return (
                f"the source, on another host, shows the loopback address {place.address}; "
                f"{ADVERTISE_ENV} there names another"
            )
        if (":" in place.address.host) != (":" in mine.address.host):
            return f"the source's Mooncake is at {place.address}, this one at {mine.address}: it speaks one IP family"
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this engine is closed; open another")
        if os.getpid() != self._pid:
            raise Closed(f"this engine belongs to process {self._pid}; open another after a fork")
        if self._library.is_revoked:
            raise EngineUnavailable(
                "Mooncake did not end a read long after its deadline: this process took all memory back from it; "
                "restart the process to use it again"
            )
