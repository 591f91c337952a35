"""The seams between what decides and what does: engines that move bytes, links that carry messages.

Every implementation of a port passes the one conformance suite in `tests/conformance`. Exceptions of libraries are
translated here, once: an engine raises `SourceFailed` or `EngineUnavailable`, a link `ServerUnavailable`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tensorhub.messages import Answer, Call

T = TypeVar("T")

#: Memory that any engine reads.
HOST_ONLY = frozenset({"host"})
#: See `Course.told`.
TOLD_WORDS = 3
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """A batch of one-sided reads: range i copies `nbytes[i]` bytes from `remote[i]` to `local[i]`.

    Three arrays of equal length, shape (n,), dtype uint64; addresses are virtual addresses of the two processes.
    No two local ranges overlap; no range is empty.
    """

    remote: U64
    local: U64
    nbytes: U64

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Chunks that a batch consists of, to be digested as they land, while they are in the cache.

    Chunk c is ranges `firsts[c]` to `firsts[c + 1]` of the batch; its XXH3-64 is written to `digests[c]`. `firsts` has
    shape (chunks + 1,) and rises from 0; ranges behind the last chunk are only read.
    """

    firsts: U64
    digests: U64


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Chunks of a stream to be read from a source that may not have them yet, as its watermark passes them.

    Chunk i of the course is number `numbers[i]` of the `whole` chunks of the stream, and ranges `firsts[i]` to
    `firsts[i + 1]`. Of verified ones the first of these is the source's digest, 8 bytes, which lands where the reader
    keeps it. Both sides show their watermark in the header of a progress block (`pipeline/exposure.py`).
    """

    ranges: Ranges
    firsts: U64
    #: Ascending, shape (n,).
    numbers: U64
    whole: int
    is_verified: bool
    #: The header at the source, and the generation it must show.
    source_block: int
    generation: bytes
    #: Our own header, in which the verified prefix is shown the moment it grows; 0 for none.
    own_block: int
    #: Written while it runs: 1 for each chunk that is verified, shape (n,), uint8.
    done: NDArray[np.uint8]
    #: Written while it runs: chunks of the verified prefix, bytes verified, bytes landed with the digests among them.
    told: U64


@runtime_checkable
class Follower(Protocol):
    """An engine that can follow a source by itself: nothing of the interpreter is needed between two chunks."""

    async def follow(self, peer: bytes, course: Course, stall_s: float) -> None:
        """Return when every chunk of the course is verified, counted in `told` and shown.

        Raises as `Engine.read` does; `SourceFailed` also for a chunk that is not what its digest says and for another
        generation; `SourceSilent` after `stall_s` without a byte. After it returns or raises, nothing touches local
        memory any more; what is marked as done stays so.
        """
        ...


class Engine(Protocol):
    """Moves bytes one-sided. Safe to use from one event loop; its locator may be shown to anyone."""

    #: "memory", "local", "tcp", ...: what users write for `engine=`.
    name: str
    #: Kinds of memory ("host", "cuda", "npu") whose addresses it takes, registered or as the target of a read.
    kinds: frozenset[str]

    def locate(self) -> bytes:
        """How a peer's engine of the same name reaches this process; opaque to all others."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Allow peers to read a range. Ranges may overlap; each `register` needs its own `deregister`. Never empty."""
        ...

    def deregister(self, address: int, nbytes: int) -> None:
        """Undo one `register` of the same range: reads of bytes no longer registered fail."""
        ...

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        """Return when every byte of every range has landed, and the digests of `chunks`, of what landed, are written.

        `SourceFailed` when the peer is dead, recycled, too slow, or does not serve a range; `EngineUnavailable` when
        this engine cannot reach the peer at all.

        After it returns or raises, nothing of this read touches local memory any more.
        """
        ...

    async def close(self) -> None:
        """End what runs and give everything back; idempotent."""
        ...


class Connection(Protocol):
    """One open way to a server. Any method raises `ServerUnavailable` once the peer is gone."""

    async def send(self, call: Call) -> None:
        """Hand one call over, in order; waits only while the peer does not take more."""
        ...

    async def receive(self) -> Answer:
        """The next answer or notice."""
        ...

    async def close(self) -> None:
        """Idempotent; a waiting `receive` then raises."""
        ...


class Heart(Protocol):
    """Keeps a session's lease alive, whatever the interpreter does."""

    def acknowledged_ns(self) -> int:
        """Monotonic time at which the last acknowledged beat was *sent*; 0 before the first."""
        ...

    def failed(self) -> str | None:
        """Why beating ended (connection gone, session unknown to the server), or None while it goes on."""
        ...

    def stop(self) -> None:
        """End it; idempotent, waits for its thread."""
        ...


class Link(Protocol):
    """How to reach one server, again and again."""

    #: What users wrote, for errors: "local", "grpc://host:port", ...
    address: str

    async def own_host(self) -> str:
        """The number by which this server's other clients reach this host: its own, on the way to the server.

        A loopback number only where the server is reached by loopback: then everybody is on this host.
        """
        ...

    async def connect(self, timeout_s: float) -> Connection:
        """A fresh connection, or `ServerUnavailable` saying what was tried."""
        ...

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        """Start beating for a session that has said Hello."""
        ...


class Offload(Protocol):
    """Where blocking work (digests, copies) runs: a thread pool, or inline under virtual time."""

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work()`, which touches no event loop."""
        ...
