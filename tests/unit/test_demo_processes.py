"""The demo's processes: real ones over a fake hub end identical, are caught lying, and never outlive the demo."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tensorhub.cli import compare, demo, weights
from tensorhub.cli.demo_view import PlainView
from tensorhub.cli.demo_worker import Digests, Leave, Member, Open, Setup
from tensorhub.cli.fleet import ProcessFleet, WorkerFailed
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
