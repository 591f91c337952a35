"""The sources that a stream engine reads from: their addresses, open streams and threads, and what a failure means.

Decides how many streams a source gets, and whether it is dead, somebody else, or out of reach. Knows no ranges.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tensorhub import native
from tensorhub.addresses import is_number
from tensorhub.errors import EngineUnavailable, SourceFailed, TensorHubError
from tensorhub.native import Opening, Status
from tensorhub.transport.endpoints import Endpoint

#: Streams of one source that large reads share; see docs/transport.md for what more of them cost and save.
BULK_STREAMS = 2
#: And one for small reads (a progress block's header), which must not wait behind large ones.
SMALL_STREAMS = 1
#: Sources whose streams and threads are kept between reads; a process reads from one or two at a time.
PEERS_MAX = 16
#: A stream unused for longer is opened anew: well before the server cuts it (`native.Limits.idle_s`). A source that
#: nothing was read from for so long is closed, threads and all: what many rounds have met does not stay.
IDLE_S = 60.0
#: From the first packet to a connection; two lost ones take 3 s. Longer, and whoever is there drops our packets.
CONNECT_S = 5.0
#: What this process or its host lacks, whatever the source does: descriptors, memory, a port of its own.
OWN_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
#: For a name to become a number. Resolvers themselves would wait for half a minute.
RESOLVE_S = 5.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a stream to a source was not opened; the detail is that of `native.Opening`."""

    opening: Opening
    detail: int


class Lane:
    """The threads that read from one source, and streams for them. Each thread holds at most one stream."""

    def __init__(self, streams: int, name: str) -> None:
        self.streams = streams
        self.pool = ThreadPoolExecutor(streams, thread_name_prefix=name)
        #: Streams nobody uses, with the time of their last use; taken and given by threads, newest first.
        self._idle: list[tuple[native.Stream, float]] = []

    def take(self) -> native.Stream | None:
        """A stream that is as good as new, if there is one."""
        while True:
            try:
                stream, used_s = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - used_s < IDLE_S and stream.is_idle():
                return stream
            stream.close()

    def give(self, stream: native.Stream) -> None:
        self._idle.append((stream, time.monotonic()))

    def close(self) -> None:
        """Nobody reads any more."""
        self.pool.shutdown()
        while self._idle:
            self._idle.pop()[0].close()


@dataclass(slots=True)
class Peer:
    """One life of one source."""

    endpoint: Endpoint
    bulk: Lane = field(default_factory=lambda: Lane(BULK_STREAMS, "tensorhub-tcp-read"))
    small: Lane = field(default_factory=lambda: Lane(SMALL_STREAMS, "tensorhub-tcp-look"))
    #: (family, socket address) of each number that its host has.
    numbers: list[tuple[int, tuple[object, ...]]] = field(default_factory=list)
    #: Whether the host must be looked up: for the first time, or again, for a name may mean another number by now.
    unresolved: bool = True
    #: Whether a stream was ever opened: then it is there, and whoever is not there any more is dead.
    met: bool = False
    #: Reads in flight.
    readers: int = 0
    #: Loop time at which the last of them left.
    left_s: float = 0.0

    async def resolve(self, timeout_s: float) -> None:
        """Fill `numbers`; `EngineUnavailable` for a host that nobody knows here."""
        if not self.unresolved:
            return
        host, port = self.endpoint.host, self.endpoint.port
        try:
            if is_number(host):
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            else:
                loop = asyncio.get_running_loop()
                async with asyncio.timeout(min(timeout_s, RESOLVE_S)):
                    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except TimeoutError as error:
            raise EngineUnavailable(f"the source's host {host!r} was not found within {RESOLVE_S} s") from error
        except (OSError, ValueError) as error:  # the second for what is no name at all
            raise EngineUnavailable(f"the source's host {host!r} is unknown here: {error}") from error
        self.numbers = [(int(family), place) for family, _, _, _, place in found]
        self.unresolved = False

    def open_stream(self, reading: native.StreamReading) -> native.Stream | Trouble:
        """Try each number in turn. Blocks; in a lane's thread."""
        trouble = Trouble(Opening.NOT_REACHED, errno.EADDRNOTAVAIL)
        for family, place in tuple(self.numbers):
            try:
                connecting = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:
                return Trouble(Opening.NOT_REACHED, error.errno or errno.EMFILE)
            failure = connecting.connect_ex(place)
            if failure not in {0, errno.EINPROGRESS}:
                connecting.close()
                trouble = Trouble(Opening.NOT_REACHED, failure)
                continue
            connect_by_ns = time.monotonic_ns() + int(CONNECT_S * 1e9)
            stream, opening, detail = reading.open_stream(connecting, self.endpoint.incarnation, connect_by_ns)
            if stream is not None:
                self.met = True
                return stream
            trouble = Trouble(opening, detail)
            if opening != Opening.NOT_REACHED:
                return trouble
        self.unresolved = True
        return trouble

    def explain(self, trouble: Trouble, own: Endpoint) -> TensorHubError | None:
        """What a stream that was not opened means; None when only time ran out."""
        at, why = self.endpoint.address, os.strerror(trouble.detail) if trouble.detail else "it said something else"
        match trouble.opening:
            case Opening.NOT_REACHED:
                return self._explain_unreached(trouble.detail, own, why)
            case Opening.NOT_GREETED:
                return SourceFailed(f"no source greets at {at} ({why}): it is ending, or its port is another program's")
            case Opening.TURNED_AWAY:
                return self._explain_status(trouble.detail)
            case _:
                return None

    def _explain_unreached(self, error: int, own: Endpoint, why: str) -> TensorHubError:
        at = self.endpoint.address
        if error in OWN_LACKS:
            return EngineUnavailable(f"this process cannot open a stream to the source at {at}: {why}")
        if self.met:
            return SourceFailed(f"the source at {at} is dead: {why}")
        if error == errno.ECONNREFUSED and self.endpoint.shares_network_with(own):
            return SourceFailed(f"the source at {at}, in this network, is dead: {why}")
        return EngineUnavailable(f"the source at {at} cannot be reached: {why}")

    def _explain_status(self, status: int) -> TensorHubError:
        at = self.endpoint.address
        if status == Status.OTHER_INCARNATION:
            life = self.endpoint.incarnation.hex()
            return SourceFailed(
                f"the source at {at} is gone: its address is another engine's, not incarnation {life}'s"
            )
        if status == Status.OTHER_VERSION:
            return EngineUnavailable(
                f"the source at {at} speaks another version of the protocol; update one of the two"
            )
        if status == Status.FULL:
            return SourceFailed(f"the source at {at} has no connection left: too many readers at once")
        return SourceFailed(f"the source at {at} turned us away with status {status}")

    def close(self) -> None:
        self.bulk.close()
        self.small.close()


class StreamPeers:
    """Known sources; closed when unused for `IDLE_S`, and when there are too many, least recently used first.

    For one event loop at a time; nothing here waits for a source.
    """

    def __init__(self, limit: int = PEERS_MAX) -> None:
        self._limit = limit
        #: Most recently used last. Peers in use stay, beyond the limit if need be: reads in flight bound them.
        self._peers: OrderedDict[Endpoint, Peer] = OrderedDict()
        self._closed = False
        #: The next look for unused ones, and the loop that it is in.
        self._look: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, endpoint: Endpoint) -> Peer:
        """The source, held until `leave`."""
        peer = self._peers.get(endpoint)
        if peer is None:
            peer = self._peers[endpoint] = Peer(endpoint)
        self._peers.move_to_end(endpoint)
        peer.readers += 1
        return peer

    def leave(self, peer: Peer) -> None:
        loop = asyncio.get_running_loop()
        peer.readers -= 1
        peer.left_s = loop.time()
        self._close_idle(0 if self._closed else self._limit)
        if self._look is None or self._loop is not loop:
            self._look_later(loop)

    def close(self) -> None:
        """Close all, those in use when their last reader leaves; idempotent."""
        self._closed = True
        self._close_idle(0)
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _look_later(self, loop: asyncio.AbstractEventLoop) -> None:
        """While there are any; one look waits at a time, for the source that will be the first to go."""
        self._look, self._loop = None, loop
        if self._peers:
            first_s = min(peer.left_s if peer.readers == 0 else loop.time() for peer in self._peers.values())
            self._look = loop.call_at(max(first_s, loop.time() - IDLE_S) + IDLE_S, self._close_unused, loop)

    def _close_unused(self, loop: asyncio.AbstractEventLoop) -> None:
        for peer in list(self._peers.values()):
            if peer.readers == 0 and loop.time() - peer.left_s >= IDLE_S:
                self._close(peer)
        self._look_later(loop)

    def _close_idle(self, limit: int) -> None:
        idle = [peer for peer in self._peers.values() if peer.readers == 0]
        for peer in idle[: max(0, len(self._peers) - limit)]:
            self._close(peer)

    def _close(self, peer: Peer) -> None:
        del self._peers[peer.endpoint]
        peer.close()  # its threads are idle: they end at once
