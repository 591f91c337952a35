"""One-sided reads of another process's memory, and what this process and its threads must allow for them.

Says what happened, as bytes and errno; never what it means. That is `transport/local.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest, Broken
from tensorhub.native.batch import batch_arguments
from tensorhub.native.binding import check, library
from tensorhub.native.follow import Follow

U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How far a read got. `errno` is 0, or that of the call that ended it (EFAULT, ESRCH, EPERM, ENOMEM, ...).

    Of one that followed also EBADMSG (see `wrong`), ESTALE (the source shows another generation) and EPROTO (the source
    shows no whole header).
    """

    bytes_done: int
    errno: int
    timed_out: bool
    cancelled: bool = False
    #: Number of a followed chunk that is not what its digest says (errno EBADMSG).
    wrong: int | None = None


class _Outcome(ctypes.Structure):
    _fields_ = (
        ("bytes_done", ctypes.c_uint64),
        ("wrong", ctypes.c_uint64),
        ("error", ctypes.c_int32),
        ("timed_out", ctypes.c_int32),
        ("cancelled", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Reading:
    """One batch of ranges, read by as many threads as call `run`: each takes the next few MiB until none are left.

    With `firsts` and `digests`, chunk c is ranges `firsts[c]` to `firsts[c + 1]`, and its XXH3-64 is put into
    `digests[c]` by the thread that has read it. Ranges behind the last chunk are only read. With `firsts` and `follow`
    chunks are claimed as the source's watermark passes them, and the deadline is `follow`'s.

    The deadline and `cancel` are seen between two calls of `process_vm_readv`, a few milliseconds each. Once every
    `run` has returned, nothing of this read touches local memory any more; only then may it be closed.
    """

    def __init__(
        self,
        pid: int,
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
        if pid <= 0:
            raise BadRequest(f"{pid} is no process id")
        packed = None if follow is None else follow.pack(nbytes, firsts)
        # C holds their addresses, not the arrays.
        self._arrays = (remote, local, nbytes, firsts, digests, follow, packed)
        self._native = library()
        place = None if packed is None else ctypes.addressof(packed)
        self._handle = self._native.th_read_open(pid, *batch, deadline_ns, place)
        if self._handle is None:
            raise MemoryError("no memory for a read")

    def run(self) -> None:
        """Take part until nothing is left to claim, or the read failed, was cancelled or met its deadline."""
        self._native.th_read_run(self._opened())

    def cancel(self) -> None:
        """Let every `run` return soon; thread-safe."""
        self._native.th_read_cancel(self._opened())

    def outcome(self) -> ReadOutcome:
        out = _Outcome()
        self._native.th_read_outcome(self._opened(), ctypes.addressof(out))
        wrong = out.wrong - 1 if out.wrong else None
        return ReadOutcome(out.bytes_done, out.error, bool(out.timed_out), bool(out.cancelled), wrong)

    def close(self) -> None:
        """Give memory back, after every `run` has returned; idempotent."""
        if self._handle is not None:
            self._native.th_read_close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            raise Broken("a read was used after it was closed")
        return self._handle

    def __del__(self) -> None:
        self.close()


def read_process(pid: int, remote: U64, local: U64, nbytes: U64, deadline_ns: int) -> ReadOutcome:
    """Read a batch with the calling thread, until done or until `deadline_ns` of the monotonic clock."""
    reading = Reading(pid, remote, local, nbytes, deadline_ns)
    try:
        reading.run()
        return reading.outcome()
    finally:
        reading.close()


def probe_process(pid: int) -> int:
    """The errno that a read of this process would meet before it looked at any address; 0 if it is allowed."""
    return int(library().th_probe_process(pid))


def allow_readers() -> None:
    """Let any process of this user read this one where Yama would only allow ancestors; OSError without Yama."""
    check(library().th_allow_readers(), "prctl(PR_SET_PTRACER)")


def lower_priority(nice: int = 3) -> None:
    """Give the calling thread, and no other, a nice value; OSError if the system refuses.

    3 leaves two thirds of a contended core to a thread of normal priority, and takes a whole core when nobody wants it:
    lower, and readers on the same host would starve the digests that they wait for.
    """
    check(library().th_lower_priority(nice), f"setpriority to {nice}")
