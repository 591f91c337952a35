"""What this process shows of one buffer set: the progress block, the manifest and the map, in registered memory.

A holding decides nothing. It writes what its owner says, in the one order that readers rely on: digests first, then
the header that covers them; the generation is zeroed before anything may be overwritten. Memory is allocated once
and reused by every version with the same manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from tensorhub import native
from tensorhub.errors import Broken, EngineUnavailable
from tensorhub.messages import Content, Locator
from tensorhub.pipeline.exposure import HEADER_BYTES, Exposure, Header, block_bytes
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.ports import HOST_ONLY, U64, Engine
from tensorhub.types import NO_GENERATION, Generation, SessionId

if TYPE_CHECKING:
    from tensorhub.client.buffers import Buffers
    from tensorhub.pipeline.manifest import Manifest


#: Engines within a host that know addresses of host memory alone: they have no say in whether devices are staged.
HOST_ADDRESSES_ONLY = ("memory", "local")

_log = logging.getLogger(__name__)


class Holding:
    """One buffer set as others see it. Invariant: the header in memory is always one that was packed whole."""

    def __init__(self, buffers: Buffers, engines: Sequence[Engine], incarnation: SessionId) -> None:
        self.buffers = buffers
        self.manifest: Manifest = buffers.manifest
        self.memory: MemoryMap = buffers.memory
        self.generation = NO_GENERATION
        self.watermark = 0
        self._digests_valid = True
        self._beats = 0
        kinds = buffers.on_device.kinds if buffers.on_device is not None else frozenset()
        #: Those that take every address of the map: no other could bring a reader all bytes.
        self._engines = taking(engines, kinds)
        self._incarnation = incarnation
        self._chunks = self.manifest.chunks
        self._block = np.zeros(block_bytes(self._chunks), dtype=np.uint8)
        self._manifest = np.frombuffer(self.manifest.encode(), dtype=np.uint8)
        encoded_map = self.memory.encode()
        self._map = np.frombuffer(encoded_map, dtype=np.uint8)
        #: Digest per chunk, in stream order: a view of the block. Written only at or above the watermark.
        self.digests: U64 = self._block[HEADER_BYTES:].view(np.uint64)
        self._registered: list[tuple[Engine, int, int]] = []
        try:
            for address, nbytes in [*buffers.regions, *(_range(a) for a in (self._block, self._manifest, self._map))]:
                for engine in self._engines:
                    engine.register(address, nbytes)
                    self._registered.append((engine, address, nbytes))
        except BaseException:
            self.close()
            raise
        self.exposure = Exposure(
            self._block.ctypes.data,
            self._chunks,
            self._manifest.ctypes.data,
            self._manifest.nbytes,
            self._map.ctypes.data,
            self._map.nbytes,
            xxhash.xxh3_64_intdigest(encoded_map),
        ).pack()
        self._write()

    @property
    def block(self) -> int:
        """Address of the header of the progress block."""
        return int(self._block.ctypes.data)

    @property
    def locators(self) -> tuple[Locator, ...]:
        return tuple(Locator(engine.name, engine.locate()) for engine in self._engines)

    def content(self, verified: bool) -> Content:
        return Content(self.manifest.digest, self.manifest.stream_bytes, self._chunks, verified)

    def begin(self, generation: Generation, *, digests: bool) -> None:
        """A new filling: nothing of it may be read yet."""
        if self.generation != NO_GENERATION:
            raise Broken(f"a holding of generation {self.generation.hex()} was reused without being ended")
        self.generation, self.watermark, self._digests_valid = generation, 0, digests
        self._write()

    def raise_to(self, watermark: int) -> None:
        """The first `watermark` chunks may be read. Never falls within a generation."""
        if not self.watermark <= watermark <= self._chunks:
            raise Broken(f"watermark {watermark} after {self.watermark} of {self._chunks} chunks")
        if watermark != self.watermark:
            self.watermark = watermark
            self._write()

    def shown(self, watermark: int) -> None:
        """An engine that writes the header at `block` has shown so much, or more by now."""
        self.watermark = watermark

    def beat(self) -> None:
        """Nothing new, but this process lives."""
        self._beats += 1
        self._write()

    def end(self) -> None:
        """Invalidate the generation: a reader that still reads will know, before it can return success."""
        if self.generation != NO_GENERATION:
            self.generation, self.watermark = NO_GENERATION, 0
            self._write()

    def close(self) -> None:
        """Invalidate, then take all memory back from the engines, and raise what the first refusal was; idempotent."""
        self.end()
        close_all(partial(engine.deregister, address, nbytes) for engine, address, nbytes in self._give_up())

    def _give_up(self) -> Iterator[tuple[Engine, int, int]]:
        while self._registered:
            yield self._registered.pop()

    def _write(self) -> None:
        header = Header(
            self._incarnation,
            self.generation,
            self._chunks,
            self.watermark,
            self.manifest.digest,
            self._digests_valid,
            self._beats,
        )
        native.store(self._block.ctypes.data, header.pack())


def close_all(closings: Iterable[Callable[[], None]]) -> None:
    """Do all of it, whatever one of them raises; then raise the first such error."""
    failures: list[BaseException] = []
    for close in closings:
        try:
            close()
        except BaseException as failure:  # noqa: BLE001 - raised below, when all else is given back
            failures.append(failure)
    if failures:
        raise failures[0]


def show(buffers: Buffers, engines: Sequence[Engine], incarnation: SessionId) -> Holding:
    """These buffers, shown; staged in host memory if an engine turns out not to take the device memory they lie in."""
    try:
        return Holding(buffers, engines, incarnation)
    except EngineUnavailable as refusal:
        if buffers.on_device is None or not buffers.on_device.kinds:
            raise
        _log.warning("buffers %r are staged in host memory: %s", buffers.name, refusal.message)
        return Holding(buffers.staged(), engines, incarnation)


def direct_kinds(engines: Sequence[Engine]) -> frozenset[str]:
    """Kinds of device memory that need no staging: every engine reads them, but for those that know only a host's."""
    voters = [engine.kinds for engine in engines if engine.name not in HOST_ADDRESSES_ONLY]
    return frozenset.intersection(*voters) - HOST_ONLY if voters else frozenset()


def taking(engines: Sequence[Engine], kinds: frozenset[str]) -> Sequence[Engine]:
    """The engines that take addresses of these kinds of device memory besides the host's."""
    return [engine for engine in engines if kinds <= engine.kinds] if kinds else engines


def _range(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes
