"""The engine within one process: copies, from registered ranges only. The verified fake of all other engines.

Enforces what others can only promise: a byte that is not registered is not read. Uses no thread and no clock but the
event loop's, so it runs under virtual time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref

from tensorhub import native
from tensorhub.errors import Closed, EngineUnavailable, SourceFailed, Where
from tensorhub.ports import HOST_ONLY, Chunks, Ranges
from tensorhub.transport.landing import digest_landed
from tensorhub.transport.locators import packed, unpacked
from tensorhub.transport.ranges import RegisteredRanges, check_ranges, slices

#: Copied at once: about 2 ms, after which the loop, the deadline and a `deregister` get their turn.
SLICE_BYTES = 16 << 20

_numbers = itertools.count(1)
#: {number: engine} of this process's open engines. Weak: an engine that nobody holds serves nobody.
_engines: weakref.WeakValueDictionary[int, MemoryEngine] = weakref.WeakValueDictionary()
_process: tuple[int, bytes] = (0, b"")


def _process_token() -> bytes:
    """Random id of this process; a forked child gets its own, for it cannot serve its parent's memory."""
    global _process  # noqa: PLW0603 - one value per process is the point
    if _process[0] != os.getpid():
        _process = (os.getpid(), os.urandom(16))
    return _process[1]


class MemoryEngine:
    """`ports.Engine` between any two engines of one process."""

    name = "memory"
    kinds = HOST_ONLY

    def __init__(self) -> None:
        self._token = _process_token()
        self._number = next(_numbers)
        self._registered = RegisteredRanges()
        #: Held while bytes are copied out of this engine's ranges, so that memory may be freed once `deregister`
        #: returned, also when the reader runs in another thread. A queue would make `deregister` wait for a loop.
        self._copying = threading.Lock()
        self._closed = False
        _engines[self._number] = self

    def locate(self) -> bytes:
        return packed([self._token, self._number])

    def reaches(self, peer: bytes) -> str | None:
        """Why a peer is out of reach, or None."""
        try:
            token, _ = _parse(peer)
        except EngineUnavailable as error:
            return error.message
        return None if token == _process_token() else "the source is in another process"

    def register(self, address: int, nbytes: int) -> None:
        if self._closed:
            raise Closed("this engine is closed; open another")
        self._registered.add(address, nbytes)

    def deregister(self, address: int, nbytes: int) -> None:
        with self._copying:
            self._registered.remove(address, nbytes)

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        check_ranges(ranges)
        if (why := self.reaches(peer)) is not None:
            raise EngineUnavailable(why)
        number = _parse(peer)[1]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        _source(number).check_served(ranges, 0)
        done = 0
        for piece in slices(ranges, SLICE_BYTES):
            if self._closed:
                raise Closed("this engine was closed during a read")
            if loop.time() >= deadline:
                raise SourceFailed(f"a read was not done within {timeout_s} s", Where(bytes_done=done))
            _source(number).copy_out(piece, done)
            done += piece.total_bytes
            await asyncio.sleep(0)
        if chunks is not None:
            digest_landed(ranges, chunks)

    async def close(self) -> None:
        with self._copying:
            self._closed = True
            self._registered.clear()
        _engines.pop(self._number, None)

    def check_served(self, ranges: Ranges, bytes_done: int) -> None:
        """`SourceFailed`, naming the first range of the batch that is not wholly registered here."""
        at = self._registered.first_uncovered(ranges.remote, ranges.nbytes)
        if at is not None:
            raise SourceFailed(
                f"the source does not serve {ranges.nbytes[at]} bytes at {int(ranges.remote[at]):#x} (not registered)",
                Where(bytes_done=bytes_done),
            )

    def copy_out(self, ranges: Ranges, bytes_done: int) -> None:
        """Copy a batch to its local ranges, if every byte is still registered."""
        with self._copying:
            self.check_served(ranges, bytes_done)
            native.copy_ranges(ranges.remote, ranges.local, ranges.nbytes)


def _source(number: int) -> MemoryEngine:
    source = _engines.get(number)
    if source is None:
        raise SourceFailed(f"the source's engine {number} is closed")
    return source


def _parse(peer: bytes) -> tuple[bytes, int]:
    token, number = unpacked(peer, {"token": bytes, "number": int}).values()
    return token, number  # type: ignore[return-value]  # checked: they are of these types
