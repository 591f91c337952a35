"""Holders of one shard without a server: real registration, progress block and filling, over any engine.

A holder publishes what its tensors hold, or fills them from another holder; who reads from whom, the test says.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import torch

from tensorhub.client.holding import Holding
from tensorhub.client.registry import register
from tensorhub.errors import Where
from tensorhub.native import digest_runs
from tensorhub.pipeline.counter import Counter
from tensorhub.pipeline.digest import root_digest
from tensorhub.pipeline.exposure import Exposure
from tensorhub.pipeline.follow import Filling
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.source import Source, fetch_map
from tensorhub.ports import U64, Engine
from tensorhub.types import ID_BYTES, Digest, Generation, SessionId

HERE = Where(model="actor")
_ids = itertools.count(1)


def fresh() -> bytes:
    """An id that nobody else has."""
    return next(_ids).to_bytes(ID_BYTES, "little")


class Holder:
    """One process's buffers, as its readers see them."""

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], engine: Engine, version: Manifest | None = None
    ) -> None:
        self.name, self.engine = name, engine
        registered = register(tensors, name="a", where=HERE)
        self.buffers = registered if version is None else registered.adopt(version, HERE)
        self.session = SessionId(fresh())
        self.holding = Holding(self.buffers, [engine], self.session)
        self.holding.begin(Generation(fresh()), digests=True)
        self.counter = Counter(self.manifest.chunk_ends)
        #: Every watermark that it showed, in order.
        self.raised: list[int] = []

    @property
    def manifest(self) -> Manifest:
        return self.holding.manifest

    @property
    def root(self) -> Digest:
        """Of the digests that it shows."""
        return root_digest(self.manifest.digest, self.holding.digests)

    def source(self) -> Source:
        """What a grant would say of it."""
        return Source(
            self.name,
            self.engine,
            self.engine.locate(),
            Exposure.unpack(self.holding.exposure),
            self.session,
            self.holding.generation,
            self.manifest.digest,
        )

    def digest(self) -> None:
        """Digest what the tensors hold: nothing of it may be read yet."""
        self.buffers.snapshot()
        self.buffers.stage()
        self.holding.digests[:] = self.landed()

    def publish(self) -> None:
        """Show all that the tensors hold."""
        self.digest()
        self.raise_to(self.manifest.chunks)

    def landed(self) -> U64:
        """Digests of the bytes that its readers find, computed anew."""
        found = np.zeros(self.manifest.chunks, dtype=np.uint64)
        if len(found):
            runs = self.buffers.memory.chunk_runs(self.manifest.chunk_starts, self.manifest.chunk_ends)
            digest_runs(*runs, found)
        return found

    def raise_to(self, watermark: int) -> None:
        self.raised.append(watermark)
        self.holding.raise_to(watermark)

    def shown(self, watermark: int) -> None:
        self.raised.append(watermark)
        self.holding.shown(watermark)

    async def fill(self, source: Source, *, batch_bytes: int = 1, install: bool = True) -> None:
        """Fill what is missing from a source, in batches of at least so many bytes; `SourceFailed` as in a pull."""
        filling = Filling(
            self.manifest,
            self.buffers.memory,
            self.holding.digests,
            self.counter,
            self.raise_to,
            self.shown,
            lambda: None,
            verified=True,
            batch_bytes_min=batch_bytes,
            own_block=self.holding.block,
        )
        stream_bytes = self.manifest.stream_bytes
        source_map = await fetch_map(source.engine, source.peer, source.exposure, stream_bytes)
        await filling.read_from(source, source_map)
        if install:
            self.buffers.install()

    def close(self) -> None:
        self.holding.close()
