"""Relays over every engine: one whose memory is not what its digests say hands nothing of it on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import xxhash

from tensorhub.errors import SourceFailed
from tensorhub.pipeline.exposure import HEADER_BYTES, Exposure, Header, block_bytes
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.source import Source
from tensorhub.ports import Engine
from tensorhub.types import Generation, SessionId
from tests.conformance.peer import pattern
from tests.conformance.sources import CASES, Case, SourceHere, SourceProcess, usable
from tests.support.holders import Holder, fresh

CHUNKS = 9
CHUNK_BYTES = 64 << 10
#: The last chunk is shorter than the others.
NBYTES = CHUNKS * CHUNK_BYTES - 1000


@pytest.fixture(
    params=["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("local", "tcp", "mooncake"))]
)
def case(request) -> Case:
    return CASES[usable(request.param)]


class Relay:
    """A shard in the memory of another process, with progress block and map as a relay shows them."""

    def __init__(self, name: str, engine: Engine, memory: SourceHere | SourceProcess) -> None:
        self.name, self._engine, self._memory = name, engine, memory
        self.data = pattern(7, NBYTES)
        self.manifest = Manifest.build(["w"], ["uint8"], [(NBYTES,)], [NBYTES])
        self._session, self._generation = SessionId(fresh()), Generation(fresh())
        weights = self._put(self.data.tobytes())
        encoded = MemoryMap.tiled([weights], [NBYTES]).encode()
        self._map, self._map_bytes = self._put(encoded), len(encoded)
        self._check = xxhash.xxh3_64_intdigest(encoded)
        self._weights, self._block = weights, self._put(bytes(block_bytes(CHUNKS)))
        bounds = range(0, NBYTES, CHUNK_BYTES)
        self.digests = [xxhash.xxh3_64_intdigest(self.data[at : at + CHUNK_BYTES].tobytes()) for at in bounds]
        self._memory.poke(self._block + HEADER_BYTES, np.array(self.digests, dtype=np.uint64).tobytes())

    def show(self, watermark: int) -> None:
        header = Header(self._session, self._generation, CHUNKS, watermark, self.manifest.digest, digests=True)
        self._memory.poke(self._block, header.pack())

    def spoil(self, chunk: int, what: str) -> None:
        """One bit of a chunk, of its digest, or of both."""
        if what != "digest":
            at = min((chunk + 1) * CHUNK_BYTES, NBYTES) - 1
            self._memory.poke(self._weights + at, bytes([self.data[at] ^ 1]))
        if what != "bytes":
            self._memory.poke(self._block + HEADER_BYTES + 8 * chunk, (self.digests[chunk] ^ 1).to_bytes(8, "little"))

    def source(self) -> Source:
        exposure = Exposure(self._block, CHUNKS, 0, 0, self._map, self._map_bytes, self._check)
        peer = self._memory.locate()
        return Source(self.name, self._engine, peer, exposure, self._session, self._generation, self.manifest.digest)

    def _put(self, data: bytes) -> int:
        address = self._memory.map(len(data))
        self._memory.poke(address, data)
        self._memory.register(address, len(data))
        return address


@pytest.mark.parametrize("what", ["bytes", "digest", "both"])
@pytest.mark.parametrize("batch_bytes", [1, 3 * CHUNK_BYTES], ids=["chunks", "batches"])
def test_relay_does_not_propagate_corruption(
    engine: Engine, source: SourceHere | SourceProcess, what: str, batch_bytes: int
) -> None:
    """relay_does_not_propagate_corruption: one chunk of a relay, or its digest, is not what was verified. Its reader
    refuses it and says which, never shows that chunk nor any behind it, shows only right bytes, and completes from an
    honest holder."""

    async def main() -> None:
        honest = Relay("honest", engine, source)
        honest.show(CHUNKS)
        for wrong in (0, 4, CHUNKS - 1):
            relay = Relay("relay", engine, source)
            relay.spoil(wrong, what)
            relay.show(CHUNKS)
            ours = torch.zeros(NBYTES, dtype=torch.uint8)
            reader = Holder("reader", {"w": ours}, engine)
            try:
                with pytest.raises(SourceFailed, match=f"relay.* served wrong bytes: chunk {wrong} "):
                    await reader.fill(relay.source(), batch_bytes=batch_bytes)
                assert max(reader.raised, default=0) <= wrong
                assert reader.raised == sorted(reader.raised)
                shown = reader.holding.watermark
                assert reader.landed()[:shown].tolist() == honest.digests[:shown]
                await reader.fill(honest.source(), batch_bytes=batch_bytes)
                assert reader.raised == sorted(reader.raised)
                assert (reader.counter.bytes_done, reader.holding.watermark) == (NBYTES, CHUNKS)
                assert ours.numpy().tobytes() == honest.data.tobytes()
            finally:
                reader.close()

    asyncio.run(main())


def test_a_relay_that_turns_bad_hands_on_only_what_was_right(
    engine: Engine, source: SourceHere | SourceProcess
) -> None:
    """relay_does_not_propagate_corruption: a relay's memory is overwritten after half of it was read. The reader has
    the right half, refuses the rest, and shows its own readers nothing but the right half."""

    async def main() -> None:
        relay, half = Relay("relay", engine, source), CHUNKS // 2
        relay.show(half)
        reader = Holder("reader", {"w": torch.zeros(NBYTES, dtype=torch.uint8)}, engine)
        try:
            reading = asyncio.ensure_future(reader.fill(relay.source()))
            while reader.holding.watermark < half:
                assert not reading.done(), reading.exception()
                await asyncio.sleep(0)
            for chunk in range(CHUNKS):
                relay.spoil(chunk, "bytes")
            relay.show(CHUNKS)
            with pytest.raises(SourceFailed, match="served wrong bytes"):
                await reading
            assert reader.holding.watermark == half
            assert reader.landed()[:half].tolist() == relay.digests[:half]
        finally:
            reader.close()

    asyncio.run(main())
