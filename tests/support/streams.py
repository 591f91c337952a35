"""The stream protocol written a second time, in Python: raw readers against the real server, and scripted sources
against the real reader. Repeats no line of the C that it checks."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from tensorhub import native
from tensorhub.native import Limits
from tensorhub.ports import Engine, Ranges
from tensorhub.transport.endpoints import Endpoint
from tensorhub.transport.stream_peers import Peer, StreamPeers
from tests.conformance.peer import Memory, pattern

MAGIC = b"TnsrHub\n"
SERVED, OTHER_VERSION, OTHER_INCARNATION, FULL, NOT_REGISTERED, MALFORMED = range(6)
#: A hang guard: nothing here takes long.
PATIENCE_S = 30.0
#: A deadline to be met.
SOON_S = 0.05
PAGE = 4096
#: Of the server under test.
INCARNATION = bytes(range(100, 116))


def greeting(incarnation: bytes, version: int = 2, word: int = 0, magic: bytes = MAGIC) -> bytes:
    """`word` is the token's length from a reader, the status from a server."""
    return struct.pack("<8sHHI16s", magic, version, word, 0, incarnation)


def request(number: int, *ranges: tuple[int, int], kind: int = 1, count: int | None = None, total: int | None = None):
    """One frame; `count` and `total` may lie."""
    total = sum(nbytes for _, nbytes in ranges) if total is None else total
    head = struct.pack("<IIQQ", kind, len(ranges) if count is None else count, number, total)
    return head + b"".join(struct.pack("<QQ", *each) for each in ranges)


def gated_request(
    number: int,
    block: int,
    generation: bytes,
    *ranges: tuple[int, int, int],
    count: int | None = None,
    total: int | None = None,
):
    """One frame of a reader that follows; each range is address, length and mark."""
    total = sum(nbytes for _, nbytes, _ in ranges) if total is None else total
    head = struct.pack("<IIQQ", 2, len(ranges) if count is None else count, number, total)
    gate = struct.pack("<Q16s", block, generation)
    return head + gate + b"".join(struct.pack("<QQQ", *each) for each in ranges)


def reply(number: int, nbytes: int, status: int = SERVED, index: int = 0) -> bytes:
    return struct.pack("<IIQQ", status, index, number, nbytes)


def receive(stream: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes, or fewer at the stream's end."""
    parts = bytearray()
    with suppress(ConnectionResetError):
        while len(parts) < nbytes and (part := stream.recv(min(nbytes - len(parts), 1 << 20))):
            parts += part
    return bytes(parts)


def at_end(stream: socket.socket) -> bool:
    """Whether the peer ends the stream, without another byte."""
    return receive(stream, 1) == b""


class RawReader:
    """A stream to a real server, on which a test says whatever it likes."""

    def __init__(self, place: tuple[str, int], receive_buffer_bytes: int | None = None) -> None:
        self.stream = socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
        self.stream.settimeout(PATIENCE_S)
        if receive_buffer_bytes is not None:
            self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        try:
            self.stream.connect(place)
        except BaseException:
            self.stream.close()
            raise

    def __enter__(self) -> RawReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def greet(self, incarnation: bytes) -> RawReader:
        self.stream.sendall(greeting(incarnation))
        assert receive(self.stream, 32) == greeting(incarnation, word=SERVED)
        return self

    def ask(self, number: int, *ranges: tuple[int, int]) -> tuple[int, int, bytes]:
        """Status, index and bytes of the reply."""
        self.stream.sendall(request(number, *ranges))
        return self.answer(number)

    def answer(self, number: int) -> tuple[int, int, bytes]:
        status, index, repeated, nbytes = struct.unpack("<IIQQ", receive(self.stream, 24))
        assert repeated == number
        data = receive(self.stream, nbytes)
        assert len(data) == nbytes
        return status, index, data


class Served:
    """A server on loopback, and memory of a known pattern."""

    def __init__(self, limits: Limits | None = None, nbytes: int = 1000) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.place = listener.getsockname()
        self.server = native.StreamServer(listener, INCARNATION, limits)
        self.memory = Memory()
        self.nbytes = nbytes
        self.address = self.memory.map(nbytes)
        self.memory.write(self.address, 1, nbytes)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.memory.close()

    def reader(self, **options: int) -> RawReader:
        return RawReader(self.place, **options).greet(INCARNATION)

    def wait_for_connections(self, count: int) -> None:
        while self.server.facts()[0] != count:
            os.sched_yield()  # the thread that ends one is at work

    def check_unharmed(self) -> None:
        """Nobody is connected any more, and a good reader gets its bytes."""
        self.wait_for_connections(0)
        self.server.add(self.address, self.nbytes)
        with self.reader() as reader:
            assert reader.ask(7, (self.address, self.nbytes)) == (SERVED, 0, pattern(1, self.nbytes).tobytes())
        self.server.remove(self.address, self.nbytes)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as a scripted source received it."""

    number: int
    nbytes: int
    stream: socket.socket


class ScriptedSource:
    """Listens, greets, and hands every request to `answer`, which returns whether the stream goes on.

    `connections` counts accepted streams, so that tests can tell a reused one from a new one.
    """

    def __init__(self, answer: Callable[[Asked], bool], greet: bytes | None = None) -> None:
        self.incarnation = bytes(range(16))
        self.connections = 0
        self._answer, self._greeting = answer, greet
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._streams: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def locator(self) -> bytes:
        return Endpoint.own("127.0.0.1", self._listener.getsockname()[1], self.incarnation).pack()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for stream in self._streams:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for stream in self._streams:
            stream.close()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._streams.append(stream)
            self._threads.append(threading.Thread(target=self._serve, args=(stream,)))
            self._threads[-1].start()

    def _serve(self, stream: socket.socket) -> None:
        with suppress(OSError):
            if receive(stream, 32) == greeting(self.incarnation):
                stream.sendall(self._greeting or greeting(self.incarnation, word=SERVED))
                while len(head := receive(stream, 24)) == 24:
                    _, count, number, nbytes = struct.unpack("<IIQQ", head)
                    receive(stream, 16 * count)
                    if not self._answer(Asked(number, nbytes, stream)):
                        break
            stream.shutdown(socket.SHUT_RDWR)


@contextmanager
def scripted(answer: Callable[[Asked], bool], greet: bytes | None = None) -> Iterator[ScriptedSource]:
    """A source for the time of a test."""
    source = ScriptedSource(answer, greet)
    try:
        yield source
    finally:
        source.close()


def serve_zeros(asked: Asked) -> bool:
    """What a good source does, over memory that is all zeros."""
    asked.stream.sendall(reply(asked.number, asked.nbytes) + bytes(asked.nbytes))
    return True


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


async def read(engine: Engine, peer: bytes, target: np.ndarray, timeout_s: float = PATIENCE_S) -> None:
    """As many bytes as fit, from any address: scripted sources do not look at it."""
    await engine.read(peer, Ranges(u64(PAGE), u64(target.ctypes.data), u64(target.nbytes)), timeout_s)


async def leave(peers: StreamPeers, peer: Peer) -> None:
    """As a read does that has ended: in a loop."""
    peers.leave(peer)
