"""Device memory between two processes by CUDA IPC: nothing is staged, every byte is verified on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub.transport.cuda_driver import HANDLE_BYTES, CudaDriver, CudaFailure
from tests.gpu.conftest import Accelerator
from tests.gpu.models import MIB, blank, contents, plain
from tests.integration.conftest import Opener

pytestmark = pytest.mark.gpu
WAIT_S = 60.0
HOST = torch.device("cpu")


class Publisher:
    """`tests.gpu.publisher` and what it said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.said: dict[str, Any] = {}
        self.listen()

    def listen(self) -> None:
        assert self._process.stdout is not None
        self.said = json.loads(self._process.stdout.readline())

    def next_version(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.listen()


@contextmanager
def publisher(server: str, model: str, engine: str, mib: int, **environment: str) -> Iterator[Publisher]:
    """A trainer in another process."""
    command = [sys.executable, "-m", "tests.gpu.publisher", server, model, engine, str(mib)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
    )
    try:
        yield Publisher(process)
    finally:
        process.communicate(timeout=WAIT_S)  # its input ends, and so does it


def advanced(tensors: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor]:
    return {name: tensor + steps for name, tensor in tensors.items()}


def test_the_driver_knows_what_torch_allocates(cuda: Accelerator) -> None:
    """Places, allocations and handles, by ctypes, of memory that torch made; host memory is the host's, also pinned."""
    driver = CudaDriver()
    tensor, pinned = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"), torch.zeros(100).pin_memory()
    assert driver.place(tensor.data_ptr()) == 0
    assert driver.place(pinned.data_ptr()) is None
    assert driver.place(torch.zeros(100).data_ptr()) is None
    base, nbytes = driver.allocation(tensor.data_ptr() + 5, 0)
    assert base <= tensor.data_ptr()
    assert tensor.data_ptr() + tensor.nbytes <= base + nbytes
    assert len(driver.export(base, 0)) == HANDLE_BYTES
    driver.close()


def test_device_to_device_between_processes(
    cuda: Accelerator, hub: Opener, server: str, model: str, figures: dict[str, float]
) -> None:
    """Nothing is staged on either side; versions follow each other through mappings that stay."""
    mib = 512
    with publisher(server, model, "cuda_ipc", mib) as trainer:
        assert trainer.said["staged_bytes"] < MIB
        expected = plain(cuda.place, mib * MIB, 1)
        theirs = blank(expected, cuda.place)
        rollout = hub("rollout", theirs, engine="cuda_ipc")
        assert rollout.staged_bytes < MIB
        for step in range(3):
            got = rollout.replicate(trainer.said["version"], timeout=WAIT_S)
            assert (got.engine, got.verified) == ("cuda_ipc", True)
            assert contents(theirs) == contents(advanced(expected, step))
            figures["cuda_ipc_pull_gb_per_s"] = got.nbytes / got.phases["transfer"] / 1e9
            if step < 2:
                trainer.next_version()


def test_device_to_host_and_on(cuda: Accelerator, hub: Opener, server: str, model: str) -> None:
    """A reader in host memory takes a device's bytes, and serves them to another device."""
    with publisher(server, model, "cuda_ipc", 64) as trainer:
        expected = plain(cuda.place, 64 * MIB, 1)
        near, far = blank(expected, HOST), blank(expected, cuda.place)
        hub("host", near, engine="cuda_ipc").replicate(trainer.said["version"], timeout=WAIT_S)
        assert contents(near) == contents(expected)
        hub("device", far, engine="cuda_ipc").replicate(trainer.said["version"], timeout=WAIT_S)
        assert contents(far) == contents(expected)


def test_memory_of_expandable_segments_is_staged(cuda: Accelerator, hub: Opener, server: str, model: str) -> None:
    """Such memory has no handle: the publisher stages it, visibly, and every byte arrives all the same."""
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with publisher(server, model, "cuda_ipc", 64, **setting) as trainer:
        assert trainer.said["staged_bytes"] > 64 * MIB
        expected = plain(cuda.place, 64 * MIB, 1)
        theirs = blank(expected, cuda.place)
        hub("rollout", theirs, engine="cuda_ipc").replicate(trainer.said["version"], timeout=WAIT_S)
        assert contents(theirs) == contents(expected)


def test_auto_moves_devices_of_two_processes(cuda: Accelerator, hub: Opener, server: str, model: str) -> None:
    """Without a word about engines: staged where not all of them read devices, and right in any case."""
    with publisher(server, model, "auto", 64) as trainer:
        expected = plain(cuda.place, 64 * MIB, 1)
        theirs = blank(expected, cuda.place)
        got = hub("rollout", theirs).replicate(trainer.said["version"], timeout=WAIT_S)
        assert got.verified
        assert contents(theirs) == contents(expected)


def test_a_handle_of_this_very_process_is_not_opened(cuda: Accelerator) -> None:
    """What the engine avoids is what the driver refuses: a process cannot open its own handle."""
    driver = CudaDriver()
    tensor = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    base, _ = driver.allocation(tensor.data_ptr(), 0)
    with pytest.raises(CudaFailure, match="cuIpcOpenMemHandle"):
        driver.open(driver.export(base, 0), 0)
    driver.close()
