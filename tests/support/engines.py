"""An engine that does what a test says before, after or instead of the real read. Never used outside tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tensorhub.client import runtime
from tensorhub.ports import Chunks, Engine, Ranges
from tensorhub.transport.landing import digest_landed

#: Reads up to this size are headers, maps and manifests; tests meddle with what is larger.
SMALL_BYTES = 4096


@dataclass
class Meddler:
    """Wraps an engine. `before` may wait or raise, `instead` replaces the read, `after` may spoil what landed."""

    inner: Engine
    before: Callable[[Ranges], Awaitable[None]] | None = None
    instead: Callable[[Ranges], Awaitable[bool]] | None = None
    after: Callable[[Ranges], None] | None = None
    reads: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    def locate(self) -> bytes:
        return self.inner.locate()

    def register(self, address: int, nbytes: int) -> None:
        self.inner.register(address, nbytes)

    def deregister(self, address: int, nbytes: int) -> None:
        self.inner.deregister(address, nbytes)

    def __getattr__(self, name: str) -> object:
        if name == "follow":
            raise AttributeError("reads are meddled with one by one: this engine does not follow by itself")
        return getattr(self.inner, name)

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        if ranges.total_bytes <= SMALL_BYTES:
            await self.inner.read(peer, ranges, timeout_s, chunks)
            return
        self.reads.append(ranges.total_bytes)
        if self.before is not None:
            await self.before(ranges)
        if self.instead is None or not await self.instead(ranges):
            await self.inner.read(peer, ranges, timeout_s, chunks)
        if self.after is not None:
            self.after(ranges)
            if chunks is not None:
                digest_landed(ranges, chunks)  # the engine lies about the bytes, not about what it digested

    async def close(self) -> None:
        await self.inner.close()


class Gate:
    """Holds reads back until a test opens it; the test learns that one has arrived. No sleeping on either side."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self._open = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def pass_through(self, ranges: Ranges) -> None:
        waiter = asyncio.Event()
        self._waiters.append((asyncio.get_running_loop(), waiter))
        self.arrived.set()
        if not self._open.is_set():
            await waiter.wait()

    def open(self) -> None:
        self._open.set()
        for loop, waiter in self._waiters:
            loop.call_soon_threadsafe(waiter.set)


@contextmanager
def meddled(monkeypatch: object, meddle: Callable[[Engine], Meddler]) -> Iterator[list[Meddler]]:
    """Every engine opened inside is wrapped by `meddle`."""
    wrapped: list[Meddler] = []
    real = runtime.open_engines

    def open_engines(preference: tuple[str, ...], host: str) -> list[Engine]:
        engines = [meddle(engine) for engine in real(preference, host)]
        wrapped.extend(engines)
        return list(engines)

    monkeypatch.setattr(runtime, "open_engines", open_engines)  # type: ignore[attr-defined]
    try:
        yield wrapped
    finally:
        monkeypatch.setattr(runtime, "open_engines", real)  # type: ignore[attr-defined]
