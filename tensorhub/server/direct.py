"""Frames over TCP: where a server whose clients may reach it directly listens.

It decides what is bound and whom logs name; how a connection is served is `server/streams.py`'s, who may say Hello the
host's. It binds to one number of this host and never to all of them.
"""

from __future__ import annotations

import socket

from tensorhub.addresses import Address
from tensorhub.errors import ServerUnavailable
from tensorhub.server.host import Host
from tensorhub.server.streams import BACKLOG, serve_streams
from tensorhub.wire.sockets import tcp_socket, tune


def listen(host: str) -> socket.socket:
    """A listener on a port of the system's choice, on that number of this host; `ServerUnavailable` when refused."""
    listener = tcp_socket(host)
    try:
        listener.bind((host, 0))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerUnavailable(f"cannot listen on {host}: {error}") from error
    return listener


def address_of(listener: socket.socket) -> Address:
    """What clients dial."""
    host, port = listener.getsockname()[:2]
    return Address(host, port)


async def serve_direct(listener: socket.socket, host: Host) -> None:
    """Serve until the host stops; `Broken` when the machine broke. The listener is closed then."""
    await serve_streams(listener, host, _admit, listener.close)


def _admit(sock: socket.socket) -> str:
    tune(sock)
    host, port = sock.getpeername()[:2]
    return str(Address(host, port))
