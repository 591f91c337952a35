"""A granted source, as a reader sees it: who it is, whose fault its failure is, and small reads of what it shows.

Decides nothing: which source it is, the server says; what to read when, `follow.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import xxhash

from tensorhub.errors import SourceFailed
from tensorhub.pipeline.exposure import Exposure
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.ports import Engine, Ranges
from tensorhub.types import Digest, Generation, SessionId

#: No rise of the source's watermark and no byte landed for this long, or a single read that takes longer: the source
#: counts as stalled. The first read is of one chunk, at most 8 MiB: below 1 MB/s nobody should read from a source.
STALL_S = 10.0
#: A manifest of a million tensors takes about 60 MB; larger ones are a mistake or an attack.
METADATA_BYTES_MAX = 512 << 20


class Blame(enum.Enum):
    """Whose failure a failed source is: what to try next depends on it."""

    #: A read failed, or brought wrong bytes: another engine may do better with the same source.
    ENGINE = "engine"
    #: The source says itself that it is not what was granted: no engine can help.
    SOURCE = "source"
    #: Nothing happened for too long: asking the same source again would cost as much again.
    SILENCE = "silence"


@dataclass(frozen=True, slots=True)
class Source:
    """A granted source: who, over which engine, and what the grant says that its progress block must show."""

    name: str
    engine: Engine
    peer: bytes
    exposure: Exposure
    incarnation: SessionId
    generation: Generation
    manifest: Digest
    #: False when it may not show this generation yet: it was granted a source of its own a moment ago.
    begun: bool = True


async def fetch(engine: Engine, peer: bytes, address: int, nbytes: int, timeout_s: float = STALL_S) -> bytes:
    """A small one-sided read into fresh memory: zeros, so that what did not land is not taken for an old answer."""
    if not 0 < nbytes <= METADATA_BYTES_MAX:
        raise SourceFailed(f"a source offers metadata of {nbytes} bytes; the limit is {METADATA_BYTES_MAX}")
    target = np.zeros(nbytes, dtype=np.uint8)
    await engine.read(peer, _one(address, target.ctypes.data, nbytes), timeout_s)
    return target.tobytes()


async def fetch_map(
    engine: Engine, peer: bytes, exposure: Exposure, stream_bytes: int, timeout_s: float = STALL_S
) -> MemoryMap:
    """The source's memory map, checked against the exposure and against the stream it must tile."""
    encoded = await fetch(engine, peer, exposure.map, exposure.map_bytes, timeout_s)
    if xxhash.xxh3_64_intdigest(encoded) != exposure.map_check:
        raise SourceFailed("the source's memory map does not match its checksum: it changed, or was read torn")
    return MemoryMap.decode(encoded, stream_bytes)


def _one(remote: int, local: int, nbytes: int) -> Ranges:
    return Ranges(*(np.array([value], dtype=np.uint64) for value in (remote, local, nbytes)))
