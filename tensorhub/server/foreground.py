"""A server as a process in the foreground: what it prints first, what ends it, with which exit code.

It decides nothing a server does, nor what it speaks: `grpc_command.py` and `frames_command.py` do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from tensorhub.addresses import Address
from tensorhub.errors import Broken
from tensorhub.server.host import Host

_LOG = logging.getLogger("tensorhub.server")


async def until_ended(host: Host, serving: Coroutine[Any, Any, None]) -> int:
    """Serve until SIGTERM or SIGINT: 0. 1 when the machine broke: the next life starts empty."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop, f"signal {number.name}")
    try:
        await serving
    except Broken:
        return 1  # logged with its story by the host
    _LOG.info("the server has left")
    return 0


def announce(scheme: str, bound: Address, lacks: Sequence[str]) -> None:
    """The first line is the address, for people and scripts; beyond this host, what it lacks is a warning."""
    sys.stdout.write(f"{scheme}://{bound}\n")
    sys.stdout.flush()
    if lacks and not bound.is_loopback:
        _LOG.warning("listens beyond this host without %s: see docs/security.md", " and ".join(lacks))
