"""The server that chaos is made with: a child process that is killed, started again empty, stopped, and ended by pid.

It decides how each kind is started and when it counts as there. What a server does, it does not know.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from tensorhub.cli.fleet import WorkerFailed, await_stop
from tensorhub.errors import BadRequest
from tensorhub.wire.local_place import LOG, RUNTIME_DIR_ENV

KINDS = ("frames", "grpc", "local")
#: An interpreter and a listener, on a busy machine.
START_SECONDS = 30.0
END_SECONDS = 5.0
LOOK_SECONDS = 0.01
SERVER_MODULE = "tensorhub.server"
_ADDRESS = re.compile(rb"(?:frames|grpc)://(\S+)")
_SERVES = re.compile(r"process (\d+) serves")


@dataclass(slots=True)
class OwnServer:
    """One server of a kind, under one address for all of its lives. A context manager: leaving it ends every life.

    `folder` takes its log; of the kind "local" also its socket, which is why `RUNTIME_DIR_ENV` must name it by then.
    """

    kind: str
    name: str
    folder: Path
    #: What users would write to reach it; empty before the first start.
    address: str = ""
    _at: str = "127.0.0.1:0"
    _process: subprocess.Popen[bytes] | None = None
    _log: IO[bytes] | None = None

    def __enter__(self) -> OwnServer:
        if self.kind not in KINDS:
            raise BadRequest(f"--server {self.kind!r} is no kind of server that can be killed here; use one of {KINDS}")
        if self.kind == "local" and os.environ.get(RUNTIME_DIR_ENV) != str(self.folder):
            raise BadRequest(f"a local server of our own needs {RUNTIME_DIR_ENV}={self.folder}")
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_tcp(self) -> bool:
        return self.kind != "local"

    def start(self) -> float:
        """Start a life, which knows nothing; seconds until it listens."""
        began = time.monotonic()
        if self._log is None:
            self._log = (self.folder / f"{self.name}.log").open("ab")
        options = ["--listen", self._at] if self.is_tcp else ["--name", self.name]
        self._process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
            [
                *(sys.executable, "-m", "tensorhub.cli.chaos.child", str(os.getpid()), SERVER_MODULE),
                *(self.kind, *options),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for us: we end it
        )
        if self.is_tcp:
            self._at = self._listens_at(self._process)
            self.address = f"{self.kind}://{self._at}"
        else:
            self._await_socket()
            self.address = f"local:{self.name}"
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to whoever serves; returns when it is gone."""
        for pid in self._pids():
            _signal(pid, signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """SIGSTOP to whoever serves; returns when it stands still."""
        for pid in self._pids():
            _signal(pid, signal.SIGSTOP)
            await_stop(pid)

    def go_on(self) -> None:
        """SIGCONT."""
        for pid in self._pids():
            _signal(pid, signal.SIGCONT)

    def close(self) -> None:
        """End every life, by pid, and give everything back. Idempotent."""
        self.kill()
        if self._log is not None:
            self._log.close()
            self._log = None

    def told(self) -> str:
        """The end of its log, for errors."""
        with contextlib.suppress(OSError):
            return (self.folder / f"{self.name}.log").read_text(encoding="utf-8", errors="replace")[-2000:].strip()
        return ""

    def _pids(self) -> list[int]:
        """Of a local server also those that a client has started: they are nobody's children."""
        ours = [self._process.pid] if self._process is not None and self._process.poll() is None else []
        if self.is_tcp:
            return ours
        with contextlib.suppress(FileNotFoundError):
            log = (self.folder / self.name / LOG).read_text(encoding="utf-8", errors="replace")
            ours += [pid for pid in map(int, _SERVES.findall(log)) if pid not in ours and _is_server(pid)]
        return ours

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.wait(END_SECONDS)
            if process.stdout is not None:
                process.stdout.close()

    def _listens_at(self, process: subprocess.Popen[bytes]) -> str:
        """The address in the first line it says."""
        line = b""
        if process.stdout is not None:
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ)
                line = process.stdout.readline() if ready.select(START_SECONDS) else b""
        if (found := _ADDRESS.match(line)) is None:
            raise WorkerFailed(f"the server said {line!r} instead of its address; its log ends with: {self.told()}")
        return found[1].decode()

    def _await_socket(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._serves():
            if time.monotonic() > deadline:
                raise WorkerFailed(f"no local server within {START_SECONDS:g} s; its log ends with: {self.told()}")
            time.sleep(LOOK_SECONDS)

    def _serves(self) -> bool:
        from tensorhub.wire.local_place import LocalPlace

        place = LocalPlace.open(self.name)
        try:
            sock = place.connect()
            if sock is not None:
                sock.close()
            return sock is not None
        finally:
            place.close()


def settings(folder: Path, lease_s: float, beat_s: float, stall_s: float) -> Mapping[str, str]:
    """The environment in which servers and workers of chaos start: theirs alone, and with little patience."""
    return {
        RUNTIME_DIR_ENV: str(folder),
        "TENSORHUB_LEASE_S": str(lease_s),
        "TENSORHUB_BEAT_S": str(beat_s),
        "TENSORHUB_STALL_S": str(stall_s),
    }


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_server(pid: int) -> bool:
    """Whether this process is a server that runs: a recycled pid or a zombie is none."""
    try:
        return SERVER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
