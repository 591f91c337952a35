"""The process that beats for a trainer over gRPC: `python -m tensorhub.client.grpc_beat`, started by `grpc_heart.py`.

A trainer may hold its interpreter for half a minute, and gRPC's Python needs the interpreter: so the heart is a small
process of its own. It decides only whether the process it beats for (its parent) is alive and running: it never beats
for one that is stopped, and ends at once with one that has ended. It knows frames as bytes, imports no torch, and never
reconnects; why it ended is on the `Board`.

What remains: a parent that is stopped between the look and the beat (microseconds) has its lease start by that beat.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import struct
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from tensorhub.errors import TensorHubError

#: One page: the time, then the reason.
BOARD_BYTES = 4096
#: Between two looks at a parent that is stopped: a small part of any lease, and no load.
STOPPED_LOOK_S = 0.05
#: For the first connection, at least: beats may be closer together than a handshake is long.
CONNECT_S = 5.0
#: States of /proc/PID/stat in which a process does nothing any more, or not for now: it gets no beats.
STILL = frozenset(b"TtZXx")

# Native alignment and order: eight aligned bytes are written and read by one instruction, so no time is ever torn.
_TIME = struct.Struct("Q")
_LENGTH = struct.Struct("I")
_LENGTH_AT, _REASON_AT = 8, 12


class Board:
    """Memory that both processes see: when the last acknowledged beat was sent, and why the beats ended.

    0         8            12
    | sent_ns | reason len | reason, UTF-8 ... |
    """

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, BOARD_BYTES, mmap.MAP_SHARED)

    def acknowledge(self, sent_ns: int) -> None:
        _TIME.pack_into(self._memory, 0, sent_ns)

    def acknowledged_ns(self) -> int:
        return int(_TIME.unpack_from(self._memory, 0)[0])

    def end(self, reason: str) -> None:
        """Leave the reason, as the last thing before the end: it is read once the process has ended."""
        text = reason.encode("utf-8", "replace")[: BOARD_BYTES - _REASON_AT]
        self._memory[_REASON_AT : _REASON_AT + len(text)] = text
        _LENGTH.pack_into(self._memory, _LENGTH_AT, len(text))

    def ending(self) -> str:
        """The reason, empty when none was left."""
        (nbytes,) = _LENGTH.unpack_from(self._memory, _LENGTH_AT)
        return self._memory[_REASON_AT : _REASON_AT + nbytes].decode("utf-8", "replace")

    def close(self) -> None:
        self._memory.close()


@dataclass(frozen=True, slots=True)
class Orders:
    """What to send where, how often, and what must come back; as one line of JSON on stdin: ids are nobody's to see."""

    target: str
    parent: int
    request: bytes
    expected: bytes
    interval_ns: int
    ack_timeout_ns: int

    def line(self) -> bytes:
        fields = [self.target, self.parent, self.request.hex(), self.expected.hex()]
        return json.dumps([*fields, self.interval_ns, self.ack_timeout_ns]).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Orders:
        target, parent, request, expected, interval_ns, ack_timeout_ns = json.loads(line)
        request, expected = bytes.fromhex(request), bytes.fromhex(expected)
        return cls(target, parent, request, expected, interval_ns, ack_timeout_ns)


class Parent:
    """The process that is beaten for. Watched by its pidfd, so that its number may be somebody else's later."""

    def __init__(self, pid: int) -> None:
        self.pidfd = os.pidfd_open(pid)
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # of this process, whatever comes later
        if os.getppid() != pid:
            raise ProcessLookupError(f"process {pid} is not our parent any more")

    def is_still(self) -> bool:
        """Whether it is stopped, traced to a stop, or dead."""
        try:
            stat = os.pread(self._stat, 4096, 0)
        except ProcessLookupError:
            return True
        return stat[stat.rindex(b")") + 2] in STILL


def main() -> NoReturn:
    """Beat until something ends it. Leaves by `_exit`: no library gets to wait for its threads."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the parent, which ends us when it has no more use for us
    board = Board(int(sys.argv[1]))
    orders = Orders.parse(sys.stdin.buffer.readline())
    try:
        parent = Parent(orders.parent)
    except ProcessLookupError:
        os._exit(0)
    try:
        reason = asyncio.run(_beat(orders, parent, board))
    except TensorHubError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent must be told, and nobody else can
        reason = f"the beating process broke: {error!r}"
    board.end(reason)
    os._exit(0)


async def _beat(orders: Orders, parent: Parent, board: Board) -> str:
    """Returns why it cannot go on."""
    from tensorhub.client.grpc_channel import Stream, Target

    asyncio.get_running_loop().add_reader(parent.pidfd, os._exit, 0)
    patience_s = orders.ack_timeout_ns / 1e9
    stream = await Stream.open(Target.parse(orders.target), max(CONNECT_S, patience_s))
    while True:
        while parent.is_still():
            await asyncio.sleep(STOPPED_LOOK_S)
        sent_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(patience_s):
                await stream.write(orders.request)
                reply = await stream.read()
        except TimeoutError:
            return "no reply in time"
        if reply != orders.expected:
            return "another reply than expected"
        board.acknowledge(sent_ns)
        await asyncio.sleep(max(0.0, (sent_ns + orders.interval_ns - time.monotonic_ns()) / 1e9))


if __name__ == "__main__":
    main()
