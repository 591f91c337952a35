"""A process is who it says by boot, namespace, pid and start time; descriptors that pin it are bounded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from tensorhub.errors import EngineUnavailable, SourceFailed
from tensorhub.transport.processes import Identity, Peers


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def children():
    """Ids of three children that do nothing until the test is over."""
    pids = []
    read, write = os.pipe()
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        pids.append(pid)
    os.close(read)
    yield pids
    os.close(write)
    for pid in pids:
        os.waitpid(pid, 0)


def identity_of(pid: int) -> Identity:
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return replace(Identity.own(), pid=pid, start=int(stat[stat.rindex(b")") + 2 :].split()[19]))


def test_an_identity_survives_its_bytes():
    """What is packed is unpacked, and the own identity is this process's."""
    own = Identity.own()
    assert Identity.unpack(own.pack()) == own
    assert (own.pid, own.uid) == (os.getpid(), os.getuid())


@pytest.mark.parametrize(
    "locator",
    [b"", b"\xc1", b"\x01", msgpack.packb({"boot": "b"}), replace(Identity.own(), pid=-1).pack()],
    ids=["empty", "no msgpack", "a number", "a part", "of no process"],
)
def test_malformed_locators_are_refused(locator):
    """Bytes of another engine, or of none, name the trouble."""
    with pytest.raises(EngineUnavailable, match="malformed"):
        Identity.unpack(locator)


def test_a_recycled_pid_is_nobody():
    """A pid that belongs to another process by now is told from a live source by its start time."""
    fds = descriptors()
    peers, own = Peers(), Identity.own()
    with pytest.raises(SourceFailed, match="recycled"):
        peers.enter(replace(own, start=own.start - 1))
    assert descriptors() == fds


def test_descriptors_are_bounded_least_recently_used_first(children):
    """register_cycle_1000: peers beyond the limit cost no descriptor; those in use are never closed."""
    fds = descriptors()
    peers = Peers(limit=2)
    first, second, third = (identity_of(pid) for pid in children)
    held = peers.enter(first)
    for identity in (second, third, second):
        peers.leave(peers.enter(identity))
    assert held.alive()
    assert descriptors() == fds + 2
    peers.close()
    peers.close()
    assert descriptors() == fds + 1
    assert held.alive()
    peers.leave(held)
    assert descriptors() == fds


def test_one_descriptor_for_concurrent_readers(children):
    """concurrent_first_contact: two readers of one peer share its descriptor, and both must leave."""
    fds = descriptors()
    peers = Peers(limit=0)
    one, two = peers.enter(identity_of(children[0])), peers.enter(identity_of(children[0]))
    assert one is two
    peers.leave(one)
    assert two.alive()
    assert descriptors() == fds + 1
    peers.leave(two)
    assert descriptors() == fds
