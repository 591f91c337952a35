"""The seam to torch.cuda and torch.npu: over torch.cpu, which has the same names, and over a pretended CUDA runtime."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch

from tensorhub.client import devices
from tensorhub.client.compaction import raw_bytes, raw_view
from tensorhub.client.devices import Unpinnable, Unreachable, wait
from tensorhub.errors import EngineUnavailable


class Place:
    """Stands for a tensor: where it says it lies."""

    def __init__(self, place: str) -> None:
        self.device = torch.device(place)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> devices.Device:
    """The real adapter, over the one accelerator module that works everywhere."""
    return devices._Accelerator("cpu", torch.device("cpu"), torch.cpu, torch.empty)


class Never:
    def is_done(self) -> bool:
        return False


def test_copies_cross_both_ways(device: devices.Device) -> None:
    """Flat bytes and strided elements, there and back; a mark behind them is done once they have landed."""
    strided = torch.arange(12.0).view(3, 4).t()
    pairs = [(raw_bytes(torch.arange(5.0)), torch.zeros(20, dtype=torch.uint8))]
    pairs += [(raw_view(strided), torch.zeros(4, 3, dtype=torch.int32))]
    lane = device.lane()
    lane.fetch(pairs)
    assert wait([(device, lane.mark())], lambda: False, 5.0)
    assert pairs[0][1].view(torch.float32).tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(pairs[1][1].view(torch.float32), strided)
    for _, area in pairs:
        area.zero_()
    lane.deliver(pairs)
    assert wait([(device, lane.mark())], lambda: False, 5.0)
    assert not strided.any()


def test_packing_is_undone_by_unpacking(device: devices.Device) -> None:
    """100k_tiny_tensors: any dtypes and strides, side by side without padding, and back in place."""
    ours = [torch.arange(3, dtype=torch.uint8), torch.randn(2, 3, dtype=torch.float64).t(), torch.tensor(2.5)]
    theirs = [torch.zeros_like(ours[0]), torch.zeros(2, 3, dtype=torch.float64).t(), torch.tensor(0.0)]

    def raws(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [raw_bytes(t) if t.is_contiguous() else raw_view(t) for t in tensors]

    packed = device.pack(raws(ours))
    assert packed.nbytes == 3 + 48 + 4
    device.lane().unpack(raws(theirs), packed)
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))


def test_no_wait_is_without_a_deadline(device: devices.Device) -> None:
    """A device that does not come to the copy is an error that names it; a caller that gives up gets no error."""
    with pytest.raises(EngineUnavailable, match=r"cpu did not finish .* within 0 s; is a kernel"):
        wait([(device, Never())], lambda: False, 0.0)
    assert not wait([(device, Never())], lambda: True, 60.0)
    assert wait([(device, device.mark())], lambda: True, 0.0)


def test_what_a_runtime_says_becomes_an_error_of_ours(device: devices.Device) -> None:
    """all_errors_surface: a fault in the device is `EngineUnavailable` that names it, with the runtime's own words."""
    with pytest.raises(EngineUnavailable, match=r"cpu: .*size of tensor"):
        device.lane().fetch([(torch.zeros(3), torch.zeros(4))])


def test_memory_out_of_reach_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind without its backend here, or without one at all, is told with a remedy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(Unreachable, match="install a CUDA build of torch"):
        devices.device_of(Place("cuda:0"))  # type: ignore[arg-type]
    with pytest.raises(Unreachable, match="install torch_npu"):
        devices.KINDS["npu"](torch.device("privateuseone:0"))
    with pytest.raises(Unreachable, match="register a copy on the CPU"):
        devices.device_of(Place("xpu:0"))  # type: ignore[arg-type]


class Runtime:
    """cudaHostRegister and its undoing, as torch passes them on."""

    def __init__(self, failure: int) -> None:
        self.failure, self.locked = failure, set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.failure:
            self.locked.add(address)
        return self.failure

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.locked.remove(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Runtime]:
    def install(failure: int) -> Runtime:
        found = Runtime(failure)
        monkeypatch.setattr(devices, "_runtime", lambda: found)
        return found

    return install


def test_pinned_memory_is_exact_and_unlocked_before_it_is_unmapped(runtime: Callable[[int], Runtime]) -> None:
    """register_cycle_1000: as many bytes as asked for, locked while any tensor uses them, and not a moment longer."""
    cuda = runtime(0)
    memory = devices._pin_for_cuda(10_001)
    assert (memory.nbytes, cuda.locked) == (10_001, {memory.data_ptr()})
    view = memory[5000:]
    del memory
    gc.collect()
    assert cuda.locked
    del view
    gc.collect()
    assert cuda.locked == set()
    assert devices._pin_for_cuda(0).nbytes == 0


def test_memory_that_cannot_be_locked_is_unpinnable(runtime: Callable[[int], Runtime]) -> None:
    """register_failure_is_fatal: the runtime's code and the size are told."""
    runtime(2)
    with pytest.raises(Unpinnable, match="5000 bytes of pinned host memory: cudaHostRegister returned 2"):
        devices._pin_for_cuda(5000)
