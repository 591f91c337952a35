"""The demo's processes: real ones over a fake hub end identical, are caught lying, and never outlive the demo."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import select
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from tensorhub.cli import compare, demo, weights
from tensorhub.cli.demo_view import PlainView
from tensorhub.cli.demo_worker import Digests, Leave, Member, Open, Replicate, Setup, serve
from tensorhub.cli.fleet import ProcessFleet, WorkerFailed
from tensorhub.errors import ServerUnavailable, WaitTimeout
from tests.unit import bare_workers, fake_hub

pytestmark = pytest.mark.slow

ONE = Member("trainer", 0)
ROOT = Path(__file__).parents[2]
#: A killed process is gone at once; this bounds a broken test.
DEATH_SECONDS = 30.0


def options(server: str, replicas: int = 1, shards: int = 1) -> demo.Options:
    return demo.Options(weights.synthetic(3), replicas=replicas, shards=shards, rounds=2, server=server)


def lone_setup() -> list[Setup]:
    return demo.setups(demo.Options(weights.synthetic(1), replicas=1, shards=1))[:1]


def test_processes_end_identical(tmp_path: Path) -> None:
    """A trainer and two rollouts of two processes each: every round identical, every byte compared."""
    asked = options(str(tmp_path), replicas=2, shards=2)
    with ProcessFleet(demo.setups(asked), fake_hub.main) as fleet:
        outcome = demo.run(asked, fleet, PlainView(None))
    assert outcome.identical
    assert outcome.bytes_compared == 2 * asked.model.nbytes
    assert [done.tensors_changed for done in outcome.rounds] == [len(asked.model.specs)] * 2


def test_processes_that_hold_other_bytes_are_caught(tmp_path: Path) -> None:
    """A replicate that reports success with one flipped byte is found in both comparisons, by name."""
    asked = options(f"{tmp_path}?layers.1.norm")
    with ProcessFleet(demo.setups(asked), fake_hub.main) as fleet:
        outcome = demo.run(asked, fleet, PlainView(None))
    assert compare.exit_code(outcome.differences) == 1
    assert {d.tensor for d in outcome.differences} == {"layers.1.norm"}
    assert len(outcome.differences) == 2 + 1  # two rounds by digest and one byte for byte


def test_a_killed_worker_ends_the_demo_by_name(tmp_path: Path) -> None:
    """A worker that dies in its replicate is named with its signal; the demo does not hang."""
    asked = options(f"{tmp_path}?die")
    with (
        pytest.raises(WorkerFailed, match=r"rollout-0#0: died of signal 9"),
        ProcessFleet(demo.setups(asked), fake_hub.main) as fleet,
    ):
        demo.run(asked, fleet, PlainView(None))


def test_a_failing_worker_says_why() -> None:
    """The error of a worker reaches the parent by name and message."""
    with (
        ProcessFleet(lone_setup(), bare_workers.say_failure) as fleet,
        pytest.raises(WorkerFailed, match="RuntimeError: no such"),
    ):
        fleet.ask({ONE: Open()}, 60.0)


def test_no_process_outlives_the_fleet() -> None:
    """Even a worker that is deaf to SIGTERM is gone once the fleet is left."""
    with ProcessFleet(lone_setup(), bare_workers.echo_pid) as fleet:
        pid = fleet.ask({ONE: Leave()}, 60.0)[ONE]
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_silent_worker_meets_its_deadline() -> None:
    """No answer within the deadline is an error that names worker and command."""
    late = r"trainer#0: did not answer within 0.1 s to Digests"
    with ProcessFleet(lone_setup(), bare_workers.fall_silent) as fleet, pytest.raises(WorkerFailed, match=late):
        fleet.ask({ONE: Digests()}, 0.1)


class _Slow:
    """A hub whose progress is seen once; its replicate takes until then, and a little more."""

    def __init__(self) -> None:
        self.looked = threading.Event()

    def register(self, tensors: object) -> None:
        return None

    def progress(self) -> object:
        self.looked.set()
        return types.SimpleNamespace(bytes_done=1, bytes_total=2, source="trainer#0")

    def replicate(self, selector: str, timeout: float) -> object:
        assert self.looked.wait(timeout)
        raise WaitTimeout("nothing came")

    def close(self) -> None:
        raise ServerUnavailable("nobody says goodbye")


def test_a_worker_whose_parent_left_ends_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C: the pipe is gone in the midst of a replicate; neither thread of the worker has a traceback to show."""
    ours, theirs = multiprocessing.Pipe()
    setup = dataclasses.replace(lone_setup()[0], trainer=False)
    ours.send(Open())
    ours.send(Replicate())
    ours.close()
    serve(theirs, setup, lambda *_, **__: _Slow())
    assert capfd.readouterr().err == ""


def test_no_process_outlives_a_killed_parent() -> None:
    """SIGKILL of the demo itself takes a worker with it that is busy and reads no pipe."""
    code = "from tests.unit.bare_workers import lead; lead()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        ready, _, _ = select.select([worker], [], [], DEATH_SECONDS)
        assert ready, "the worker outlived its parent"
    finally:
        os.close(worker)
