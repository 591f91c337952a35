"""Frames over TCP: where a server whose clients may reach it directly listens.

It decides whom logs name; how a connection is served is `server/streams.py`'s, who may say Hello the host's. It binds
what it is told to, never more.
"""

from __future__ import annotations

import socket

from tensorhub.addresses import Address
from tensorhub.errors import ServerUnavailable
from tensorhub.server.host import Host
from tensorhub.server.streams import BACKLOG, serve_streams
from tensorhub.wire.sockets import tcp_socket, tune


def listen(host: str, port: int = 0) -> socket.socket:
    """A listener on that number of this host, on a port of the system's choice if it is 0; `ServerUnavailable` when
    refused."""
    listener = tcp_socket(host)
    try:
        # A server that is started again finds its port in the hands of the old one's connections, which inherit this.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServerUnavailable(f"cannot listen at {Address(host, port)}: {error}") from error
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
