"""Real descriptors, threads and memory after transfers that were interrupted at many places: all are given back."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorhub import Hub
from tensorhub.client import pull
from tensorhub.errors import TensorHubError
from tensorhub.transport.stream_peers import BULK_STREAMS, PEERS_MAX, SMALL_STREAMS
from tests.integration.conftest import Opener, blank, same, weights
from tests.support.engines import Gate, Meddler, meddled

#: Rounds before the first look, in which pools, caches and modules come to be; and those that are compared with them.
WARM, ROUNDS = 4, 16
PATIENCE_S = 20.0
#: Allocator noise of a process that works with tensors of this size.
RSS_SLACK_BYTES = 8 << 20


def footprint() -> tuple[int, int]:
    """Descriptors and threads of this process, those of C among them."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def own_threads() -> list[str]:
    """Python's threads of hubs; libraries keep some of their own."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorhub")]


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def out_of_time(trainer: Hub, rollout: Hub, gate: Gate) -> None:
    """The reader's deadline passes while it reads."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(rollout.replicate, timeout=0.05)
        assert isinstance(reading.exception(PATIENCE_S), TensorHubError)


def closed_reader(trainer: Hub, rollout: Hub, gate: Gate) -> None:
    """The reader's hub is closed by another thread."""
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(rollout.replicate, timeout=PATIENCE_S)
        assert gate.arrived.wait(PATIENCE_S)
        closing = pool.submit(rollout.close)
        gate.open()
        closing.result(PATIENCE_S)
        reading.exception(PATIENCE_S)


def closed_source(trainer: Hub, rollout: Hub, gate: Gate) -> None:
    """The only source goes."""
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(rollout.replicate, timeout=1.0)
        assert gate.arrived.wait(PATIENCE_S)
        trainer.close()
        gate.open()
        reading.exception(PATIENCE_S)


def interrupted(trainer: Hub, rollout: Hub, gate: Gate) -> None:
    """Ctrl-C, in the main thread."""

    def interrupt() -> None:
        if gate.arrived.wait(PATIENCE_S):
            os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            rollout.replicate(timeout=PATIENCE_S)
        interrupting.result(PATIENCE_S)


INTERRUPTIONS: tuple[Callable[[Hub, Hub, Gate], None], ...] = (
    out_of_time,
    closed_reader,
    closed_source,
    interrupted,
)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "tcp"])
def test_interrupted_transfers_leave_nothing_behind(hub: Opener, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """200_versions_flat, reader_killed: whatever ends a transfer, at its first read or a later one, every descriptor,
    thread and page is given back; the next transfer works, and at the end nothing of hubs is left at all."""
    ours = weights(1)
    theirs = blank(ours)
    # A reader whose engine is stuck is stopped so much after its deadline; nothing else is waited for here.
    monkeypatch.setattr(pull, "OUTER_MARGIN_S", 0.1)
    before, rss = (0, 0), 0
    for number in range(WARM + ROUNDS):
        gate = Gate()
        with meddled(monkeypatch, lambda inner, gate=gate: Meddler(inner, before=gate.pass_through)):  # type: ignore[misc]
            trainer = hub("trainer", ours, engine=engine)
            rollout = hub("rollout", theirs, engine=engine)
            trainer.publish(version=number)
            INTERRUPTIONS[number % len(INTERRUPTIONS)](trainer, rollout, gate)
            gate.open()
            if not rollout.closed and not trainer.closed:
                assert rollout.replicate(timeout=PATIENCE_S).version == number
                assert same(ours, theirs)
            rollout.close()
            trainer.close()
        if number == WARM - 1:
            before, rss = footprint(), rss_bytes()
    assert footprint() == before
    assert not own_threads(), "with the last hub all threads have ended"
    assert rss_bytes() - rss < RSS_SLACK_BYTES


@pytest.mark.slow
def test_many_sources_are_not_kept(hub: Opener) -> None:
    """200_versions_flat: a reader that has met many sources over tcp, one life after another, keeps threads and
    descriptors for the last ones at most, and with its hub for none."""
    most = PEERS_MAX * (BULK_STREAMS + SMALL_STREAMS)
    ours = weights(1, rows=8)
    theirs = blank(ours)
    rollout = hub("rollout", theirs, engine="tcp")
    before = footprint()
    for version in range(PEERS_MAX + 8):
        # Engines of its own, which end with it: another source to the reader each time.
        trainer = hub(f"trainer-{version}", ours, engine=["tcp", "memory"])
        trainer.publish(version=version)
        (source,) = rollout.replicate(version, timeout=PATIENCE_S).sources
        assert (source.replica, source.engine) == (f"trainer-{version}", "tcp")
        trainer.close()
    after = footprint()
    assert before[1] < after[1] <= before[1] + most
    assert after[0] <= before[0] + most
    rollout.close()
    assert not own_threads(), "with the last hub all threads have ended"
