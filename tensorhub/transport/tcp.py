"""The engine between any two hosts: one-sided reads over streams that threads of C serve, without the interpreter.

Serves registered ranges only, to readers that know this engine's incarnation. Several streams to a source, received in
place, digested as they land; a stream on which a read failed is closed, so nothing arrives late. docs/transport.md
draws the protocol. TLS, windows for long lines and resumption have their places there and are not built.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from functools import partial

from tensorhub import native
from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, Closed, EngineUnavailable, SourceFailed, SourceSilent, TensorHubError, Where
from tensorhub.native import Failure
from tensorhub.native.streams import INCARNATION_BYTES
from tensorhub.ports import HOST_ONLY, U64, Chunks, Course, Ranges
from tensorhub.transport.crew import Crews
from tensorhub.transport.endpoints import Endpoint, listen
from tensorhub.transport.following import NEVER_NS, followed, run_course, wrong_chunk
from tensorhub.transport.ranges import RegisteredRanges, check_ranges
from tensorhub.transport.route import ADVERTISE_ENV
from tensorhub.transport.stream_peers import Lane, Peer, StreamPeers, Trouble

#: Reads up to this size go over a stream of their own: they take less time than a large one's next piece.
SMALL_BYTES_MAX = 64 << 10
#: Below this a second stream costs more than it saves.
PARALLEL_BYTES_MIN = 4 << 20

#: Open engines of this process, for a forked child to give their descriptors back.
_engines: weakref.WeakSet[TcpEngine] = weakref.WeakSet()


class TcpEngine:
    """`ports.Engine` over TCP. `host` is what its locators name: a number of this machine, or one that leads to it."""

    name = "tcp"
    kinds = HOST_ONLY

    def __init__(self, host: str, limits: native.Limits | None = None) -> None:
        self._pid = os.getpid()
        listener = listen(host)
        try:
            self._own = Endpoint.own(host, listener.getsockname()[1], os.urandom(INCARNATION_BYTES))
        except BaseException:
            listener.close()
            raise
        self._registered = RegisteredRanges()
        self._peers = StreamPeers()
        self._crews = Crews()
        self._closed = False
        try:
            self._server = native.StreamServer(listener, self._own.incarnation, limits)
        except OSError as error:
            raise EngineUnavailable(f"cannot serve on {self._own.address}: {error}") from error
        _engines.add(self)

    def locate(self) -> bytes:
        if os.getpid() != self._pid:
            raise Closed(f"this engine belongs to process {self._pid}; open another after a fork")
        return self._own.pack()

    def reaches(self, peer: bytes) -> str | None:
        """Why a peer is out of reach, or None as far as can be told without asking it."""
        try:
            endpoint = Endpoint.unpack(peer)
        except EngineUnavailable as error:
            return error.message
        if endpoint.address.is_loopback and not endpoint.shares_network_with(self._own):
            return (
                f"the source's address {endpoint.address} is a loopback one of another host or container; "
                f"{ADVERTISE_ENV} there names another"
            )
        return None

    def register(self, address: int, nbytes: int) -> None:
        self._check_open()
        self._registered.add(address, nbytes)
        try:
            self._server.add(address, nbytes)
        except OSError as error:
            self._registered.remove(address, nbytes)
            raise EngineUnavailable(f"cannot register {nbytes} bytes at {address:#x}: {error}") from error

    def deregister(self, address: int, nbytes: int) -> None:
        """Waits for one send at most, a millisecond; replies that were to send more of the range are cut."""
        self._registered.remove(address, nbytes)
        self._server.remove(address, nbytes)

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        check_ranges(ranges)
        source = self._enter(peer)
        try:
            await source.resolve(timeout_s)
            self._check_open()
            wanted = (chunks.firsts, chunks.digests) if chunks is not None else (None, None)
            reading = _begin(ranges, deadline_ns, *wanted)
            try:
                troubles: list[Trouble] = []
                lane = source.small if ranges.total_bytes <= SMALL_BYTES_MAX else source.bulk
                threads = lane.streams if ranges.total_bytes >= PARALLEL_BYTES_MIN else 1
                take_part = partial(_take_part, source, lane, reading, troubles)
                await self._crews.run(lane.pool, take_part, reading.cancel, threads, deadline_ns)
                outcome = reading.outcome()
            finally:
                reading.close()
        finally:
            self._peers.leave(source)
        if outcome.bytes_done != ranges.total_bytes or outcome.failure is not Failure.NONE:
            at = source.endpoint.address
            late = SourceFailed(f"a read of {ranges.total_bytes} bytes from {at} was not done within {timeout_s} s")
            raise self._failure(source, outcome, troubles, late)

    async def follow(self, peer: bytes, course: Course, stall_s: float) -> None:
        """`ports.Follower`: the source holds every chunk back until its own watermark has passed it."""
        ranges = course.ranges
        check_ranges(ranges)
        source = self._enter(peer)
        try:
            await source.resolve(stall_s)
            self._check_open()
            reading = _begin(ranges, NEVER_NS, course.firsts, None, followed(course, stall_s))
            try:
                troubles: list[Trouble] = []
                parts = itertools.count()

                def take_part() -> None:
                    if next(parts) == 0:
                        if not _take_part(source, source.bulk, reading, troubles):
                            reading.give_up()  # else the others would wait for it until it counts as silent
                    elif reading.wait_fast():
                        _take_part(source, source.bulk, reading, [])  # the first does the work

                threads = source.bulk.streams if ranges.total_bytes >= PARALLEL_BYTES_MIN else 1
                await run_course(self._crews, take_part, reading.cancel, threads, "tensorhub-tcp-follow")
                outcome = reading.outcome()
            finally:
                reading.close()
        finally:
            self._peers.leave(source)
        if outcome.bytes_done != ranges.total_bytes or outcome.failure is not Failure.NONE:
            late = SourceSilent(f"nothing came from {source.endpoint.address} for {stall_s} s")
            raise self._failure(source, outcome, troubles, late)

    async def close(self) -> None:
        self._closed = True
        await self._crews.end()
        self._peers.close()
        self._registered.clear()
        self._server.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this engine is closed; open another")

    def _enter(self, peer: bytes) -> Peer:
        """The source, held until `leave`."""
        self._check_open()
        if (why := self.reaches(peer)) is not None:
            raise EngineUnavailable(why)
        return self._peers.enter(Endpoint.unpack(peer))

    def _failure(
        self, source: Peer, outcome: native.StreamOutcome, troubles: list[Trouble], late: SourceFailed
    ) -> TensorHubError:
        """What a read that is not complete means."""
        at, where = source.endpoint.address, Where(bytes_done=outcome.bytes_done)
        if outcome.cancelled:
            return Closed("the engine was closed during a read", where)
        if (failure := _failure_on_stream(outcome, at, where)) is not None:
            return failure
        for trouble in troubles:
            explained = source.explain(trouble, self._own)
            if explained is not None:
                return explained.at(where)
        return late.at(where)

    def _forget(self) -> None:
        """In a forked child: the port and the streams are the parent's."""
        self._closed = True
        self._server.forget()


def _begin(
    ranges: Ranges, deadline_ns: int, firsts: U64 | None, digests: U64 | None, follow: native.Follow | None = None
) -> native.StreamReading:
    try:
        return native.StreamReading(ranges.remote, ranges.local, ranges.nbytes, deadline_ns, firsts, digests, follow)
    except OSError as error:
        raise EngineUnavailable(f"this process cannot read: {error}") from error


def _take_part(source: Peer, lane: Lane, reading: native.StreamReading, troubles: list[Trouble]) -> bool:
    """One thread's part in a read, over a stream of the lane, or a new one; adds why it could not be opened."""
    stream = lane.take()
    if stream is None:
        opened = source.open_stream(reading)
        if isinstance(opened, Trouble):
            troubles.append(opened)  # others may do the work
            return False
        stream = opened
    if reading.run(stream):
        lane.give(stream)
    else:
        stream.close()
    return True


def _failure_on_stream(outcome: native.StreamOutcome, at: Address, where: Where) -> TensorHubError | None:
    """What went wrong after a stream was open, if anything did."""
    match outcome.failure:
        case Failure.LOST:
            why = os.strerror(outcome.errno)
            return SourceFailed(f"the stream from {at} ended during a read: {why}; the source died or cut it", where)
        case Failure.REFUSED:
            return SourceFailed(
                f"the source at {at} does not serve {outcome.nbytes} bytes at {outcome.address:#x} "
                f"({outcome.status.name.lower().replace('_', ' ')})",
                where,
            )
        case Failure.WRONG:
            return SourceFailed(wrong_chunk(outcome.wrong), where)
        case Failure.GARBLED:
            return SourceFailed(f"the source at {at} does not keep to the protocol", where)
        case Failure.LOCAL:
            return BadRequest(f"this process cannot land what it reads: {os.strerror(outcome.errno)}", where)
        case _:
            return None


def _after_fork() -> None:
    for engine in list(_engines):
        engine._forget()
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork)
