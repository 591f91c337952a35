"""How TCP sockets that carry frames are made and tuned, alike at both ends. It binds, dials and closes none."""

from __future__ import annotations

import socket

#: The lease and the heartbeat notice a host that vanished; these only clear its sockets up, after about a minute.
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 30, 10, 3


def tcp_socket(host: str) -> socket.socket:
    """A non-blocking socket of the family in which `host`, a number or an IPv4 name, is written."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def tune(sock: socket.socket) -> None:
    """Small frames go out at once, and a peer whose host is gone does not stay connected for ever."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
