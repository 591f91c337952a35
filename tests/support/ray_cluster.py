"""A Ray cluster per test session, and a process that has left it again after each test.

It decides how the cluster is started and ended: in a directory of its own, so that others on this machine are neither
found nor disturbed, without dashboard or tokens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: A hang guard: a head takes seconds to end, and is killed after this.
END_S = 30.0
#: Longer than an actor needs to come back on a busy machine.
PATIENCE_S = 60.0


class RayServer:
    """One reference server of the cluster, seen by Ray."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = f"ray://{name}"

    def handle(self) -> Any:
        """The actor that bears the name now."""
        import ray

        return ray.get_actor(self.name, namespace="tensorhub")

    def epoch(self) -> bytes:
        """The id of its life."""
        import ray

        return bytes(ray.get(self.handle().where.remote(), timeout=PATIENCE_S)[2])

    def kill(self) -> None:
        """End its process; Ray starts the next life."""
        import ray

        ray.kill(self.handle(), no_restart=False)

    def restart(self) -> None:
        """Kill it and wait until its next life answers."""
        before = self.epoch()
        self.kill()
        self.until_another_life(before)

    def until_another_life(self, before: bytes) -> None:
        """Wait for a life other than that."""
        import ray

        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline_s, f"{self.address} did not come back within {PATIENCE_S} s"
            try:
                if self.epoch() != before:
                    return
            except (ray.exceptions.RayError, ValueError):
                time.sleep(0.05)

    def remove(self) -> None:
        """End it for good."""
        import ray

        ray.kill(self.handle(), no_restart=True)


@pytest.fixture(scope="session")
def ray_head() -> Iterator[str]:
    """The address of a cluster of one node, whose processes are gone when the session ends."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    directory = tempfile.mkdtemp(prefix="th-ray-", dir="/tmp")  # short: sockets lie in it
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "PYTHONPATH": paths}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_head", directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as head:
        assert head.stdout is not None
        try:
            address = head.stdout.readline().strip()
            assert address, f"no Ray could be started: exit status {head.wait(END_S)}"
            yield address
        finally:
            try:
                head.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                head.kill()
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def ray_server(ray_head: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayServer]:
    """A name for a reference server that does not exist yet, in a cluster that this process joins when it likes."""
    monkeypatch.setenv("RAY_ADDRESS", ray_head)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("TENSORHUB_RAY_DIRECT", raising=False)
    import ray

    server = RayServer(f"test-{uuid.uuid4().hex[:8]}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
            yield server
    finally:
        if ray.is_initialized():
            with suppress(ValueError):  # the test made none
                server.remove()
            ray.shutdown()
