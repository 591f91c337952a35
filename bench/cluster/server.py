"""A reference server on one of the hosts, over plain frames, as `tensorhub serve frames` runs it.

`serving` starts it in a process of its own; run as a module, this file is that process: it takes any of the server's
settings, and ends with whoever started it. The server over gRPC would do, but its sessions each have a process that
beats: with dozens of hosts on few cores those would be what is measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import selectors
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile

from bench.cluster.commands import NetworkFailed
from bench.remote import Missing
from tensorhub.client.frame_link import SCHEME
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.host import Host
from tensorhub.server.machine import Machine
from tensorhub.server.settings import Settings
from tensorhub.types import ID_BYTES, Epoch

START_SECONDS = 30.0
END_SECONDS = 5.0


@contextmanager
def serving(namespace: str, ipv4: str, settings: Mapping[str, object] | None = None) -> Iterator[str]:
    """The address of a server that runs in `namespace` until the block ends; `settings` are fields of `Settings`.

    `Missing` where this build's server has no such setting.
    """
    wanted = dict(settings or {})
    unknown = sorted(set(wanted) - {field.name for field in dataclasses.fields(Settings)})
    if unknown:
        raise Missing(f"this build's server has no setting {', '.join(unknown)}")
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "bench.cluster.server", ipv4, json.dumps(wanted)]
    with TemporaryFile("w+") as log:
        # Its input is a pipe that nothing is written to: it ends with this process, however that ends.
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield _address(server)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            try:
                server.communicate(timeout=END_SECONDS)  # closes its input
            except subprocess.TimeoutExpired:
                server.kill()
                server.communicate(timeout=END_SECONDS)


def _address(server: subprocess.Popen[str]) -> str:
    """The first line it says."""
    assert server.stdout is not None  # it is a pipe
    with selectors.DefaultSelector() as ready:
        ready.register(server.stdout, selectors.EVENT_READ)
        line = server.stdout.readline().strip() if ready.select(START_SECONDS) else ""
    if not line.startswith(SCHEME):
        raise NetworkFailed(f"the server said {line!r} instead of its address (exit code {server.poll()})")
    return line


async def _serve(ipv4: str, settings: Settings) -> None:
    host = Host(Machine(Epoch(secrets.token_bytes(ID_BYTES)), settings))
    asyncio.get_running_loop().add_reader(sys.stdin, host.stop, "whoever started it has ended")
    listener = listen(ipv4)
    print(f"{SCHEME}{address_of(listener)}", flush=True)
    await serve_direct(listener, host)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], Settings(**json.loads(sys.argv[2]))))
