"""What peers of the local server may do to it: nothing that the others notice. Real sockets, server in this loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from tensorhub import messages as m
from tensorhub.errors import BadRequest, Broken, Unauthorized
from tensorhub.messages import Answer, Call
from tensorhub.server import local as local_module
from tensorhub.server import streams as streams_module
from tensorhub.server.host import Host
from tensorhub.server.local import elect, serve
from tensorhub.types import Epoch, Location, ModelKey, ReplicaId, Seat, SessionId
from tensorhub.wire import codec
from tensorhub.wire.codec import decode_answer, encode_answer, encode_call
from tensorhub.wire.frames import FrameReader, frame
from tests.support.fake_machine import FakeMachine
from tests.support.servers import private_servers

SEAT = Seat(ModelKey("job", "actor"), ReplicaId("r"), 0)


class Peer:
    """A raw connection: sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.reader = reader
        self._frames = FrameReader(reader)

    def send(self, *calls: Call) -> None:
        self.writer.write(b"".join(frame(encode_call(call)) for call in calls))

    async def answer(self) -> Answer | None:
        """The next answer; None once the server closed the connection."""
        try:
            data = await self._frames.next(idle_s=10.0)
        except ConnectionError:
            return None
        return None if data is None else decode_answer(data)

    async def hello(self, session: bytes) -> None:
        self.send(Call(1, m.Hello(m.PROTOCOL, SessionId(session * 16), b"", "host", 1, Epoch(b""))))
        answer = await self.answer()
        assert answer is not None
        assert isinstance(answer.reply, m.Welcome)

    async def is_served(self) -> bool:
        self.send(Call(77, m.List(None)))
        return await self.answer() == Answer(77, m.Listing(()))


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a case with a way to connect to a served fake machine; all connections are closed after it."""

    def run(case: Callable[[Callable[[], Awaitable[Peer]]], Awaitable[None]], idle_s: float = 3600.0) -> None:
        async def main() -> None:
            peers: list[Peer] = []
            elected = await elect("unit")
            assert elected is not None
            host = Host(FakeMachine())
            running = asyncio.create_task(serve(elected, host, idle_s))

            async def connect() -> Peer:
                place = local_module.LocalPlace.open("unit")
                sock = place.connect()
                place.close()
                assert sock is not None
                peers.append(Peer(*await asyncio.open_unix_connection(sock=sock)))
                return peers[-1]

            try:
                await case(connect)
            finally:
                for peer in peers:
                    peer.writer.transport.abort()
                host.stop("done")
                await asyncio.gather(running, return_exceptions=True)

        with private_servers(tmp_path, monkeypatch):
            asyncio.run(main())

    return run


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 2**32 - 1),
        struct.pack(">I", 4) + b"\xff\xff\xff\xff",
        struct.pack(">I", 0),
        frame(msgpack.packb((0, (99,)))),
    ],
    ids=["http", "oversize", "noise", "empty", "unknown one-way"],
)
def test_peer_that_speaks_badly_is_told_and_cut_off(
    serving: Callable[..., None], noise: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Garbage and oversize end one connection, with the reason; whoever else is there does not notice."""

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        good, bad = await connect(), await connect()
        await good.hello(b"g")
        bad.writer.write(noise)
        answer = await bad.answer()
        assert answer is not None
        assert (answer.id, answer.reply.error) == (0, "BadRequest")
        assert await bad.answer() is None
        assert await good.is_served()

    with caplog.at_level(logging.WARNING, "tensorhub.server"):
        serving(case)
    assert "speaks badly" in caplog.text


def test_unreadable_call_is_refused_to_its_caller(serving: Callable[..., None]) -> None:
    """A call from the future is refused under its id; the connection stays."""

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        peer = await connect()
        await peer.hello(b"g")
        peer.writer.write(frame(msgpack.packb((5, (63, "future")))))
        answer = await peer.answer()
        assert answer is not None
        assert (answer.id, answer.reply.error) == (5, "BadRequest")
        assert await peer.is_served()

    serving(case)


def test_frame_that_is_cut_ends_its_connection(serving: Callable[..., None]) -> None:
    """A peer that dies inside a frame is a lost connection, nothing else."""

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        good, bad = await connect(), await connect()
        await good.hello(b"g")
        bad.writer.write(struct.pack(">I", 100) + b"abc")
        bad.writer.write_eof()
        assert (await bad.answer()).reply.error == "BadRequest"
        assert await bad.answer() is None
        assert await good.is_served()

    serving(case)


def test_slow_reader_is_dropped(
    serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that asks and does not read is cut off when its answers pile up; others are served meanwhile."""
    monkeypatch.setattr(streams_module, "WRITE_S", 0.05)

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        good, slow = await connect(), await connect()
        await good.hello(b"g")
        await slow.hello(b"s")
        slow.writer.transport.pause_reading()
        slow.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with asyncio.timeout(30.0):
            while "does not read" not in caplog.text:
                if slow.writer.transport.get_write_buffer_size() == 0:
                    slow.send(*[Call(2, m.Beat(SessionId(b"s" * 16)))] * 100)
                await asyncio.sleep(0)
        assert await good.is_served()

    with caplog.at_level(logging.WARNING, "tensorhub.server"):
        serving(case)


def test_silent_connection_is_closed(serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that never says anything does not stay; one with a session may be silent."""
    monkeypatch.setattr(streams_module, "UNBOUND_IDLE_S", 0.02)
    monkeypatch.setattr(streams_module, "BOUND_LOOK_S", 0.01)

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        good = await connect()
        await good.hello(b"g")
        silent = await connect()
        assert await silent.answer() is None
        assert await good.is_served()

    serving(case)


def test_connections_are_bounded(serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit a connection is closed at once, and the ones that are open go on."""
    monkeypatch.setattr(streams_module, "CONNECTIONS_MAX", 1)

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        good = await connect()
        await good.hello(b"g")
        assert await (await connect()).answer() is None
        assert await good.is_served()

    serving(case)


def test_strangers_are_not_served(serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user is closed before a byte of it is read."""

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        stranger = await connect()
        assert await stranger.answer() is None

    def refuse(sock: socket.socket) -> int:
        raise Unauthorized("belongs to another user")

    monkeypatch.setattr(local_module, "check_peer", refuse)
    serving(case)


def test_answer_too_large_for_a_frame_is_a_refusal(
    serving: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller of a call whose answer does not fit learns that; its connection stays."""

    def encode(answer: Answer) -> bytes:
        if isinstance(answer.reply, m.Joined):
            raise BadRequest("takes more than a frame holds")
        return encode_answer(answer)

    monkeypatch.setattr(codec, "encode_answer", encode)

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        peer = await connect()
        await peer.hello(b"g")
        peer.send(Call(2, m.Join(SEAT, 1, "", False, Location())))
        answer = await peer.answer()
        assert answer is not None
        assert (answer.id, answer.reply.message) == (2, "takes more than a frame holds")
        assert await peer.is_served()

    serving(case)


def test_election_has_one_winner(serving: Callable[..., None]) -> None:
    """While one serves, another one that would like to gives up at once."""

    async def case(connect: Callable[[], Awaitable[Peer]]) -> None:
        assert await elect("unit") is None

    serving(case)


def test_broken_machine_ends_the_server_after_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller that broke the machine hears `Broken` before the server ends; the socket is gone with it."""

    async def main() -> None:
        elected = await elect("unit")
        assert elected is not None
        running = asyncio.create_task(serve(elected, Host(FakeMachine()), 3600.0))
        sock = elected.place.connect()
        peer = Peer(*await asyncio.open_unix_connection(sock=sock))
        await peer.hello(b"g")
        peer.send(Call(2, m.Abort(SEAT, 1, 1, "break")))
        answer = await peer.answer()
        assert answer is not None
        assert (answer.id, answer.reply.error) == (2, "Broken")
        assert await peer.answer() is None
        with pytest.raises(Broken):
            await running
        peer.writer.close()
        await peer.writer.wait_closed()

    with private_servers(tmp_path, monkeypatch) as servers:
        asyncio.run(main())
        assert not (servers.root / "unit" / "socket").exists()


def test_server_leaves_when_nobody_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a connection for the idle time, `serve` returns by itself and the next election is free."""

    async def main() -> None:
        for _ in range(2):
            elected = await elect("unit")
            assert elected is not None
            async with asyncio.timeout(10.0):
                await serve(elected, Host(FakeMachine()), 0.01)

    with private_servers(tmp_path, monkeypatch):
        asyncio.run(main())


def test_failed_accept_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without free descriptors a connection waits until there are some; the server neither spins nor ends."""
    monkeypatch.setattr(streams_module, "ACCEPT_PAUSE_S", 0.01)

    class Exhausted:
        """A listener whose first accept finds no descriptor."""

        def __init__(self, inner: socket.socket) -> None:
            self._inner = inner
            self._failures = [OSError(errno.EMFILE, "too many open files")]
            self.fileno, self.close = inner.fileno, inner.close

        def accept(self) -> tuple[socket.socket, object]:
            if self._failures:
                raise self._failures.pop()
            return self._inner.accept()

    async def main() -> None:
        elected = await elect("unit")
        assert elected is not None
        host = Host(FakeMachine())
        exhausted = replace(elected, listener=Exhausted(elected.listener))
        running = asyncio.create_task(serve(exhausted, host, 3600.0))
        peer = Peer(*await asyncio.open_unix_connection(sock=elected.place.connect()))
        await peer.hello(b"g")
        peer.writer.close()
        await peer.writer.wait_closed()
        host.stop("done")
        await running

    with private_servers(tmp_path, monkeypatch), caplog.at_level(logging.WARNING, "tensorhub.server"):
        asyncio.run(main())
    assert "too many open files" in caplog.text
