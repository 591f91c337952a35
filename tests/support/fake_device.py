"""A device whose memory is host memory in disguise, and whose streams run only when somebody looks.

Its bytes are kept scrambled: whoever reads or writes them but through the device sees wrong ones. Its work is queued
and runs when an event behind it is asked for: whoever does not wait sees what was there before. Never used outside
tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from tensorhub.client import devices
from tensorhub.client.devices import Device, Event, Lane, Pair
from tensorhub.pipeline.device_digest import digest_rows
from tests import strategies

#: What torch calls devices of backends that it does not bring along: a name that no real device of a test machine has.
KIND = "privateuseone"
SCRAMBLE = 0x5A


class _Far(torch.Tensor):
    """A tensor that says it lies on the fake device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    is_cpu = False


class _Far0(_Far):
    device = torch.device(KIND, 0)


class _Far1(_Far):
    device = torch.device(KIND, 1)


def far(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """The same memory as a tensor on fake device 0 or 1; what it holds counts as scrambled from now on."""
    return tensor.as_subclass((_Far0, _Far1)[index])


def to_far(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """A contiguous copy on a fake device."""
    data = bytearray(scrambled(strategies.raw(tensor)))
    return far(torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape), index)


def peek(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, row-major, wherever it lies."""
    data = strategies.raw(tensor)
    return scrambled(data) if isinstance(tensor, _Far) else data


def poke(tensor: torch.Tensor, data: bytes) -> None:
    """Set a tensor's bytes, row-major, wherever it lies."""
    strategies.write(tensor, scrambled(data) if isinstance(tensor, _Far) else data)


def scrambled(data: bytes) -> bytes:
    return (np.frombuffer(data, dtype=np.uint8) ^ SCRAMBLE).tobytes()


class _Queue:
    """Work in order; it runs when an event behind it is asked for, unless held up."""

    def __init__(self) -> None:
        #: Work is queued in one thread and run in another.
        self._lock = threading.RLock()
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self.is_held = False

    def enqueue(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)

    def mark(self) -> _Mark:
        with self._lock:
            return _Mark(self, len(self._work))

    def run_to(self, end: int) -> bool:
        with self._lock:
            while self._done < end and not self.is_held:
                self._work[self._done]()
                self._done += 1
            return self._done >= end

    @property
    def pending(self) -> int:
        with self._lock:
            return len(self._work) - self._done


class _Mark:
    def __init__(self, queue: _Queue, end: int) -> None:
        self._queue, self._end = queue, end

    def is_done(self) -> bool:
        return self._queue.run_to(self._end)


class FakeLane:
    """`devices.Lane`; `copied` lists (direction, bytes) as they are enqueued."""

    def __init__(self, copied: list[tuple[str, int]]) -> None:
        self.queue = _Queue()
        self._copied = copied

    def fetch(self, pairs: Iterable[Pair]) -> None:
        for raw, area in pairs:
            self._copied.append(("fetch", raw.nbytes))
            self.queue.enqueue(lambda raw=raw, area=area: area.copy_(_flip(raw)))  # type: ignore[misc]

    def deliver(self, pairs: Iterable[Pair]) -> None:
        for raw, area in pairs:
            self._copied.append(("deliver", raw.nbytes))
            self.queue.enqueue(lambda raw=raw, area=area: raw.copy_(_flip(area)))  # type: ignore[misc]

    def unpack(self, raws: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        self._copied.append(("unpack", packed.nbytes))
        self.queue.enqueue(lambda: devices.unpack(raws, _flip(packed)))

    def digest(self, rows: torch.Tensor) -> torch.Tensor:
        self._copied.append(("digest", rows.nbytes))
        found = torch.zeros(len(rows), dtype=torch.int64)
        self.queue.enqueue(lambda: found.copy_(digest_rows(_flip(rows))))
        return found

    def mark(self) -> Event:
        return self.queue.mark()


class FakeDevice:
    """`devices.Device`, with the one stream that all callers use."""

    kind = KIND

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream = _Queue()
        self.lanes: list[FakeLane] = []
        #: (direction, bytes) of every copy, in order.
        self.copied: list[tuple[str, int]] = []
        #: What `pin` raises.
        self.unpinnable: str | None = None

    def pin(self, nbytes: int) -> torch.Tensor:
        if self.unpinnable is not None:
            raise devices.Unpinnable(self.unpinnable)
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8)

    def mark(self) -> Event:
        return self.stream.mark()

    def pack(self, raws: Sequence[torch.Tensor]) -> torch.Tensor:
        packed = torch.full((sum(raw.nbytes for raw in raws),), 0xEE, dtype=torch.uint8)
        self.stream.enqueue(lambda: packed.copy_(devices.pack(raws)))
        return packed

    def lane(self) -> Lane:
        lane = FakeLane(self.copied)
        self.lanes.append(lane)
        return lane

    def launch(self, kernel: Callable[[], object]) -> None:
        """Queue work on the caller's stream, as a training step does."""
        self.stream.enqueue(kernel)


def _flip(tensor: torch.Tensor) -> torch.Tensor:
    """The elements scrambled, or unscrambled, in new memory."""
    return (tensor.contiguous().view(torch.uint8) ^ SCRAMBLE).view(tensor.dtype).view(tensor.shape)


@contextmanager
def fake_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeDevice, FakeDevice]]:
    """Tensors made by `far` lie on these two devices."""
    opened = {f"{KIND}:{index}": FakeDevice(f"{KIND}:{index}") for index in (0, 1)}

    def open_device(place: torch.device) -> Device:
        return opened[str(place)]

    with monkeypatch.context() as patch:
        patch.setitem(devices.KINDS, KIND, open_device)
        patch.setattr(devices, "_opened", {})
        yield tuple(opened.values())  # type: ignore[misc]
