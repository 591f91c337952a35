"""Reference servers over a network for tests: real processes, known by what they print, gone when the test ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: A fresh interpreter starts within this on a busy machine.
START_S = 30.0


class GrpcServer:
    """One process of `python -m tensorhub.server grpc`, or of another kind."""

    def __init__(self, listen: str, *options: str, kind: str = "grpc", **settings: str) -> None:
        command = [sys.executable, "-m", "tensorhub.server", kind, "--listen", listen, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **settings}
        )
        #: What it logged, complete once it has ended.
        self.log: list[str] = []
        self._logging = threading.Thread(target=self._read_log, daemon=True)
        self._logging.start()
        #: The first line it printed: `grpc://host:port`, or of its kind.
        self.address = self.process.stdout.readline().strip()
        assert self.address, f"the server ended: {self.end()}"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self, number: int | None = None) -> str:
        """Kill it, or signal it by `number` and wait for its end; its log."""
        if number is None:
            self.process.kill()
        else:
            self.process.send_signal(number)
        self.process.wait(START_S)
        self._logging.join(START_S)
        self.process.stdout.close()
        return "".join(self.log)

    def _read_log(self) -> None:
        with self.process.stderr as stream:
            self.log.extend(stream)


@contextmanager
def grpc_server(
    listen: str = "127.0.0.1:0", *options: str, kind: str = "grpc", **settings: str
) -> Iterator[GrpcServer]:
    """A server at `listen` while the block runs."""
    server = GrpcServer(listen, *options, kind=kind, **settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()
