"""Real processes for benchmarks: each runs module-level functions on request, under a deadline, and dies with us.

It decides nothing about what is measured. A function gets the process's own state (a dict) first, then its arguments.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

#: No single call of a benchmark takes longer on a machine that is worth measuring on.
CALL_SECONDS = 120.0
END_SECONDS = 10.0
#: Between two looks at whether a process has stopped.
LOOK_SECONDS = 0.001
PR_SET_PDEATHSIG = 1

State = dict[str, Any]


class Missing(Exception):
    """Something that is not installed, or does not start here, and what to do about it. Crosses processes as it is."""


class RemoteFailed(Exception):
    """A worker raised, died or was too slow; carries its traceback where there is one."""


class Remote:
    """One process of its own. A context manager: leaving it ends the process.

    Method "forkserver" makes it a fork of one that has what `preload` named: cheap, where there are many.
    """

    def __init__(self, name: str, method: Literal["spawn", "forkserver"] = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name=f"bench-{name}", daemon=True)
        self._process.start()
        theirs.close()
        #: A stopped process takes no core from what is measured meanwhile.
        self.paused = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None  # it has been started
        return int(self._process.pid)

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
        self._process.join(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_SECONDS)

    def leave(self) -> None:
        """Let the process end by itself, without waiting for it."""
        self._connection.close()
        self.resume()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = CALL_SECONDS) -> Any:
        """The function's result there."""
        self.start(function, *arguments)
        return self.result(timeout_s)

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin a call; `result` ends it."""
        self._connection.send((function, arguments))

    def pause(self) -> None:
        """Stop the process until `resume`: for peers that poll while they wait. Returns once it has stopped."""
        self.paused = True
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + END_SECONDS
        while not stands_still(self.pid):  # nobody's parent can wait for it where a fork server made it
            if time.monotonic() > deadline:
                raise RemoteFailed(f"{self.name}: does not stop within {END_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            os.kill(self.pid, signal.SIGCONT)

    def result(self, timeout_s: float = CALL_SECONDS) -> Any:
        if not self._connection.poll(timeout_s):
            raise RemoteFailed(f"{self.name}: no result within {timeout_s:g} s")
        try:
            ok, value = self._connection.recv()
        except EOFError:
            self._process.join(END_SECONDS)
            raise RemoteFailed(f"{self.name}: ended with exit code {self._process.exitcode}") from None
        if isinstance(value, Missing):
            raise value
        if not ok:
            raise RemoteFailed(f"{self.name}: {value}")
        return value


def stands_still(pid: int) -> bool:
    """Whether a process is stopped by a signal, or has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "TZX"


def preload(modules: list[str]) -> None:
    """What processes of method "forkserver" find imported; without effect once the first was started."""
    multiprocessing.set_forkserver_preload(modules)


def both(reader: Remote, wait: tuple[Any, ...], publisher: Remote, act: tuple[Any, ...]) -> tuple[Any, Any]:
    """Let the reader begin to wait, then the publisher act; both results."""
    reader.start(*wait)
    time.sleep(SETTLE_SECONDS)
    return publisher.call(*act), reader.result()


#: Enough for a reader's request to reach the server; not part of any measurement.
SETTLE_SECONDS = 0.1


def _serve(connection: Connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    state: State = {}
    try:
        while True:
            function, arguments = connection.recv()
            try:
                connection.send((True, function(state, *arguments)))
            except Missing as error:
                connection.send((False, error))
            except Exception:  # noqa: BLE001  the parent gets it, whatever it is
                connection.send((False, traceback.format_exc()))
    except (EOFError, ConnectionError):
        pass  # whoever asked is gone
    for hub in state.get("hubs", {}).values():
        hub.close()
