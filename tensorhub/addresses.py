"""Network addresses as text, `host:port` or `[::1]:port`: read and written here alone. Resolves and opens nothing."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from tensorhub.errors import BadRequest

PORT_MAX = 65535
#: With zeros in front, as some write them. Of thousands of digits Python makes no number.
PORT_DIGITS_MAX = 16


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, by name or by number, without brackets, and a port; 0 leaves the port to the system when binding."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host:port`; an IPv6 number stands in brackets, for its colons. `BadRequest` for anything else."""
        if text.startswith("["):
            host, bracket, port = text[1:].partition("]:")
            if bracket and ":" in host and is_number(host):
                return cls(host, _port(port, text))
        else:
            host, colon, port = text.rpartition(":")
            if colon and host and ":" not in host and "]" not in host and "/" not in host:
                return cls(host, _port(port, text))
        if text and not set(text) & set(":[]/"):
            raise BadRequest(f"address {text!r} lacks the port; write '{text}:PORT'")
        raise BadRequest(f"address {text!r} is none; write 'host:port', or '[::1]:port' for IPv6")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_number(host: str) -> bool:
    """Whether a host is written as an IP number (a scope, as in `fe80::1%eth0`, may follow)."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether it can mean nothing but the host that uses it."""
    return host == "localhost" or (is_number(host) and ipaddress.ip_address(host).is_loopback)


def _port(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= PORT_DIGITS_MAX) or int(text) > PORT_MAX:
        raise BadRequest(f"address {whole!r} has no port from 0 to {PORT_MAX}")
    return int(text)
