"""What stays flat over many versions and registrations, and what `python -O` does not change."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import Opener, blank, same, weights

ROOT = Path(__file__).parents[2]
#: Rounds before the first look: pools, caches and lazily imported modules are there by then.
WARM = 20
#: Allocator noise of a process that works with tensors of this size.
RSS_SLACK_BYTES = 8 << 20
START_S = 100


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _footprint() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
def test_versions_leave_nothing_behind(hub: Opener) -> None:
    """200_versions_flat, repeat_update_many: memory, descriptors and threads stay where they were early on."""
    ours = weights(0, rows=16)
    theirs = blank(ours)
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    before, rss = (0, 0), 0
    for version in range(WARM + 200):
        ours["step"].fill_(version)
        trainer.publish(version=version)
        assert rollout.replicate(version, timeout=20).version == version
        trainer.unpublish(timeout=20)
        if version == WARM:
            before, rss = _footprint(), _rss_bytes()
    assert same(ours, theirs)
    assert _footprint() == before
    assert _rss_bytes() - rss < RSS_SLACK_BYTES
    assert len(trainer.versions()) == 1, "what nobody holds any more is forgotten"


@pytest.mark.slow
def test_registrations_leave_nothing_behind(hub: Opener) -> None:
    """register_cycle_1000: a thousand registrations of fresh memory keep neither memory nor registrations."""
    trainer = hub("trainer")
    before, rss = (0, 0), 0
    for cycle in range(WARM + 1000):
        trainer.register({"w": torch.full((256, 1024), float(cycle)), "b": torch.zeros(8)})
        if cycle == WARM:
            before, rss = _footprint(), _rss_bytes()
    assert _footprint() == before
    assert _rss_bytes() - rss < RSS_SLACK_BYTES


_JOB = """
import sys, torch, tensorhub
from tensorhub.errors import ContractBroken, LayoutMismatch
assert False, "this line must be compiled away"
server, model = sys.argv[1:]
ours = {"w": torch.randn(300, 1000), "b": torch.randn(7)}
theirs = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
trainer = tensorhub.open(model, replica="trainer", server=server)
rollout = tensorhub.open(model, replica="rollout", server=server)
trainer.register(ours)
rollout.register(theirs)
trainer.publish(version=1)
got = rollout.replicate(timeout=30)
if got.version != 1 or not all(torch.equal(ours[name], theirs[name]) for name in ours):
    sys.exit("not identical")
ours["w"].add_(1)
try:
    trainer.unpublish(timeout=30)
except ContractBroken:
    pass
else:
    sys.exit("a broken contract went unnoticed")
trainer.publish(version=2)
rollout.unpublish(timeout=30)
rollout.register({"w": torch.zeros(3)})
try:
    rollout.replicate(timeout=30)
except LayoutMismatch:
    pass
else:
    sys.exit("a mismatch went unnoticed")
print("fine")
"""


@pytest.mark.slow
def test_python_o_mode(server: str, model: str) -> None:
    """python_O_mode: with asserts compiled away the job runs and every refusal is still there."""
    done = subprocess.run(
        [sys.executable, "-O", "-c", _JOB, server, model],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "fine", "")
