"""The heart of a session over gRPC, seen from the trainer: starts the process that beats, reads its board, ends it.

It decides nothing about beats (`grpc_beat.py`) or leases. One small process per session: about 40 MB and a few
milliseconds a second; it needs neither this interpreter nor its lock, and dies with this process whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import tensorhub
from tensorhub.client.grpc_beat import BOARD_BYTES, Board, Orders
from tensorhub.errors import Broken, ServerUnavailable

#: A killed process is gone in a moment; one that waits for a disk that never answers would not be.
REAP_S = 10.0


class GrpcHeart:
    """Beats until `stop`, or until `failed` says why not. Belongs to the process that started it, not to its forks."""

    def __init__(self, target: str, request: bytes, expected: bytes, interval_ns: int, ack_timeout_ns: int) -> None:
        self._owner_pid = os.getpid()
        self._last_acknowledged_ns = 0
        self._last_failure: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        fd = os.memfd_create("tensorhub-beat")
        try:
            os.ftruncate(fd, BOARD_BYTES)
            self._board = Board(fd)
            self._process = _spawn(target, fd)
        except OSError as error:
            raise ServerUnavailable(f"{target}: the process that beats cannot be started: {error}") from error
        finally:
            os.close(fd)
        orders = Orders(target, self._owner_pid, request, expected, interval_ns, ack_timeout_ns)
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(orders.line())  # one that died already is noticed by `failed`

    def acknowledged_ns(self) -> int:
        """Monotonic time at which the last acknowledged beat was sent; 0 before the first, and in a forked child."""
        if os.getpid() != self._owner_pid:
            return 0
        self._observe()
        return self._last_acknowledged_ns

    def failed(self) -> str | None:
        """Why it ended, or None while it goes on."""
        if os.getpid() != self._owner_pid:
            return f"the process forked: this heartbeat belongs to process {self._owner_pid}"
        self._observe()
        return self._last_failure

    def stop(self) -> None:
        """Kill and reap the process; idempotent, takes a moment only. In a forked child, give the copies back."""
        process, self._process = self._process, None
        if process is None:
            return
        if os.getpid() != self._owner_pid:
            process.returncode = 0  # not ours to wait for
            self._board.close()
            return
        process.kill()
        try:
            process.wait(REAP_S)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"process {process.pid}, which beats, does not end") from error
        self._note(self._board)
        self._last_failure = self._last_failure or "stopped"
        self._board.close()

    def _observe(self) -> None:
        if self._process is None:
            return
        status = self._process.poll()
        self._note(self._board)
        if status is not None and self._last_failure is None:
            self._last_failure = self._board.ending() or f"the process that beats ended with status {status}"

    def _note(self, board: Board) -> None:
        self._last_acknowledged_ns = board.acknowledged_ns()

    def __del__(self) -> None:
        if self._process is not None:
            self.stop()


def _spawn(target: str, board: int) -> subprocess.Popen[bytes]:
    """A session of its own keeps the terminal's and the launcher's signals from it; `-P` keeps the trainer's directory
    from hiding modules."""
    root = str(Path(tensorhub.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    return subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
        [sys.executable, "-P", "-m", "tensorhub.client.grpc_beat", str(board), target],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(board,),
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
