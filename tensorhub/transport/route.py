"""Under which address others reach this host: the one that it routes towards the server with, unless told otherwise.

All peers of a server can route to whatever reaches the server; a loopback address comes out only where the server
itself is reached by loopback, and then so is everybody else's.
"""

from __future__ import annotations

import os
import socket

from tensorhub.addresses import Address
from tensorhub.errors import ServerUnavailable

#: Overrides the found address: for hosts behind NAT, or with a network of their own for weights.
ADVERTISE_ENV = "TENSORHUB_ADVERTISE"
LOOPBACK = "127.0.0.1"


def advertised_host(found: str) -> str:
    """The host that locators name: what the user chose, else what was found."""
    return os.environ.get(ADVERTISE_ENV) or found


def host_towards(server: Address) -> str:
    """This host's own number on the way to `server`. Sends nothing. `ServerUnavailable` when there is no way."""
    try:
        found = socket.getaddrinfo(server.host, server.port or 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ServerUnavailable(f"{server} is unknown here: {error}") from error
    failures = []
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # a datagram socket: this only chooses the route
                return str(probe.getsockname()[0])
        except OSError as error:
            failures.append(str(error))
    raise ServerUnavailable(f"no route to {server}: {'; '.join(failures)}")
