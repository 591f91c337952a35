"""A heartbeat that goes on while the interpreter cannot: a thread of C sends, waits for the answer, notes the time.

Knows frames only as bytes: the request to send and the one reply that keeps it going. It never reconnects; why it
ended is for its owner to read and act on.
"""

from __future__ import annotations

import ctypes
import os
import threading

from tensorhub.errors import BadRequest, Broken
from tensorhub.native.binding import library

#: Equals REPLY_BYTES_MAX in tensorhub.c.
REPLY_BYTES_MAX = 4096
#: A heartbeat is a few dozen bytes.
REQUEST_BYTES_MAX = 65536

_BEATING, _STOPPED = 0, 1
_ENDINGS = {
    _STOPPED: "stopped",
    2: "sending failed",
    3: "receiving failed",
    4: "the peer closed the connection",
    5: "no reply in time",
    6: "another reply than expected",
    7: "waiting failed",
}


class Beat:
    """Sends `request` over a stream socket every `interval_ns` and expects `expected` back within `ack_timeout_ns`.

    Both are whole frames: four bytes of length, big-endian, then the body. The descriptor is duplicated; nobody else
    may read from the connection. In a forked child the thread does not exist: the object is dead there and says so.
    """

    def __init__(self, fd: int, request: bytes, expected: bytes, interval_ns: int, ack_timeout_ns: int) -> None:
        self._handle: int | None = None
        _check_frame("request", request, REQUEST_BYTES_MAX)
        _check_frame("expected", expected, REPLY_BYTES_MAX)
        if interval_ns <= 0 or ack_timeout_ns <= 0:
            raise BadRequest("the interval and the timeout of a heartbeat must be positive")
        self._native = library()
        self._owner_pid = os.getpid()
        #: Guards `_handle` against a `stop` in another thread; a queue would leave `failed` without an answer.
        self._lock = threading.Lock()
        self._last_acknowledged_ns = 0
        self._last_failure: str | None = None
        self._last_reply = b""
        handle = ctypes.c_void_p()
        error = self._native.th_beat_start(
            fd,
            request,
            len(request),
            expected,
            len(expected),
            interval_ns,
            ack_timeout_ns,
            ctypes.addressof(handle),
        )
        if error != 0:
            raise OSError(error, f"cannot start a heartbeat: {os.strerror(error)}")
        self._handle = handle.value

    def acknowledged_ns(self) -> int:
        """Monotonic time at which the last acknowledged beat was sent; 0 before the first, and in a forked child."""
        if os.getpid() != self._owner_pid:
            return 0
        with self._lock:
            self._observe()
            return self._last_acknowledged_ns

    def failed(self) -> str | None:
        """Why it ended, or None while it goes on."""
        if os.getpid() != self._owner_pid:
            return f"the process forked: this heartbeat lives in process {self._owner_pid}"
        with self._lock:
            self._observe()
            return self._last_failure

    def unexpected_reply(self) -> bytes:
        """Body of the reply that ended it, or nothing."""
        if os.getpid() != self._owner_pid:
            return b""
        with self._lock:
            self._observe()
            return self._last_reply

    def stop(self) -> None:
        """End and join the thread; idempotent, takes a moment only. In a forked child, give the copies back."""
        if os.getpid() != self._owner_pid:
            handle, self._handle = self._handle, None
            if handle is not None:
                self._native.th_beat_forget(handle)
            return
        with self._lock:
            if self._handle is None:
                return
            self._observe()
            error = self._native.th_beat_stop(self._handle)
            if error != 0:
                raise Broken(f"a heartbeat's thread could not be joined: {os.strerror(error)}")
            self._handle = None
            self._last_failure = self._last_failure or _ENDINGS[_STOPPED]

    def _observe(self) -> None:
        if self._handle is None:
            return
        error, reply_bytes = ctypes.c_int32(), ctypes.c_uint32()
        reply = ctypes.create_string_buffer(REPLY_BYTES_MAX)
        ending = self._native.th_beat_ending(
            self._handle, ctypes.addressof(error), ctypes.addressof(reply), ctypes.addressof(reply_bytes)
        )
        self._last_acknowledged_ns = self._native.th_beat_acknowledged_ns(self._handle)
        if ending != _BEATING:
            reason = f": {os.strerror(error.value)}" if error.value else ""
            self._last_failure = _ENDINGS[ending] + reason
            self._last_reply = reply.raw[: reply_bytes.value]

    def __del__(self) -> None:
        if self._handle is not None:
            self.stop()


def _check_frame(name: str, frame: bytes, body_bytes_max: int) -> None:
    if not isinstance(frame, bytes) or len(frame) < 4 or int.from_bytes(frame[:4], "big") != len(frame) - 4:
        raise BadRequest(f"{name} must be one whole frame: four bytes of length, then the body")
    if len(frame) - 4 > body_bytes_max:
        raise BadRequest(f"{name} is longer than {body_bytes_max} bytes")
