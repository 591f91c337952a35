"""Strangers at the doors of a server over gRPC and over frames, by real sockets: bounded, told why."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.client.grpc_channel import Stream
from tensorhub.errors import ServerUnavailable
from tensorhub.messages import Answer
from tensorhub.server import grpc_service
from tensorhub.server import host as host_module
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.host import Host
from tensorhub.types import SessionId
from tensorhub.wire.codec import decode_answer, encode_call
from tensorhub.wire.frames import FrameReader, frame
from tests.support.fake_machine import FakeMachine
from tests.unit.server_host.test_grpc_service import HELLO, Served, say, serving

#: Longer than whatever is waited for: a hang guard.
PATIENCE_S = 20.0


def limited(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """The library's options, some with smaller values."""
    options = {**dict(grpc_service._OPTIONS), **{f"grpc.{name}": value for name, value in limits.items()}}
    monkeypatch.setattr(grpc_service, "_OPTIONS", tuple(options.items()))


async def is_served(stream: Stream, call_id: int = 77) -> bool:
    return await say(stream, call_id, m.List(None)) == Answer(call_id, m.Listing(()))


@pytest.mark.slow
def test_connections_that_say_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of connections that never become any of HTTP/2 are closed in the handshake's time; a session stays, and
    others are let in."""
    limited(monkeypatch, server_handshake_timeout_ms=300)

    async def case(there: Served) -> None:
        good = await Stream.open(there.target, 5.0)
        await say(good, 1, HELLO)
        silent = [await asyncio.open_connection(there.bound.host, there.bound.port) for _ in range(200)]
        late = await Stream.open(there.target, 5.0)
        await say(late, 1, replace(HELLO, session=SessionId(b"b" * 16)))
        for reader, writer in silent:
            await reader.read()
            writer.close()
        assert await is_served(good)
        assert await is_served(late)
        await good.close()
        await late.close()

    serving(case)


@pytest.mark.slow
def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a connection is closed at once, and those who are served go on."""
    limited(monkeypatch, max_allowed_incoming_connections=8)

    async def case(there: Served) -> None:
        good = await Stream.open(there.target, 5.0)
        await say(good, 1, HELLO)
        flood = [await asyncio.open_connection(there.bound.host, there.bound.port) for _ in range(40)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in flood]
        open_ones = set(ended)
        while len(open_ones) > 8:
            _, open_ones = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
        assert await is_served(good)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for _, writer in flood:
            writer.transport.abort()
        await good.close()

    serving(case)


@pytest.mark.slow
def test_streams_without_hello_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that talks without ever saying Hello has `HELLO_S` in all; while there are too many, more are refused by
    a reason, and none of it reaches a session."""
    monkeypatch.setattr(host_module, "HELLO_S", 1.0)
    monkeypatch.setattr(host_module, "STRANGERS_MAX", 3)

    async def case(there: Served) -> None:
        good = await Stream.open(there.target, 5.0)
        await say(good, 1, HELLO)
        strangers = [await Stream.open(there.target, 5.0) for _ in range(3)]
        with pytest.raises(ServerUnavailable, match="did not say Hello yet"):
            await Stream.open(there.target, 5.0)
        # Who writes at the very moment of the cut may be told by its own library instead; who reads is told why.
        with pytest.raises(ServerUnavailable):
            await _talk_for_ever(strangers[0])
        with pytest.raises(ServerUnavailable, match="did not say Hello within"):
            await _read_for_ever(strangers[1])
        assert await is_served(good)
        for stream in (*strangers, good):
            await stream.close()

    serving(case)


@pytest.mark.slow
def test_bytes_that_trickle_end_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over plain frames, a peer whose Hello comes byte by byte is told how long it had, and cut off; a large frame that
    is announced before Hello is refused as soon as it is announced."""
    monkeypatch.setattr(host_module, "HELLO_S", 0.5)

    async def main() -> None:
        listener = listen("127.0.0.1")
        host, at = Host(FakeMachine()), address_of(listener)
        running = asyncio.create_task(serve_direct(listener, host))
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(at.host, at.port)
            writer.write(struct.pack(">I", 60_000))
            trickling = asyncio.create_task(_trickle(writer))
            assert b"did not say Hello within" in (await FrameReader(reader).next(idle_s=PATIENCE_S) or b"")
            trickling.cancel()
            await asyncio.gather(trickling, return_exceptions=True)
            writer.transport.abort()
            reader, writer = await asyncio.open_connection(at.host, at.port)
            writer.write(struct.pack(">I", 1 << 20))
            assert b"65536 is the most" in (await FrameReader(reader).next(idle_s=PATIENCE_S) or b"")
            writer.transport.abort()
        host.stop("done")
        await running

    asyncio.run(main())


async def _talk_for_ever(stream: Stream) -> None:
    while True:
        await say(stream, 5, m.List(None))


async def _read_for_ever(stream: Stream) -> None:
    while True:
        await stream.read()


async def _trickle(writer: asyncio.StreamWriter) -> None:
    """The pace of a slow peer; nobody waits for it."""
    while True:
        writer.write(b"\x91")
        await writer.drain()
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_thousands_of_silent_connections_keep_no_session_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many silent connections as may be new, and some that give way: whoever says Hello is let in all the while."""
    monkeypatch.setattr(host_module, "STRANGERS_MAX", 64)
    monkeypatch.setattr(host_module, "GRACE_S", 0.0)

    async def main() -> None:
        listener = listen("127.0.0.1")
        host, at = Host(FakeMachine()), address_of(listener)
        running = asyncio.create_task(serve_direct(listener, host))
        async with asyncio.timeout(PATIENCE_S):
            silent: list[socket.socket] = []
            for _ in range(500):
                silent.append(socket.create_connection((at.host, at.port), PATIENCE_S))
                await asyncio.sleep(0)
            reader, writer = await asyncio.open_connection(at.host, at.port)
            writer.write(frame(encode_call(m.Call(1, HELLO))))
            answer = decode_answer(await FrameReader(reader).next(idle_s=PATIENCE_S) or b"")
            assert isinstance(answer.reply, m.Welcome)
            assert host.doors <= 65
            writer.transport.abort()
        for sock in silent:
            sock.close()
        host.stop("done")
        await running

    asyncio.run(main())
