"""Slows down what this process sends over TCP, for whoever must meet a transfer in its middle on a fast machine.

It decides how: the kernel paces each connection (`SO_MAX_PACING_RATE`, tcp(7)), and holds little that is not sent yet.
Nothing of the library knows of it, and nothing runs differently in it.
"""

from __future__ import annotations

import os
import socket

from tensorhub.errors import EngineUnavailable

#: linux/socket.h; Python has no name for it. u64 where the kernel is 64 bits wide, and int is enough for us.
SO_MAX_PACING_RATE = 47
#: Of a paced connection: what a process had written before it was stopped or killed still arrives, and hides it.
SEND_BUFFER_BYTES = 64 << 10
#: An unpaced connection's; the kernel doubles it.
FULL_BUFFER_BYTES = 4 << 20
UNPACED = 2**32 - 1


def slow_down(bytes_per_s: int) -> None:
    """Pace every TCP socket of this process, and every connection that its listeners will accept; 0: not any more.

    `EngineUnavailable` where the kernel refuses.
    """
    rate, buffer_bytes = (bytes_per_s, SEND_BUFFER_BYTES) if bytes_per_s else (UNPACED, FULL_BUFFER_BYTES)
    for name in os.listdir("/proc/self/fd"):
        sock = _tcp_socket(int(name))
        if sock is None:
            continue
        with sock:
            try:
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(4, "little"))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            except OSError as error:
                raise EngineUnavailable(f"this kernel does not pace connections: {error}") from error


def _tcp_socket(fd: int) -> socket.socket | None:
    """A descriptor of its own for the same socket; None for what is none, or is closed meanwhile."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        sock.close()
        return None
    return sock
