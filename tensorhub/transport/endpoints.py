"""Where a stream engine listens and what its locator says: host, port, and which life of which process is meant.

Decides which address to bind and which address of another host means nothing here. Sends and receives nothing.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from dataclasses import asdict, dataclass

from tensorhub.addresses import PORT_MAX, Address, is_loopback, is_number
from tensorhub.errors import EngineUnavailable
from tensorhub.native.streams import INCARNATION_BYTES
from tensorhub.transport.locators import malformed, packed, unpacked
from tensorhub.transport.processes import boot_id
from tensorhub.transport.route import ADVERTISE_ENV

#: Connections that wait to be accepted: more than a host's readers open at once; the kernel cuts it to its own limit.
BACKLOG = 1024
#: The longest name that DNS knows.
HOST_CHARS_MAX = 253


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One life of one stream engine: what it shows to others."""

    host: str
    port: int
    #: Random id of this life. Another process at the same address has another: whoever knows it was told it.
    incarnation: bytes
    #: Random id of the boot of its kernel, and inode of its network namespace: what a loopback address is inside of.
    boot: str
    network: int

    @classmethod
    def own(cls, host: str, port: int, incarnation: bytes) -> Endpoint:
        """Of this process; `EngineUnavailable` where /proc does not tell."""
        try:
            return cls(host, port, incarnation, boot_id(), os.stat("/proc/self/ns/net").st_ino)
        except OSError as error:
            raise EngineUnavailable(f"/proc does not say which network this process is in: {error}") from error

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    def pack(self) -> bytes:
        return packed(asdict(self))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def unpack(cls, locator: bytes) -> Endpoint:
        """`EngineUnavailable` for anything but what `pack` makes."""
        endpoint = cls(**unpacked(locator, _TYPES))  # type: ignore[arg-type]  # checked: they are of these types
        if not (endpoint.host.isprintable() and 0 < len(endpoint.host) <= HOST_CHARS_MAX):
            raise malformed(f"host {endpoint.host[:40]!r}")
        if not 0 < endpoint.port <= PORT_MAX:
            raise malformed(f"port {endpoint.port}")
        if len(endpoint.incarnation) != INCARNATION_BYTES:
            raise malformed(f"an incarnation of {len(endpoint.incarnation)} bytes")
        return endpoint

    def shares_network_with(self, other: Endpoint) -> bool:
        """Whether loopback addresses of both mean the same interface."""
        return (self.boot, self.network) == (other.boot, other.network)


_TYPES = {"host": str, "port": int, "incarnation": bytes, "boot": str, "network": int}


def listen(host: str) -> socket.socket:
    """A socket that listens on a port of the system's choice under `host`, or, where `host` is none of this machine's
    numbers (a name, or an address that NAT translates), on every interface. `EngineUnavailable` says why it cannot."""
    if host in {"", "0.0.0.0", "::"}:  # noqa: S104 - refused, not bound
        raise EngineUnavailable(f"{host!r} is no address that others reach; set {ADVERTISE_ENV} to one")
    number = "127.0.0.1" if host == "localhost" else host
    try:
        if is_number(number):
            family, _, _, _, place = socket.getaddrinfo(number, 0, type=socket.SOCK_STREAM)[0]
            try:
                return _listen(family, place)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL or is_loopback(number):
                    raise
            return _listen(family, ("::" if family == socket.AF_INET6 else "0.0.0.0", 0))  # noqa: S104 - see above
        return _listen_everywhere()
    except OSError as error:
        raise EngineUnavailable(
            f"cannot listen on {host!r}: {error}; set {ADVERTISE_ENV} to another address"
        ) from error


def _listen(family: int, place: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_everywhere() -> socket.socket:
    """IPv4 and IPv6 on one port where the kernel has both: a name may resolve to either."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return _listen(socket.AF_INET, ("0.0.0.0", 0))  # noqa: S104 - the user named something that cannot be bound
