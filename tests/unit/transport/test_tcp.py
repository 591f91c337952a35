"""The tcp engine against sources that do what a test says: what each way of failing means, and that nothing is late."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time

import numpy as np
import pytest

from tensorhub.errors import BadRequest, Closed, EngineUnavailable, NotRegistered, SourceFailed
from tensorhub.ports import Ranges
from tensorhub.transport import stream_peers, tcp
from tensorhub.transport.endpoints import Endpoint
from tensorhub.transport.tcp import SMALL_BYTES_MAX, TcpEngine
from tests.support import streams
from tests.support.streams import (
    PAGE,
    PATIENCE_S,
    SOON_S,
    Asked,
    greeting,
    leave,
    read,
    reply,
    scripted,
    serve_zeros,
    u64,
)

LARGE = SMALL_BYTES_MAX + 1


@pytest.fixture
def engine():
    opened = TcpEngine("127.0.0.1")
    yield opened
    asyncio.run(opened.close())


def failure(engine: TcpEngine, peer: bytes, target: np.ndarray, timeout_s: float = PATIENCE_S) -> SourceFailed:
    with pytest.raises(SourceFailed) as caught:
        asyncio.run(read(engine, peer, target, timeout_s))
    return caught.value


def test_a_source_that_ends_in_the_middle_is_a_failed_source(engine):
    """source_killed_midchunk: what had landed is counted, and the error says that the stream ended."""

    def die(asked: Asked) -> bool:
        asked.stream.sendall(reply(asked.number, asked.nbytes) + bytes(asked.nbytes // 4))
        return False

    with scripted(die) as source:
        error = failure(engine, source.locator(), np.zeros(4 * PAGE, dtype=np.uint8))
        assert "ended during a read" in error.message
        assert error.where.bytes_done == PAGE


def test_a_source_that_stops_in_the_middle_is_bounded_by_the_deadline(engine):
    """source_stopped: silence in the middle of a reply ends with the read's own deadline."""

    def stop(asked: Asked) -> bool:
        asked.stream.sendall(reply(asked.number, asked.nbytes) + bytes(asked.nbytes // 2))
        return True

    with scripted(stop) as source:
        error = failure(engine, source.locator(), np.zeros(2 * PAGE, dtype=np.uint8), SOON_S)
        assert "was not done within 0.05 s" in error.message
        assert error.where.bytes_done == PAGE


def test_late_bytes_meet_a_closed_stream(engine):
    """timeout_then_late_write: a stream on which a read timed out is closed; what the source still sends lands nowhere,
    and the next read has a stream of its own."""
    late = threading.Event()

    def answer_late(asked: Asked) -> bool:
        if source.connections == 1:
            late.wait(PATIENCE_S)
        return serve_zeros(asked)

    with scripted(answer_late) as source:
        first, second = np.full(PAGE, 0xEE, dtype=np.uint8), np.full(PAGE, 0xEE, dtype=np.uint8)
        failure(engine, source.locator(), first, SOON_S)
        late.set()
        asyncio.run(read(engine, source.locator(), second))
        assert (first == 0xEE).all()
        assert not second.any()
        assert source.connections == 2


def test_streams_are_reused_and_replaced_when_the_source_has_ended_them(engine):
    """One stream carries many reads; one that the source has cut since is noticed, and costs no read."""
    ended = threading.Event()

    def serve(asked: Asked) -> bool:
        serve_zeros(asked)
        return asked.number < 2

    with scripted(serve) as source:
        target = np.full(PAGE, 0xEE, dtype=np.uint8)
        for _ in range(3):
            asyncio.run(read(engine, source.locator(), target))
        assert source.connections == 1
        peer = engine._peers.enter(Endpoint.unpack(source.locator()))
        (stream, _) = peer.small._idle[0]
        while stream.is_idle():
            ended.wait(0)  # the source's thread is about to end it
        asyncio.run(leave(engine._peers, peer))
        asyncio.run(read(engine, source.locator(), target))
        assert source.connections == 2


def test_streams_unused_for_long_are_opened_anew(engine, monkeypatch):
    """The source cuts idle streams: the reader does not gamble on one that is about to be."""
    with scripted(serve_zeros) as source:
        target = np.zeros(PAGE, dtype=np.uint8)
        asyncio.run(read(engine, source.locator(), target))
        monkeypatch.setattr(stream_peers, "IDLE_S", 0.0)
        asyncio.run(read(engine, source.locator(), target))
        assert source.connections == 2


GARBLED = {
    "another number": lambda asked: reply(asked.number + 1, asked.nbytes),
    "fewer bytes": lambda asked: reply(asked.number, asked.nbytes - 1),
    "more bytes": lambda asked: reply(asked.number, asked.nbytes + 1),
    "refuses what was not asked": lambda asked: reply(asked.number, 0, status=streams.NOT_REGISTERED, index=7),
}


@pytest.mark.parametrize("lie", GARBLED.values(), ids=GARBLED.keys())
def test_a_reply_that_does_not_match_is_not_believed(engine, lie):
    """transport_lies: a reply for another request, or of another size, lands nowhere."""
    target = np.full(PAGE, 0xEE, dtype=np.uint8)

    def answer(asked: Asked) -> bool:
        asked.stream.sendall(lie(asked))
        return True

    with scripted(answer) as source:
        assert "does not keep to the protocol" in failure(engine, source.locator(), target).message
    assert (target == 0xEE).all()


def test_bytes_behind_a_reply_are_no_part_of_the_next(engine):
    """A source that says more than it was asked for loses its stream: nothing shifts into a later read."""

    def say_more(asked: Asked) -> bool:
        asked.stream.sendall(reply(asked.number, asked.nbytes) + bytes(asked.nbytes) + b"more")
        return True

    with scripted(say_more) as source:
        for _ in range(2):
            asyncio.run(read(engine, source.locator(), np.zeros(PAGE, dtype=np.uint8)))
        peer = engine._peers.enter(Endpoint.unpack(source.locator()))
        assert peer.small.take() is None or source.connections == 2
        asyncio.run(leave(engine._peers, peer))


def test_a_refused_range_is_named_with_its_place(engine):
    """The error names the range that the source refused, not the first of the batch."""

    def refuse(asked: Asked) -> bool:
        asked.stream.sendall(reply(asked.number, 0, status=streams.NOT_REGISTERED, index=1))
        return True

    target = np.zeros(24, dtype=np.uint8)
    local = u64(target.ctypes.data, target.ctypes.data + 8)
    with scripted(refuse) as source, pytest.raises(SourceFailed, match=r"16 bytes at 0x2000 \(not registered\)"):
        asyncio.run(engine.read(source.locator(), Ranges(u64(PAGE, 2 * PAGE), local, u64(8, 16)), PATIENCE_S))


GREETINGS = {
    "another program": (b"HTTP/1.1 400 Bad Request\r\n\r\n....", SourceFailed, "another program"),
    "another incarnation": (greeting(bytes(16), word=2), SourceFailed, "incarnation 000102030405060708090a0b0c0d0e0f"),
    "who lies about it": (greeting(b"x" * 16), SourceFailed, "is gone"),
    "another version": (greeting(bytes(16), word=1), EngineUnavailable, "another version"),
    "full": (greeting(bytes(16), word=3), SourceFailed, "too many readers"),
    "a status of later days": (greeting(bytes(16), word=99), SourceFailed, "status 99"),
}


@pytest.mark.parametrize(("greet", "kind", "says"), GREETINGS.values(), ids=GREETINGS.keys())
def test_who_greets_otherwise_is_not_asked_for_anything(engine, greet, kind, says):
    """restart_same_name_same_addr: whoever is not the incarnation that was meant gets no request."""
    requests = []
    with (
        scripted(lambda asked: bool(requests.append(asked)), greet) as source,
        pytest.raises(kind, match=says),
    ):
        asyncio.run(read(engine, source.locator(), np.zeros(PAGE, dtype=np.uint8)))
    assert not requests


def test_a_header_does_not_wait_behind_a_large_read(engine):
    """Small reads have a stream and a thread of their own: a source's progress is seen while its bytes still come."""
    release = threading.Event()

    def serve(asked: Asked) -> bool:
        if asked.nbytes > SMALL_BYTES_MAX:
            release.wait(PATIENCE_S)
        return serve_zeros(asked)

    async def both(peer: bytes) -> None:
        large = asyncio.create_task(read(engine, peer, np.zeros(LARGE, dtype=np.uint8)))
        await asyncio.sleep(0)
        await read(engine, peer, np.zeros(64, dtype=np.uint8))
        assert not large.done()
        release.set()
        await large

    with scripted(serve) as source:
        asyncio.run(both(source.locator()))


def test_one_stuck_source_does_not_hold_up_another(engine):
    """Every source has threads of its own: reads of a healthy one end while a sick one's wait."""
    stuck, threads = threading.Event(), 4

    def wait(asked: Asked) -> bool:
        stuck.wait(PATIENCE_S)
        return False

    async def both(sick: bytes, healthy: bytes) -> None:
        waiting = [asyncio.create_task(read(engine, sick, np.zeros(LARGE, dtype=np.uint8))) for _ in range(threads)]
        await asyncio.sleep(0)
        await read(engine, healthy, np.zeros(LARGE, dtype=np.uint8))
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*waiting, return_exceptions=True)
        )

    with scripted(wait) as sick, scripted(serve_zeros) as healthy:
        try:
            asyncio.run(both(sick.locator(), healthy.locator()))
        finally:
            stuck.set()


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_read_that_waits_ends_promptly(engine, end):
    """Cancelled or closed in mid-read: it ends, though the source says nothing and the deadline is far."""
    arrived, leave = threading.Event(), threading.Event()

    def wait(asked: Asked) -> bool:
        arrived.set()
        leave.wait(PATIENCE_S)
        return False

    async def run(peer: bytes) -> None:
        task = asyncio.create_task(read(engine, peer, np.zeros(PAGE, dtype=np.uint8)))
        await asyncio.to_thread(arrived.wait, PATIENCE_S)
        if end == "cancel":
            task.cancel()
        else:
            await engine.close()
        with pytest.raises(asyncio.CancelledError if end == "cancel" else Closed):
            await task

    with scripted(wait) as source:
        try:
            asyncio.run(run(source.locator()))
        finally:
            leave.set()


def test_closing_during_a_read_gives_everything_back():
    """register_cycle_1000: the last reader to leave a closed engine takes its threads and streams along."""
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    arrived, leave = threading.Event(), threading.Event()

    def wait(asked: Asked) -> bool:
        arrived.set()
        leave.wait(PATIENCE_S)
        return False

    async def run(peer: bytes) -> None:
        engine = TcpEngine("127.0.0.1")
        tasks = [asyncio.create_task(read(engine, peer, np.zeros(n, dtype=np.uint8))) for n in (PAGE, LARGE)]
        while not arrived.is_set():
            await asyncio.sleep(0)
        await engine.close()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, Closed)

    with scripted(wait) as source:
        try:
            asyncio.run(run(source.locator()))
        finally:
            leave.set()
    assert len(os.listdir("/proc/self/fd")) == fds
    while len(os.listdir("/proc/self/task")) > threads:  # a joined thread is listed a moment longer
        os.sched_yield()


def test_what_the_system_refuses_is_said(engine, monkeypatch):
    """register_failure_is_fatal: no memory for a registration, no descriptor for a read; nothing is half registered."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as refusing:
        refusing.setattr(engine._server, "add", refuse)
        with pytest.raises(EngineUnavailable, match="cannot register 8 bytes"):
            engine.register(PAGE, 8)
    with pytest.raises(NotRegistered):
        engine.deregister(PAGE, 8)
    monkeypatch.setattr(tcp.native, "StreamReading", refuse)
    with pytest.raises(EngineUnavailable, match="cannot read"):
        asyncio.run(read(engine, engine.locate(), np.zeros(8, dtype=np.uint8)))


def test_memory_that_is_not_mapped_here_is_the_callers_mistake(engine):
    """A target that does not exist is no fault of the source."""
    with scripted(serve_zeros) as source, pytest.raises(BadRequest, match="cannot land"):
        asyncio.run(engine.read(source.locator(), Ranges(u64(PAGE), u64(PAGE), u64(8)), PATIENCE_S))


def test_the_deadline_is_the_monotonic_clocks(engine, monkeypatch):
    """client_clock_skew: setting the wall clock changes no deadline."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with scripted(serve_zeros) as source:
        asyncio.run(read(engine, source.locator(), np.zeros(PAGE, dtype=np.uint8)))
