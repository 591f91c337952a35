"""Frames over TCP: what is not there, not ours or not a server is told as such, in either family of numbers."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tensorhub import messages as m
from tensorhub.addresses import Address
from tensorhub.client.frame_link import FrameLink
from tensorhub.errors import ServerUnavailable
from tensorhub.messages import Answer, Call
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.host import Host
from tensorhub.types import Epoch, SessionId
from tests.support.fake_machine import BEAT_NS, EPOCH, LEASE_NS, FakeMachine

HELLO = Call(1, m.Hello(m.PROTOCOL, SessionId(b"s" * 16), b"", "host", 1, Epoch(b"")))


@pytest.mark.parametrize("number", ["127.0.0.1", "::1"])
def test_both_families_are_spoken(number: str) -> None:
    """ipv6_endpoint: a server on `[::1]:port` is dialled, served and found like any other."""

    async def main() -> None:
        listener = listen(number)
        host, at = Host(FakeMachine()), address_of(listener)
        serving = asyncio.create_task(serve_direct(listener, host))
        link = FrameLink("test", Address.parse(str(at)))
        connection = await link.connect(5.0)
        await connection.send(HELLO)
        assert await connection.receive() == Answer(1, m.Welcome(EPOCH, LEASE_NS, BEAT_NS, False))
        assert await link.own_host() == number
        await connection.close()
        host.stop("done")
        await serving

    asyncio.run(main())


def test_both_ends_send_at_once() -> None:
    """Small frames wait for no others, at neither end, and a host that vanishes is noticed by the kernel."""

    async def main() -> None:
        listener = listen("127.0.0.1")
        link = FrameLink("test", address_of(listener))
        sock = await link._dial(5.0)
        with sock, listener:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    asyncio.run(main())


def test_nobody_there_is_told() -> None:
    """A port that nobody listens on, for connections and heartbeats: `ServerUnavailable` with the address."""

    async def main() -> None:
        listener = listen("127.0.0.1")
        at = address_of(listener)
        listener.close()
        link = FrameLink("test", at)
        with pytest.raises(ServerUnavailable, match=f"test cannot be reached at {at}"):
            await link.connect(5.0)
        with pytest.raises(ServerUnavailable, match=str(at)):
            await link.beat(b"s" * 16, BEAT_NS)

    asyncio.run(main())


def test_what_is_no_server_is_told() -> None:
    """Something else that listens there is called by what it does, not by what the codec says."""

    async def main() -> None:
        listener = listen("127.0.0.1")
        connection = await FrameLink("test", address_of(listener)).connect(5.0)
        sock, _ = listener.accept()
        with listener, sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ServerUnavailable, match="speaks badly"):
                await connection.receive()
            await connection.close()

    asyncio.run(main())


def test_a_number_of_another_host_is_not_listened_on() -> None:
    """The error names the number that cannot be bound."""
    with pytest.raises(ServerUnavailable, match=r"cannot listen at 192\.0\.2\.77"):
        listen("192.0.2.77")
