"""The local engine and the fates of its peers: dead, dying, stopped, forbidden, recycled, elsewhere."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import Closed, EngineUnavailable, SourceFailed
from tensorhub.ports import Ranges
from tensorhub.transport import local
from tensorhub.transport.local import LocalEngine
from tensorhub.transport.processes import Identity
from tests.conformance.peer import pattern
from tests.conformance.sources import SourceProcess

pytestmark = pytest.mark.slow

MIB = 1 << 20
TIMEOUT_S = 60.0


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.fixture
def source():
    opened = SourceProcess("local")
    yield opened
    opened.end()


@pytest.fixture
def engine():
    opened = LocalEngine()
    yield opened
    asyncio.run(opened.close())


def read(engine: LocalEngine, peer: bytes, address: int, target: np.ndarray, timeout_s: float = TIMEOUT_S) -> None:
    ranges = Ranges(u64(address), u64(target.ctypes.data), u64(target.nbytes))
    asyncio.run(engine.read(peer, ranges, timeout_s))


def served(source: SourceProcess, nbytes: int) -> tuple[bytes, int]:
    """Locator of the source and address of its bytes."""
    address = source.map(nbytes)
    source.write(address, 1, nbytes)
    return source.locate(), address


@pytest.mark.parametrize("met_before", [False, True])
def test_a_killed_peer_is_a_failed_source(engine, source, met_before):
    """source_killed_midchunk: a dead process is noticed, met alive before or not; no descriptor stays."""
    peer, address = served(source, 64)
    target = np.zeros(64, dtype=np.uint8)
    fds = len(os.listdir("/proc/self/fd"))
    if met_before:
        read(engine, peer, address, target)
        assert len(os.listdir("/proc/self/fd")) == fds + 1
    source.kill()
    for _ in range(2):
        with pytest.raises(SourceFailed, match=r"process \d+ (is dead|died)"):
            read(engine, peer, address, target)
    assert engine.reaches(peer) is None
    assert len(os.listdir("/proc/self/fd")) == fds


def test_bytes_of_a_peer_that_died_before_the_last_check_are_not_believed(engine, source, monkeypatch):
    """A read that succeeded counts only if the process is alive afterwards: its pid may be somebody else's by then."""
    peer, address = served(source, 64)

    class Dying(native.Reading):
        def outcome(self) -> native.ReadOutcome:
            outcome = super().outcome()
            source.kill()
            return outcome

    monkeypatch.setattr(local.native, "Reading", Dying)
    target = np.zeros(64, dtype=np.uint8)
    with pytest.raises(SourceFailed, match="died") as failure:
        read(engine, peer, address, target)
    assert failure.value.where.bytes_done == 64


def test_a_stopped_peer_is_still_readable(engine, source):
    """Reads are one-sided: a peer that does not run (a busy trainer, SIGSTOP) serves as before."""
    peer, address = served(source, 9 * MIB)
    source.stop()
    target = np.zeros(9 * MIB, dtype=np.uint8)
    read(engine, peer, address, target)
    assert (target == pattern(1, 9 * MIB)).all()


def test_a_recycled_pid_is_never_read(engine, source):
    """restart_same_name_same_addr: another process with the same pid and addresses is told apart by its start time."""
    peer, address = served(source, 64)
    identity = Identity.unpack(peer)
    target = np.zeros(64, dtype=np.uint8)
    with pytest.raises(SourceFailed, match="recycled"):
        read(engine, replace(identity, start=identity.start + 1).pack(), address, target)
    assert not target.any()


def test_a_peer_elsewhere_is_out_of_reach(engine, source):
    """Another host or another container's pids are never looked up here."""
    peer, address = served(source, 64)
    identity = Identity.unpack(peer)
    target = np.zeros(64, dtype=np.uint8)
    for elsewhere, says in [(replace(identity, boot="b"), "host"), (replace(identity, namespace=1), "container")]:
        with pytest.raises(EngineUnavailable, match=says):
            read(engine, elsewhere.pack(), address, target)
        assert says in str(engine.reaches(elsewhere.pack()))


def without_capabilities(work: Callable[[], None]) -> None:
    """Run `work` in a thread that has given up every capability, so that root is an ordinary user there."""
    errors: list[BaseException] = []

    def run() -> None:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
        try:
            assert ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_forbidden_peer_is_out_of_reach_with_the_reason(engine, source):
    """EPERM is no failure of the source: the error names both users and what the kernel asks for."""
    peer, address = served(source, 64)
    source.ask("forbid")
    target = np.zeros(64, dtype=np.uint8)

    def check() -> None:
        assert f"(uid {os.getuid()}) to read process {source.process.pid}" in str(engine.reaches(peer))
        with pytest.raises(
            EngineUnavailable, match="dumpable processes of one user, or the reader needs CAP_SYS_PTRACE"
        ):
            read(engine, peer, address, target)

    without_capabilities(check)
    assert not target.any()


def test_a_read_that_waits_behind_others_keeps_its_deadline(engine, source, monkeypatch):
    """With every thread busy, a read whose time is up ends without having begun."""
    peer, address = served(source, 9 * MIB)
    release = threading.Event()

    class Slow(native.Reading):
        def run(self) -> None:
            assert release.wait(TIMEOUT_S)
            super().run()

    first, second = np.zeros(9 * MIB, dtype=np.uint8), np.zeros(9 * MIB, dtype=np.uint8)

    async def both() -> None:
        monkeypatch.setattr(local.native, "Reading", Slow)
        ranges = Ranges(u64(address), u64(first.ctypes.data), u64(first.nbytes))
        slow = asyncio.create_task(engine.read(peer, ranges, TIMEOUT_S))
        await asyncio.sleep(0)
        ranges = Ranges(u64(address), u64(second.ctypes.data), u64(second.nbytes))
        with pytest.raises(SourceFailed, match="not done within"):
            await engine.read(peer, ranges, 0.01)
        release.set()
        await slow

    asyncio.run(both())
    assert (first == pattern(1, 9 * MIB)).all()
    assert not second.any()


def test_where_yama_restricts_the_engine_lets_readers_in(monkeypatch, tmp_path):
    """ptrace_scope 1 makes the engine ask for readers at start; 0 does not; a refusal is fatal, with its reason."""
    asked = []
    monkeypatch.setattr(local, "_YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(local.native, "allow_readers", lambda: asked.append(1))
    for scope, expected in [("0\n", 0), ("1\n", 1), ("2\n", 1)]:
        local._YAMA.write_text(scope, encoding="ascii")
        LocalEngine()
        assert len(asked) == expected

    def refuse() -> None:
        raise OSError(22, "Invalid argument")

    local._YAMA.write_text("1\n", encoding="ascii")
    monkeypatch.setattr(local.native, "allow_readers", refuse)
    with pytest.raises(EngineUnavailable, match="Yama would keep every reader out"):
        LocalEngine()


def test_a_forked_child_does_not_show_its_parents_engine(engine):
    """A locator names a process: in a forked child the engine is somebody else's."""
    child = os.fork()
    if child == 0:
        try:
            engine.locate()
        except Closed:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_deadline_is_the_monotonic_clocks(engine, source, monkeypatch):
    """client_clock_skew: setting the wall clock changes no deadline."""
    peer, address = served(source, 64)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    target = np.zeros(64, dtype=np.uint8)
    read(engine, peer, address, target)
    assert (target == pattern(1, 64)).all()
