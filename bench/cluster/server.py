"""A reference server on one of the hosts: a process of its own, over gRPC, as a user would start it."""

from __future__ import annotations

import importlib.util
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile

from bench.cluster.commands import NetworkFailed
from bench.remote import Missing

START_SECONDS = 30.0
END_SECONDS = 5.0


@contextmanager
def serving(namespace: str, ipv4: str, options: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server that runs in `namespace`, until the block ends. `Missing` without gRPC."""
    if importlib.util.find_spec("grpc") is None:
        raise Missing("a server that others reach over a network needs gRPC; install: pip install 'tensorhub[grpc]'")
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "tensorhub.server", "grpc"]
    with TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*command, "--listen", f"{ipv4}:0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "TENSORHUB_LOG_LEVEL": "WARNING"},
        )
        try:
            yield _address(server)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(END_SECONDS)


def offers(option: str) -> bool:
    """Whether this build's server takes an option."""
    shown = subprocess.run(
        [sys.executable, "-m", "tensorhub.server", "grpc", "--help"],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    return option in shown.stdout


def _address(server: subprocess.Popen[str]) -> str:
    """The first line it says."""
    assert server.stdout is not None  # it is a pipe
    with selectors.DefaultSelector() as ready:
        ready.register(server.stdout, selectors.EVENT_READ)
        line = server.stdout.readline().strip() if ready.select(START_SECONDS) else ""
    if not line.startswith("grpc://"):
        raise NetworkFailed(f"the server said {line!r} instead of its address (exit code {server.poll()})")
    return line
