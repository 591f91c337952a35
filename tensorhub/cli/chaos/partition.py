"""A way to a server that can be cut: a small TCP proxy in this process, silent while it is cut, as a partition is.

It forwards bytes and knows nothing of what they say. One thread, one event loop; closed by `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType

from tensorhub.addresses import Address

PIECE_BYTES = 64 << 10
#: The server is on this host.
CONNECT_SECONDS = 5.0
JOIN_SECONDS = 5.0


class Partition:
    """A context manager; `at` is where it listens, on loopback."""

    def __init__(self, server: Address) -> None:
        self.at = Address("127.0.0.1", 0)
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._stop = asyncio.Event()
        #: A task per connection. Not cancelled: each ends by itself once `_stop` is set.
        self._forwarding: set[asyncio.Task[None]] = set()
        self._listening = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="chaos-partition", daemon=True)

    def __enter__(self) -> Partition:
        self._thread.start()
        self._listening.wait(CONNECT_SECONDS)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(JOIN_SECONDS)

    def cut(self) -> None:
        """From now on nothing crosses, in either direction, on connections old or new."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def mend(self) -> None:
        """What waited goes on, in order."""
        self._loop.call_soon_threadsafe(self._whole.set)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        try:
            server = await asyncio.start_server(self._forward, self.at.host, 0)
        except OSError as error:
            self._failure = error
            self._listening.set()
            return
        self.at = Address(self.at.host, int(server.sockets[0].getsockname()[1]))
        self._listening.set()
        await self._stop.wait()
        server.close()
        self._whole.set()  # whoever waits for it ends, too
        if self._forwarding:
            await asyncio.wait(self._forwarding, timeout=JOIN_SECONDS)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a connection is forwarded by a task")
        self._forwarding.add(task)
        task.add_done_callback(self._forwarding.discard)
        await self._whole.wait()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                there_reader, there_writer = await asyncio.open_connection(self._server.host, self._server.port)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(self._stop.wait()),
            asyncio.ensure_future(self._pump(reader, there_writer)),
            asyncio.ensure_future(self._pump(there_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            there_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
