"""What a gRPC link says of addresses, settings and failures, before and without any server of ours."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from tensorhub import messages as m
from tensorhub.client import grpc_link as link_module
from tensorhub.client.grpc_link import GrpcConnection, grpc_link
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.messages import Call


@pytest.mark.parametrize("address", ["grpc://h:50051", "grpcs://10.0.0.1:1", "grpc://[::1]:50051"])
def test_addresses(address: str) -> None:
    """ipv6_endpoint: names, numbers and bracketed IPv6 numbers; the link says what was written."""
    link = grpc_link(address)
    assert link.address == address
    assert str(link._target) == address


@pytest.mark.parametrize(
    "address", ["grpc://h", "grpc://::1:50051", "grpc://h:0", "grpcx://h:1", "grpc://h:1/x", "h:1"]
)
def test_other_addresses_are_refused(address: str) -> None:
    """A missing port, a bare IPv6 number, a path: a mistake of the caller, told at once."""
    with pytest.raises(BadRequest):
        grpc_link(address)


def connect(address: str, timeout_s: float = 5.0) -> None:
    async def main() -> None:
        connection = await grpc_link(address).connect(timeout_s)
        await connection.close()

    asyncio.run(main())


def test_refused_is_named() -> None:
    """Nobody listens: said so, with gRPC's own words."""
    with pytest.raises(ServerUnavailable, match=r"nobody listens there \(UNAVAILABLE: .*Connection refused"):
        connect("grpc://127.0.0.1:1")


def test_unknown_names_are_named() -> None:
    """A host name that does not resolve is no refusal."""
    with pytest.raises(ServerUnavailable, match="host name that is unknown here"):
        connect("grpc://name.invalid:1")


def test_silence_ends_at_the_deadline() -> None:
    """Something accepts and says nothing: the deadline of `connect` is kept."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ServerUnavailable, match=r"did not answer within 0\.1 s"),
    ):
        connect(f"grpc://127.0.0.1:{silent.getsockname()[1]}", 0.1)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"TENSORHUB_TLS_CA": "/nowhere/ca.pem"}, "TENSORHUB_TLS_CA='/nowhere/ca.pem' holds no certificates"),
        ({"TENSORHUB_TLS_CA": __file__}, "holds no certificates"),
        ({"TENSORHUB_TLS_CERT": "c"}, "go together"),
        ({"TENSORHUB_TLS_CERT": __file__, "TENSORHUB_TLS_KEY": __file__}, "cannot be used"),
    ],
)
def test_settings_of_tls_that_cannot_be_used_are_named(
    settings: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing or wrong file is a mistake of the user's, not a server that is down."""
    for name in ("TENSORHUB_TLS_CA", "TENSORHUB_TLS_CERT", "TENSORHUB_TLS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=why):
        connect("grpcs://127.0.0.1:1")


def test_own_host_is_the_route_to_the_server() -> None:
    """loopback_refused: a loopback number only where the server itself is reached by loopback, by number or name."""

    async def main() -> None:
        for address, own in (("127.0.0.1:1", "127.0.0.1"), ("[::1]:1", "::1")):
            assert await grpc_link(f"grpc://{address}").own_host() == own
        assert await grpc_link("grpc://localhost:1").own_host() in {"127.0.0.1", "::1"}
        with pytest.raises(ServerUnavailable, match="unknown here"):
            await grpc_link("grpc://name.invalid:1").own_host()

    asyncio.run(main())


class StuckStream:
    """Takes nothing until it is ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self._over = asyncio.Event()

    async def write(self, data: bytes) -> None:
        await self._over.wait()
        raise ServerUnavailable(self.ended[0])

    def end(self, reason: str) -> None:
        self.ended.append(reason)
        self._over.set()

    async def close(self) -> None:
        self.end("closed by its owner")


def test_a_caller_that_gives_up_does_not_take_the_stream_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled `send` leaves the connection as it was: other calls wait on it; what waits is bounded."""
    monkeypatch.setattr(link_module, "OUTBOX_MAX", 2)

    async def main() -> None:
        stream = StuckStream()
        connection = GrpcConnection(stream)
        for call_id in (1, 2):
            await connection.send(Call(call_id, m.List(None)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await connection.send(Call(3, m.List(None)))
        assert stream.ended == []
        waiting = asyncio.create_task(connection.send(Call(4, m.List(None))))
        await asyncio.sleep(0)
        await connection.close()
        with pytest.raises(ServerUnavailable, match="is closed"):
            await waiting

    asyncio.run(main())


def test_a_server_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that is not taken in time ends the connection, and senders are told why."""
    monkeypatch.setattr(link_module, "WRITE_S", 0.01)

    async def main() -> None:
        stream = StuckStream()
        connection = GrpcConnection(stream)
        await connection.send(Call(1, m.List(None)))
        async with asyncio.timeout(5.0):
            await stream._over.wait()
        with pytest.raises(ServerUnavailable, match=r"takes no calls: one waited for 0\.01 s"):
            await connection.send(Call(2, m.List(None)))
        await connection.close()

    asyncio.run(main())


@pytest.mark.slow
def test_after_fork_it_says_so() -> None:
    """The library does not survive fork(): a child of a process that used it is told, instead of left to hang."""
    with pytest.raises(ServerUnavailable):
        connect("grpc://127.0.0.1:1")
    child = os.fork()
    if child == 0:
        try:
            connect("grpc://127.0.0.1:1")
        except BaseException as error:
            os._exit(0 if "does not survive fork()" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_connections_give_their_descriptors_back() -> None:
    """Sixty attempts leave as many descriptors and threads as thirty."""

    async def main() -> None:
        counts = []
        for number in range(60):
            with pytest.raises(ServerUnavailable):
                await grpc_link("grpc://127.0.0.1:1").connect(5.0)
            if number in {29, 59}:
                await asyncio.sleep(0.05)
                counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        (fds, threads), (fds_later, threads_later) = counts
        assert fds_later <= fds + 2
        assert threads_later <= threads + 2

    asyncio.run(main())


#: Forks while a stream is open, many times; prints how its children ended.
FORKING = """
import asyncio, collections, os, sys
from tensorhub.client.grpc_link import grpc_link
from tensorhub.errors import ServerUnavailable
async def main():
    link = grpc_link(sys.argv[1])
    connecting = asyncio.create_task(link.connect(60.0))
    await asyncio.sleep(0.2)
    endings = collections.Counter()
    for _ in range(40):
        child = os.fork()
        if child == 0:
            [number for number in range(20000)]
            os._exit(0)
        endings[os.waitpid(child, 0)[1]] += 1
    connecting.cancel()
    print(dict(endings))
asyncio.run(main())
"""


@pytest.mark.slow
def test_children_of_a_process_with_a_channel_live() -> None:
    """A trainer that forks its data loaders while it is connected loses none of them to the library."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-c", FORKING, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "{0: 40}"), done.stderr


BINDING = """
import asyncio
from tensorhub.wire.grpc_library import grpc
async def main():
    grpc.aio.server().add_insecure_port("192.0.2.1:5")
try:
    asyncio.run(main())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_the_library_leaves_the_last_word_to_our_errors() -> None:
    """Its core writes no lines of its own to stderr, unless the user asks for them."""
    told = []
    for chosen in ({}, {"GRPC_VERBOSITY": "ERROR"}):
        inherited = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        command = [sys.executable, "-c", BINDING]
        env = inherited | chosen
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert "Failed to bind" in done.stdout
        told.append(done.stderr)
    assert told[0] == ""
    assert "192.0.2.1" in told[1]
