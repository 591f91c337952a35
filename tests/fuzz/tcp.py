"""The native server of streams under any bytes, over a real loopback socket: it lives on, serves, and leaks nothing.

An input is what a peer says on one stream; its first byte decides whether a valid greeting goes before. Addresses that
only the server's process knows stand in it as marks, so that an input means the same in every run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from tests.conformance.peer import pattern
from tests.fuzz.served_process import GENERATION
from tests.support.streams import INCARNATION, PATIENCE_S, RawReader, gated_request, greeting, receive, request

#: The registered memory, a place just before its end, and the progress block.
MEMORY, NEAR_END, BLOCK = 0x7E57_0000_0000_0001, 0x7E57_0000_0000_0002, 0x7E57_0000_0000_0004
#: What a server may keep of all that came: allocators give little back.
RSS_GROWTH_MAX = 16 << 20
_SENT_MAX = 1 << 20


class ServerProcess:
    """The server under test, and what it used before anything came."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.fuzz.served_process"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.end)
        host, port, *numbers = self._process.stdout.readline().split()
        self.place = host, int(port)
        self.memory, self.nbytes, self.block = map(int, numbers)
        self.read_honestly()
        self._before = self._used()

    def end(self) -> None:
        """Its end comes with that of its input."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(PATIENCE_S)

    def read_honestly(self) -> None:
        """A reader that knows the protocol gets its bytes."""
        if self._process.poll() is not None:
            raise AssertionError(f"the server ended with {self._process.returncode}")
        with RawReader(self.place) as reader:
            status, _, data = reader.greet(INCARNATION).ask(1, (self.memory, self.nbytes))
        assert (status, data) == (0, pattern(1, self.nbytes).tobytes())

    def check_baseline(self) -> None:
        """Descriptors and threads are what they were, memory nearly so, once those who left are noticed."""
        fds, threads, rss = self._before
        until_s = time.monotonic() + PATIENCE_S
        # Less is as well: the first reader may have been on its way out when they were counted.
        while ((used := self._used())[0] > fds or used[1] > threads) and time.monotonic() < until_s:
            os.sched_yield()
        assert used[0] <= fds, f"{used[0]} descriptors, before: {fds}"
        assert used[1] <= threads, f"{used[1]} threads, before: {threads}"
        assert used[2] <= rss + RSS_GROWTH_MAX, f"{used[2]} bytes of memory, {rss} before"

    def _used(self) -> tuple[int, int, int]:
        at = Path(f"/proc/{self._process.pid}")
        pages = int((at / "statm").read_text().split()[1])
        return len(os.listdir(at / "fd")), len(os.listdir(at / "task")), pages * os.sysconf("SC_PAGE_SIZE")

    def placed(self, data: bytes) -> bytes:
        """The input with addresses for marks."""
        near_end = self.memory + self.nbytes - 16
        for mark, address in ((MEMORY, self.memory), (NEAR_END, near_end), (BLOCK, self.block)):
            data = data.replace(struct.pack("<Q", mark), struct.pack("<Q", address))
        return data


_servers: list[ServerProcess] = []


def server() -> ServerProcess:
    """One for all inputs of this process."""
    if not _servers:
        _servers.append(ServerProcess())
    return _servers[0]


def check(data: bytes) -> None:
    """Say it all, hear it out, then be an honest reader."""
    under_test = server()
    said = under_test.placed(data[1:_SENT_MAX])
    if data[:1] and not data[0] & 1:
        said = greeting(INCARNATION) + said
    with socket.create_connection(under_test.place, PATIENCE_S) as stream:
        with contextlib.suppress(OSError):  # it may have heard enough
            stream.sendall(said)
            stream.shutdown(socket.SHUT_WR)
        heard = receive(stream, 64 << 20)
    _check_replies(heard)
    under_test.read_honestly()


def _check_replies(heard: bytes) -> None:
    """A greeting, then replies, of which the last may be cut; nothing else was ever said."""
    if not heard:
        return
    assert heard[:8] == greeting(b"")[:8]
    at = 32
    while at + 24 <= len(heard):
        status, _, _, nbytes = struct.unpack_from("<IIQQ", heard, at)
        assert status in range(6)
        assert nbytes == 0 or status == 0
        at += 24 + nbytes


def valid() -> list[bytes]:
    """Streams of honest readers, and some that ask for what they must not."""
    follow = gated_request(5, BLOCK, GENERATION, (MEMORY, 100, 1), (MEMORY, 200, 2))
    return [
        b"\0" + request(1, (MEMORY, 4096)),
        b"\0" + request(1, (MEMORY, 10), (NEAR_END, 16)) + request(2, (MEMORY, 4000)),
        b"\0" + request(3, (NEAR_END, 17)),
        b"\0" + request(4, *[(MEMORY, 1)] * 200),
        b"\0" + follow,
        b"\0" + gated_request(6, BLOCK, GENERATION, (MEMORY, 100, 2), (MEMORY, 200, 3)),
        b"\0" + request(7, (MEMORY, 2**63), (MEMORY, 2**63), total=0),
        b"\0" + request(8, (2**64 - 8, 16)),
        b"\0" + request(9, (MEMORY, 16), count=2**32 - 1, total=2**64 - 1),
        b"\1" + greeting(INCARNATION) + request(10, (MEMORY, 16)),
        b"\1" + greeting(INCARNATION, version=77),
        b"\1" + greeting(INCARNATION, word=65535) + bytes(65535),
        b"\1" + b"GET / HTTP/1.1\r\n\r\n",
    ]


def finish() -> None:
    server().check_baseline()
