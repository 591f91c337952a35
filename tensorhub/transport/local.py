"""The engine between processes of one host: `process_vm_readv`, straight from memory to memory, no peer thread needed.

Cannot enforce registration: the kernel lets a process of the same user read whatever is mapped. What it does enforce
is identity: a read counts only if the process that was located is still alive after the last byte. One call into
memory that the peer maps from a hung file system cannot be interrupted; every other wait ends at the deadline.
"""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tensorhub import native
from tensorhub.errors import Closed, EngineUnavailable, SourceFailed, SourceSilent, TensorHubError, Where
from tensorhub.ports import HOST_ONLY, Chunks, Course, Ranges
from tensorhub.transport.crew import Crews
from tensorhub.transport.following import NEVER_NS, followed, run_course, wrong_chunk
from tensorhub.transport.processes import Identity, Peer, Peers
from tensorhub.transport.ranges import RegisteredRanges, check_ranges

#: Two threads read nearly twice as fast as one; more only compete with those who compute.
READ_THREADS_MAX = 2
#: Below this a second thread costs more than it saves (one call of the kernel takes as much).
PARALLEL_BYTES_MIN = 8 << 20
#: Read at once in the event loop's thread: takes less time than to wake another one (a progress block's header).
INLINE_BYTES_MAX = 64 << 10

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_YAMA_RESTRICTED = 1


class LocalEngine:
    """`ports.Engine` between processes of one host and user."""

    name = "local"
    kinds = HOST_ONLY

    def __init__(self) -> None:
        self._own = Identity.own()
        self._registered = RegisteredRanges()
        self._peers = Peers()
        self._pool: ThreadPoolExecutor | None = None
        self._crews = Crews()
        self._closed = False
        if _yama_scope() == _YAMA_RESTRICTED:
            try:
                native.allow_readers()
            except OSError as error:
                raise EngineUnavailable(f"Yama would keep every reader out: {error}") from error

    def locate(self) -> bytes:
        if os.getpid() != self._own.pid:
            raise Closed(f"this engine belongs to process {self._own.pid}; open another after a fork")
        return self._own.pack()

    def reaches(self, peer: bytes) -> str | None:
        """Why a peer is out of reach, or None. A dead one is not out of reach: reading from it tells what happened."""
        try:
            identity = Identity.unpack(peer)
        except EngineUnavailable as error:
            return error.message
        if identity.boot != self._own.boot:
            return "the source is on another host"
        if identity.namespace != self._own.namespace:
            return "the source is in another pid namespace (container) of this host"
        failure = native.probe_process(identity.pid)
        return None if failure in {0, errno.ESRCH} else _why_forbidden(identity, failure)

    def register(self, address: int, nbytes: int) -> None:
        if self._closed:
            raise Closed("this engine is closed; open another")
        self._registered.add(address, nbytes)

    def deregister(self, address: int, nbytes: int) -> None:
        self._registered.remove(address, nbytes)

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        check_ranges(ranges)
        identity = self._reachable(peer)
        process = self._peers.enter(identity)
        try:
            wanted = (chunks.firsts, chunks.digests) if chunks is not None else (None, None)
            reading = native.Reading(identity.pid, ranges.remote, ranges.local, ranges.nbytes, deadline_ns, *wanted)
            try:
                await self._run(reading, ranges.total_bytes, deadline_ns)
                outcome = reading.outcome()
            finally:
                reading.close()
            late = SourceFailed(
                f"a read of {ranges.total_bytes} bytes from process {identity.pid} was not done within {timeout_s} s"
            )
            failure = _failure(process, outcome, ranges.total_bytes, late)
        finally:
            self._peers.leave(process)
        if failure is not None:
            raise failure

    async def follow(self, peer: bytes, course: Course, stall_s: float) -> None:
        """`ports.Follower`: threads look at the source's header, and take what it shows to be there."""
        ranges = course.ranges
        check_ranges(ranges)
        identity = self._reachable(peer)
        process = self._peers.enter(identity)
        try:
            follow = followed(course, stall_s)
            reading = native.Reading(
                identity.pid, ranges.remote, ranges.local, ranges.nbytes, NEVER_NS, course.firsts, None, follow
            )
            try:
                threads = READ_THREADS_MAX if ranges.total_bytes >= PARALLEL_BYTES_MIN else 1
                await run_course(self._crews, reading.run, reading.cancel, threads, "tensorhub-follow")
                outcome = reading.outcome()
            finally:
                reading.close()
            late = SourceSilent(f"process {identity.pid} had nothing new for {stall_s} s")
            failure = _failure(process, outcome, ranges.total_bytes, late)
        finally:
            self._peers.leave(process)
        if failure is not None:
            raise failure

    async def close(self) -> None:
        self._closed = True
        await self._crews.end()
        self._peers.close()
        self._registered.clear()
        if self._pool is not None:
            self._pool.shutdown()  # its threads are idle by now
            self._pool = None

    def _reachable(self, peer: bytes) -> Identity:
        if self._closed:
            raise Closed("this engine is closed; open another")
        identity = Identity.unpack(peer)
        if (identity.boot, identity.namespace) != (self._own.boot, self._own.namespace):
            raise EngineUnavailable(self.reaches(peer) or "the source is elsewhere")
        return identity

    async def _run(self, reading: native.Reading, total_bytes: int, deadline_ns: int) -> None:
        """Return when no thread works on it any more, also when cancelled meanwhile."""
        if total_bytes <= INLINE_BYTES_MAX:
            reading.run()
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READ_THREADS_MAX, thread_name_prefix="tensorhub-read")
        threads = READ_THREADS_MAX if total_bytes >= PARALLEL_BYTES_MIN else 1
        await self._crews.run(self._pool, reading.run, reading.cancel, threads, deadline_ns)


def _failure(process: Peer, outcome: native.ReadOutcome, total_bytes: int, late: SourceFailed) -> TensorHubError | None:
    """What a finished read means. Looks first whether the bytes came from the process that was meant."""
    pid, where = process.identity.pid, Where(bytes_done=outcome.bytes_done)
    if not process.alive():
        return SourceFailed(f"the source's process {pid} died", where)
    if outcome.cancelled:
        return Closed("the engine was closed during a read", where)
    if outcome.wrong is not None:
        return SourceFailed(wrong_chunk(outcome.wrong), where)
    if outcome.errno != 0:
        return _refusal(process.identity, outcome.errno, where)
    # Nothing else ends a read early.
    return late.at(where) if outcome.bytes_done != total_bytes else None


def _refusal(identity: Identity, error: int, where: Where) -> TensorHubError:
    match error:
        case errno.ESRCH:
            return SourceFailed(f"the source's process {identity.pid} is dying", where)
        case errno.EFAULT:
            return SourceFailed(
                f"process {identity.pid} does not serve a range: it is not mapped there, or here", where
            )
        case errno.ESTALE:
            return SourceFailed(f"process {identity.pid} withdrew what it had granted", where)
        case errno.EPROTO:
            return SourceFailed(f"process {identity.pid} shows no whole progress block", where)
        case _:
            return EngineUnavailable(_why_forbidden(identity, error), where)


def _why_forbidden(identity: Identity, error: int) -> str:
    if error != errno.EPERM:
        return f"process_vm_readv of process {identity.pid} failed: {os.strerror(error)}"
    scope = _yama_scope()
    yama = "" if scope is None else f"; Yama's ptrace_scope is {scope}"
    return (
        f"the kernel forbids process {os.getpid()} (uid {os.getuid()}) to read process {identity.pid} (uid "
        f"{identity.uid}): both must be dumpable processes of one user, or the reader needs CAP_SYS_PTRACE{yama}"
    )


def _yama_scope() -> int | None:
    """0 to 3, or None on a kernel without Yama."""
    try:
        return int(_YAMA.read_text(encoding="ascii"))
    except OSError:
        return None
