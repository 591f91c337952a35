"""One-sided reads over streams: a server of registered memory, and reads by as many streams as take part.

Thin and checked: decides nothing, says what happened as enums and numbers. That is `transport/tcp.py`'s to interpret.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from dataclasses import astuple, dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest, Broken, Closed
from tensorhub.native.batch import batch_arguments
from tensorhub.native.binding import check, library
from tensorhub.native.follow import Follow

U64 = NDArray[np.uint64]

#: Equals INCARNATION_BYTES in streams.h.
INCARNATION_BYTES = 16


class Status(IntEnum):
    """What a server says in greetings and replies; equals `status` in streams.h."""

    SERVED = 0
    OTHER_VERSION = 1
    OTHER_INCARNATION = 2
    FULL = 3
    NOT_REGISTERED = 4
    MALFORMED = 5


class Opening(IntEnum):
    """How an attempt to open a stream ended; equals `opening` in streams_open.c."""

    OPENED = 0
    #: No connection came about; the detail is an errno.
    NOT_REACHED = 1
    #: Whoever answers did not greet; the detail is an errno, or 0 when it said something else.
    NOT_GREETED = 2
    #: The server greeted, and will not serve this reader; the detail is a `Status`.
    TURNED_AWAY = 3
    LATE = 4
    #: The read was over before: cancelled, failed, or done by others.
    OVER = 5


class Failure(IntEnum):
    """Why a read failed once a stream was open; equals `failure` in streams_read.h."""

    NONE = 0
    #: The stream ended or broke; `errno` says how.
    LOST = 1
    #: The server does not serve a range; `status`, `address` and `nbytes` say why and which.
    REFUSED = 2
    #: The peer does not speak the protocol.
    GARBLED = 3
    #: This process: its memory is not mapped, or there is none left; `errno` says which.
    LOCAL = 4
    #: A followed chunk, `wrong`, is not what its digest says.
    WRONG = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """How many peers a server serves, and the seconds after which it cuts one off that does not do its part."""

    #: Longer than any way there and back; short, for a stranger holds one of the server's threads so long.
    greeting_s: float = 10.0
    #: The same while more than half of the connections are of strangers: they must not keep readers out. Two ways
    #: there and back, on a long line with a lost packet.
    crowded_s: float = 1.0
    #: Longer than a reader keeps a stream without use, so that it is the reader who ends it. A reader that follows may
    #: wait as long for this source's own source.
    idle_s: float = 120.0
    #: At most 16 KiB, sent at once: longer than a lost packet or two take.
    request_s: float = 10.0
    #: At most 8 MiB: a reader that lands less than 280 KB/s stands still, and holds a thread.
    reply_s: float = 30.0
    #: A reader has three, so this is 170 readers; each costs a thread and its socket.
    connections: int = 512


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """How far a read got, and what ended it."""

    bytes_done: int
    failure: Failure
    errno: int
    status: Status
    #: The range that was refused.
    address: int
    nbytes: int
    #: The number of the chunk that is wrong.
    wrong: int
    timed_out: bool
    cancelled: bool


class _Outcome(ctypes.Structure):
    _fields_ = (
        ("bytes_done", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("wrong", ctypes.c_uint64),
        ("failure", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("status", ctypes.c_int32),
        ("timed_out", ctypes.c_int32),
        ("cancelled", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class StreamServer:
    """Serves registered memory to readers that name `incarnation`, on a socket that listens; takes the socket over.

    Runs in threads of its own that need no interpreter. In a forked child they do not exist: call `forget` there.
    """

    def __init__(self, listener: socket.socket, incarnation: bytes, limits: Limits | None = None) -> None:
        self._handle: int | None = None
        if len(incarnation) != INCARNATION_BYTES:
            raise BadRequest(f"an incarnation has {INCARNATION_BYTES} bytes, not {len(incarnation)}")
        self._native = library()
        #: Guards `_handle` against a `stop` in another thread, which frees it.
        self._lock = threading.Lock()
        *seconds, connections = astuple(limits or Limits())
        numbers = (ctypes.c_int64 * 6)(*(int(each * 1e9) for each in seconds), connections)
        listener.setblocking(False)
        handle = ctypes.c_void_p()
        check(
            self._native.th_server_start(
                listener.detach(), incarnation, ctypes.addressof(numbers), ctypes.addressof(handle)
            ),
            "cannot serve streams",
        )
        self._handle = handle.value

    def add(self, address: int, nbytes: int) -> None:
        """Serve a range; each `add` needs its own `remove`."""
        with self._lock:
            check(self._native.th_server_add(self._opened(), address, nbytes), f"cannot serve {nbytes} bytes")

    def remove(self, address: int, nbytes: int) -> None:
        """Undo one `add`; once it has returned, no byte that is not covered by another is touched any more."""
        with self._lock:
            check(self._native.th_server_remove(self._opened(), address, nbytes), f"{nbytes} bytes are not served")

    def facts(self) -> tuple[int, int]:
        """Connections open now, and bytes of all replies that were sent whole."""
        connections, bytes_sent = ctypes.c_uint64(), ctypes.c_uint64()
        with self._lock:
            self._native.th_server_facts(self._opened(), ctypes.addressof(connections), ctypes.addressof(bytes_sent))
        return connections.value, bytes_sent.value

    def stop(self) -> None:
        """End every stream, join every thread; idempotent, takes a moment only."""
        with self._lock:
            if self._handle is not None:
                check(self._native.th_server_stop(self._handle), "a thread that serves streams cannot be joined")
                self._handle = None

    def forget(self) -> None:
        """In a forked child: close the copies of the descriptors. The parent's streams go on."""
        self._lock = threading.Lock()  # a thread that is not here may hold the old one
        handle, self._handle = self._handle, None
        if handle is not None:
            self._native.th_server_forget(handle)

    def _opened(self) -> int:
        if self._handle is None:
            raise Closed("this server of streams is stopped")
        return self._handle

    def __del__(self) -> None:
        if self._handle is not None:
            self.stop()


class Stream:
    """A greeted connection to one server. Used by one read at a time, and only while all went well on it."""

    def __init__(self, handle: int) -> None:
        self._native = library()
        self._handle: int | None = handle

    def is_idle(self) -> bool:
        """Whether it is as its last read left it: the server has neither ended it nor sent anything."""
        return bool(self._native.th_stream_is_idle(self.handle()))

    def close(self) -> None:
        """Idempotent."""
        if self._handle is not None:
            self._native.th_stream_close(self._handle)
            self._handle = None

    def handle(self) -> int:
        if self._handle is None:
            raise Broken("a stream was used after it was closed")
        return self._handle

    def __del__(self) -> None:
        self.close()


class StreamReading:
    """One batch of ranges, read over as many streams as threads call `run` with; chunks as with `native.Reading`.

    Once every `run` and `open_stream` has returned, nothing of this read touches local memory any more; only then may
    it be closed.
    """

    def __init__(
        self,
        remote: U64,
        local: U64,
        nbytes: U64,
        deadline_ns: int,
        firsts: U64 | None = None,
        digests: U64 | None = None,
        follow: Follow | None = None,
    ) -> None:
        self._handle: int | None = None
        batch = batch_arguments(remote, local, nbytes, firsts, digests)
        packed = None if follow is None else follow.pack(nbytes, firsts)
        # C holds their addresses, not the arrays.
        self._arrays = (remote, local, nbytes, firsts, digests, follow, packed)
        self._native = library()
        handle = ctypes.c_void_p()
        place = None if packed is None else ctypes.addressof(packed)
        check(self._native.th_streams_open(*batch, deadline_ns, place, ctypes.addressof(handle)), "cannot begin a read")
        self._handle = handle.value

    def open_stream(
        self, connecting: socket.socket, incarnation: bytes, connect_by_ns: int
    ) -> tuple[Stream | None, Opening, int]:
        """Greet the server on a non-blocking socket that connects; takes it over. The stream, or why not and a detail.

        Ends with the read. A connection that is not there at `connect_by_ns` is `NOT_REACHED`.
        """
        handle, detail = ctypes.c_void_p(), ctypes.c_int32()
        opening = Opening(
            self._native.th_stream_open(
                connecting.detach(),
                incarnation,
                self._opened(),
                connect_by_ns,
                ctypes.addressof(handle),
                ctypes.addressof(detail),
            )
        )
        return Stream(handle.value) if handle.value is not None else None, opening, detail.value

    def run(self, stream: Stream) -> bool:
        """Take part until nothing is left to claim, or the read is over; whether the stream may be used again."""
        return bool(self._native.th_stream_run(stream.handle(), self._opened()))

    def wait_fast(self) -> bool:
        """Return once bytes come so fast that another stream pays; False when the read is over before."""
        return bool(self._native.th_streams_wait_fast(self._opened()))

    def cancel(self) -> None:
        """Let every `run` and `open_stream` return soon; thread-safe."""
        self._native.th_streams_cancel(self._opened())

    def give_up(self) -> None:
        """No stream could be opened: let those return that wait to join. The outcome tells no failure; thread-safe."""
        self._native.th_streams_give_up(self._opened())

    def outcome(self) -> StreamOutcome:
        out = _Outcome()
        self._native.th_streams_outcome(self._opened(), ctypes.addressof(out))
        known = set(Status)
        return StreamOutcome(
            out.bytes_done,
            Failure(out.failure),
            out.error,
            Status(out.status) if out.status in known else Status.MALFORMED,
            out.address,
            out.nbytes,
            out.wrong,
            bool(out.timed_out),
            bool(out.cancelled),
        )

    def close(self) -> None:
        """Give memory back; idempotent."""
        if self._handle is not None:
            self._native.th_streams_close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            raise Broken("a read was used after it was closed")
        return self._handle

    def __del__(self) -> None:
        self.close()
