"""Addresses as text: one function reads and writes them, IPv6 included."""

from __future__ import annotations

import pytest

from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.transport.route import ADVERTISE_ENV, advertised_host, host_towards


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [
        ("h9.cluster:50051", "h9.cluster", 50051, False),
        ("10.0.0.7:0", "10.0.0.7", 0, False),
        ("127.0.0.1:1", "127.0.0.1", 1, True),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:65535", "::1", 65535, True),
        ("[fe80::1%eth0]:9", "fe80::1%eth0", 9, False),
    ],
)
def test_an_address_survives_both_ways(text: str, host: str, port: int, is_loopback: bool) -> None:
    """ipv6_endpoint: what is parsed prints as it was written, with brackets around the colons of IPv6."""
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, is_loopback)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "h", ":1", "h:", "h:65536", "h:-1", "h:x", "::1:80", "[::1]", "[::1]80", "[h]:1", "a/b:1", "h:\u0661"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    """ipv6_endpoint: half an address, or one whose colons cannot be told apart, is refused with the form to write."""
    with pytest.raises(BadRequest, match="port"):
        Address.parse(text)


def test_a_host_alone_is_told_what_it_lacks() -> None:
    """A host without a port is no riddle: the message says what is missing and how it looks."""
    with pytest.raises(BadRequest, match=r"'127\.0\.0\.1' lacks the port; write '127\.0\.0\.1:PORT'"):
        Address.parse("127.0.0.1")


def test_the_own_host_is_the_one_on_the_way_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """loopback_refused: loopback comes out only towards a server reached by loopback; the user's word goes first."""
    assert host_towards(Address("127.0.0.1", 1)) == "127.0.0.1"
    with pytest.raises(ServerUnavailable, match="unknown here"):
        host_towards(Address("no-such-host.invalid", 1))
    assert advertised_host("10.0.0.7") == "10.0.0.7"
    monkeypatch.setenv(ADVERTISE_ENV, "weights.example")
    assert advertised_host("10.0.0.7") == "weights.example"
