"""Local servers for tests: private directories, real processes that end with the test."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tensorhub.types import SessionId
from tensorhub.wire.local_place import LOG, RUNTIME_DIR_ENV

#: Longer than any server under test needs to do what is waited for.
PATIENCE_S = 20.0


def new_session_id() -> SessionId:
    return SessionId(os.urandom(16))


class LocalServers:
    """The servers that clients of one test start, found by what their logs say."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def log(self, name: str) -> str:
        path = self.root / name / LOG
        return path.read_text() if path.exists() else ""

    def pids(self, name: str) -> list[int]:
        """Processes that served `name`, in order."""
        return [int(pid) for pid in re.findall(r"process (\d+) serves", self.log(name))]

    def left(self, name: str) -> list[int]:
        """Processes that left by themselves."""
        return [int(pid) for pid in re.findall(r"process (\d+) leaves", self.log(name))]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signal the serving process."""
        pid = self.pids(name)[-1]
        os.kill(pid, number)
        return pid

    def end_all(self) -> None:
        for log in self.root.glob(f"*/{LOG}"):
            for pid in self.pids(log.parent.name):
                if is_server(pid):
                    os.kill(pid, signal.SIGKILL)
                    until(lambda pid=pid: not is_server(pid))


def is_server(pid: int) -> bool:
    """Whether this process is a local server that runs: a recycled pid or a zombie is none."""
    try:
        return b"tensorhub.server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def until(condition: object, what: str = "the condition") -> None:
    """Wait for another process; fails after `PATIENCE_S`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come true within {PATIENCE_S} s"
        time.sleep(0.01)


@contextmanager
def private_servers(root: Path, monkeypatch: pytest.MonkeyPatch, **settings: float) -> Iterator[LocalServers]:
    """Every local server of the test and its children lives under `root`, with these settings (`LEASE_S=1.0`)."""
    root.chmod(0o700)
    monkeypatch.setenv(RUNTIME_DIR_ENV, str(root))
    for name, value in settings.items():
        monkeypatch.setenv(f"TENSORHUB_{name}", str(value))
    servers = LocalServers(root)
    try:
        yield servers
    finally:
        servers.end_all()
