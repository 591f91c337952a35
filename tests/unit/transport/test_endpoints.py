"""What a stream engine binds, and what its locator says."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import replace

import msgpack
import pytest

from tensorhub.errors import EngineUnavailable
from tensorhub.transport import endpoints
from tensorhub.transport.endpoints import Endpoint, listen
from tensorhub.transport.tcp import TcpEngine

ENDPOINT = Endpoint("10.0.0.1", 7, bytes(range(16)), "boot", 1)


def test_a_locator_round_trips():
    """What one engine packs, another reads."""
    assert Endpoint.unpack(ENDPOINT.pack()) == ENDPOINT
    assert Endpoint.unpack(replace(ENDPOINT, host="fe80::1%eth0").pack()).address.host == "fe80::1%eth0"


@pytest.mark.parametrize(
    "change",
    [
        {"host": ""},
        {"host": "h" * 254},
        {"host": 7},
        {"host": [1]},
        {"port": 0},
        {"port": 65536},
        {"port": "7"},
        {"incarnation": b"short"},
        {"incarnation": "0123456789abcdef"},
        {"boot": [1]},
        {"network": None},
    ],
    ids=str,
)
def test_a_malformed_locator_is_refused(change):
    """Locators come from other processes, by way of the server: nothing in them is believed."""
    values = {name: getattr(ENDPOINT, name) for name in Endpoint.__slots__} | change
    with pytest.raises(EngineUnavailable, match="malformed"):
        Endpoint.unpack(msgpack.packb(values))


@pytest.mark.parametrize("locator", [b"", b"\xc1", msgpack.packb([]), msgpack.packb({"host": "h"})], ids=repr)
def test_what_is_no_locator_is_refused(locator):
    """Bytes of any kind."""
    with pytest.raises(EngineUnavailable, match="malformed"):
        Endpoint.unpack(locator)


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("192.0.2.7", "0.0.0.0")],
)
def test_what_is_bound(host, bound):
    """ipv6_endpoint, 64_clients_one_host: this machine's own number, and a port that the system chose; every interface
    where the number is another's that leads here (192.0.2.0/24 belongs to nobody)."""
    with listen(host) as listener:
        name, port = listener.getsockname()[:2]
        assert (name, port > 0) == (bound, True)


def test_a_foreign_ipv6_number_binds_every_interface():
    """As with IPv4: NAT, or an address that moves (2001:db8::/32 belongs to nobody)."""
    with listen("2001:db8::7") as listener:
        assert listener.getsockname()[0] == "::"


@pytest.mark.parametrize(("dual", "bound"), [(True, "::"), (False, "0.0.0.0")])
def test_a_name_binds_every_interface(monkeypatch, dual, bound):
    """It is for readers to look up; what they find may be either kind of number, where the kernel has both."""
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dual)
    with listen("weights.example") as listener:
        assert listener.getsockname()[0] == bound


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_an_address_that_names_nobody_is_refused(host):
    """Nobody could reach it: better said at the start than at the first pull."""
    with pytest.raises(EngineUnavailable, match="set TENSORHUB_ADVERTISE"):
        listen(host)


def test_what_cannot_be_bound_explains_itself(monkeypatch):
    """register_failure_is_fatal: no port left, or no such protocol in this kernel."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(endpoints, "_listen", refuse)
    with pytest.raises(EngineUnavailable, match=r"cannot listen on '::1': .*not supported"):
        TcpEngine("::1")


def test_loopback_of_elsewhere_is_out_of_reach():
    """loopback_refused: 127.0.0.1 of another host or container is not asked, for it would be our own."""
    engine = TcpEngine("127.0.0.1")
    own = Endpoint.unpack(engine.locate())
    assert engine.reaches(own.pack()) is None
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        for elsewhere in (replace(own, host=host, boot="another"), replace(own, host=host, network=1)):
            assert "is a loopback one of another host or container" in str(engine.reaches(elsewhere.pack()))
    assert engine.reaches(replace(own, host="10.0.0.7", boot="another").pack()) is None
    asyncio.run(engine.close())


def test_an_engine_names_the_host_it_was_given():
    """A number that leads here by NAT is advertised as it is; loopback never replaces it."""
    engine = TcpEngine("192.0.2.7")
    assert Endpoint.unpack(engine.locate()).host == "192.0.2.7"
    asyncio.run(engine.close())
