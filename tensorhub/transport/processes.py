"""Who the process behind a pid is, and whether it is still the same one: identities and the pidfds that pin them.

A pid alone is never believed: pids are used again. Never reads another process's memory.
"""

from __future__ import annotations

import functools
import os
import select
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

from tensorhub.errors import EngineUnavailable, SourceFailed
from tensorhub.transport.locators import malformed, packed, unpacked

#: Descriptors an engine keeps for peers between reads; more than a host has accelerators, far below any ulimit.
PEERS_MAX = 64
#: What the kernel's own calls take.
PID_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Identity:
    """One life of one process: what its local engine shows to others."""

    #: Random id of this boot of the kernel: the same for every container of a host.
    boot: str
    #: Inode of the pid namespace, in which alone `pid` has a meaning.
    namespace: int
    pid: int
    #: Start time in clock ticks since boot: differs between two processes that had the same pid.
    start: int
    uid: int

    @classmethod
    def own(cls) -> Identity:
        """This process; `EngineUnavailable` where /proc does not tell."""
        try:
            namespace = os.stat("/proc/self/ns/pid").st_ino
            return cls(boot_id(), namespace, os.getpid(), _start_of(os.getpid()), os.getuid())
        except OSError as error:
            raise EngineUnavailable(f"/proc does not say who this process is: {error}") from error

    def pack(self) -> bytes:
        return packed(asdict(self))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def unpack(cls, locator: bytes) -> Identity:
        """`EngineUnavailable` for anything but what `pack` makes."""
        identity = cls(**unpacked(locator, _TYPES))  # type: ignore[arg-type]  # checked: they are of these types
        if not 0 < identity.pid <= PID_MAX:
            raise malformed(f"{identity.pid} is no process id")
        return identity


_TYPES = {"boot": str, "namespace": int, "pid": int, "start": int, "uid": int}


def boot_id() -> str:
    """Random id of this boot of the kernel: hosts that show the same one are one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _start_of(pid: int) -> int:
    # Field 22 of proc(5) stat; the second field, the name in parentheses, may hold anything, also ")".
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


@dataclass(slots=True)
class Peer:
    """A process that was the identity's when `pidfd` was opened, and is as long as `alive` says so."""

    identity: Identity
    pidfd: int
    #: Reads in flight; the descriptor stays open while there are any.
    readers: int = 0

    def alive(self) -> bool:
        """False once it has died, even if its pid belongs to somebody else by now."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)


class Peers:
    """Open pidfds, least recently used closed first. For one event loop; nothing here waits."""

    def __init__(self, limit: int = PEERS_MAX) -> None:
        self._limit = limit
        #: Most recently used last. Peers in use stay, beyond the limit if need be: reads in flight bound them.
        self._peers: OrderedDict[Identity, Peer] = OrderedDict()
        self._closed = False

    def enter(self, identity: Identity) -> Peer:
        """The live process of this identity, held until `leave`; `SourceFailed` if it is gone."""
        peer = self._peers.get(identity)
        if peer is None:
            peer = self._peers[identity] = _open(identity)
        self._peers.move_to_end(identity)
        peer.readers += 1
        return peer

    def leave(self, peer: Peer) -> None:
        peer.readers -= 1
        if peer.readers == 0 and (self._closed or not peer.alive()):
            self._forget(peer)
        self._close_idle(self._limit)

    def close(self) -> None:
        """Close every descriptor, those in use when their last reader leaves; idempotent."""
        self._closed = True
        self._close_idle(0)

    def _close_idle(self, limit: int) -> None:
        idle = [peer for peer in self._peers.values() if peer.readers == 0]
        for peer in idle[: max(0, len(self._peers) - limit)]:
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.identity]
        os.close(peer.pidfd)


def _open(identity: Identity) -> Peer:
    """Pin the pid first, then look who it is: the start time read afterwards is that of the pinned process, or of a
    later one, which has another."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except ProcessLookupError as error:
        raise SourceFailed(f"the source's process {identity.pid} is dead") from error
    except OSError as error:
        raise EngineUnavailable(f"pidfd_open of process {identity.pid}: {error}") from error
    peer = Peer(identity, pidfd)
    try:
        _check_start(peer)
    except BaseException:
        os.close(pidfd)
        raise
    return peer


def _check_start(peer: Peer) -> None:
    pid = peer.identity.pid
    try:
        start = _start_of(pid)
    except OSError as error:
        if not peer.alive():
            raise SourceFailed(f"the source's process {pid} is dead") from error
        raise EngineUnavailable(f"/proc hides process {pid} (hidepid?): {error}") from error
    if start != peer.identity.start:
        raise SourceFailed(f"the source's process {pid} is dead, and its pid was recycled: another process has it now")
