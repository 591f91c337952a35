r"""Memory of accelerators: the seam to torch.cuda and torch.npu, and the only module that knows them.

Decides how bytes cross between a device and pinned host memory, on which stream and after what. It never decides which
bytes do (`on_device.py`), never waits for a whole device, and imports torch_npu only once a tensor that lies on an NPU
has been met.

    caller's stream   -- kernels that write weights --* mark ----------------- more kernels --
                                                       \ a thread of ours sees that it is done
    lane (a stream)                                     *- fetch - fetch - mark ...

Nothing is enqueued behind work of others: what a lane holds are copies of ours alone, which end within moments. So a
copy that is not wanted any more can be waited for, and none lands later.
"""

from __future__ import annotations

import importlib
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tensorhub.errors import EngineUnavailable
from tensorhub.pipeline.device_digest import digest_rows

#: (a tensor's elements where they lie on the device, the same elements row-major in host memory), as integers.
Pair = tuple[torch.Tensor, torch.Tensor]

#: How long the caller's work before a publish may take: a training step that has not ended after this is stuck.
CALLER_WAIT_S = 600.0
#: The same for copies of ours, of one batch: milliseconds, unless others use the same bus.
COPY_WAIT_S = 60.0
#: Between two looks at an event: the runtimes know no wait with a deadline.
POLL_S_MIN = 20e-6
POLL_S_MAX = 1e-3
#: cudaHostRegisterPortable: pinned for every device of this process.
_PORTABLE = 1


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether everything before it has run."""
        ...


class Lane(Protocol):
    """A stream of our own. Every method only enqueues, and may be called from any one thread at a time."""

    def fetch(self, pairs: Iterable[Pair]) -> None:
        """Copy from the device to host memory."""
        ...

    def deliver(self, pairs: Iterable[Pair]) -> None:
        """Copy from host memory to the device."""
        ...

    def unpack(self, raws: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        """Undo `Device.pack` from host memory: one copy to the device, there to the tensors."""
        ...

    def digest(self, rows: torch.Tensor) -> torch.Tensor:
        """XXH3-64 of each row on the device, as int64 in host memory, valid once a later mark is done."""
        ...

    def mark(self) -> Event: ...


class Device(Protocol):
    """One accelerator. Calls that name "the current stream" mean that of the calling thread."""

    #: What engines call this memory: "cuda", "npu".
    kind: str
    #: What torch calls the device: "cuda:0".
    name: str

    def pin(self, nbytes: int) -> torch.Tensor:
        """Host memory, zeros or not, that this device copies to and from by itself; `Unpinnable` says why not."""
        ...

    def mark(self) -> Event:
        """A point in the current stream."""
        ...

    def pack(self, raws: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of tensors side by side in new memory of the device, copied by the current stream."""
        ...

    def lane(self) -> Lane: ...


class Unpinnable(Exception):
    """No pinned host memory for a device; becomes `UnsupportedTensor` where the tensors are known."""


class Unreachable(Exception):
    """A kind of memory that cannot be reached from here; becomes `UnsupportedTensor` where the tensor is known."""


def device_of(tensor: torch.Tensor) -> Device | None:
    """Where a tensor lies; None for host memory. `Unreachable` says what to install, or that there is no way."""
    place = tensor.device
    if place.type == "cpu":
        return None
    open_device = KINDS.get(place.type)
    if open_device is None:
        raise Unreachable(f"only host, {' and '.join(KINDS)} memory can be moved; register a copy on the CPU")
    with _lock:
        found = _opened.get(str(place))
        if found is None:
            found = _opened[str(place)] = open_device(place)
        return found


def wait(events: Iterable[tuple[Device, Event]], gives_up: Callable[[], bool], timeout_s: float) -> bool:
    """Block until every event is done; False as soon as the caller gives up. `EngineUnavailable` after the timeout."""
    deadline = time.monotonic() + timeout_s
    for device, event in events:
        pause_s = POLL_S_MIN
        while not event.is_done():
            if gives_up():
                return False
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{device.name} did not finish what was queued before a copy, or the copy, within {timeout_s:g} s; "
                    "is a kernel or a collective stuck?"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)
    return True


def pack(raws: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' bytes side by side in new memory: one concatenation, however many they are."""
    return torch.cat([raw.contiguous().view(torch.uint8).view(-1) for raw in raws])


def unpack(raws: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
    """Undo `pack`, on the device: contiguous tensors by few kernels, strided ones one by one."""
    pairs = list(zip(raws, torch.split(packed, [raw.nbytes for raw in raws]), strict=True))
    flat = [(raw, piece) for raw, piece in pairs if is_flat(raw)]
    if flat:
        torch._foreach_copy_([raw for raw, _ in flat], [piece for _, piece in flat])
    for raw, piece in pairs:
        if not is_flat(raw):
            raw.copy_(piece.clone().view(raw.dtype).view(raw.shape))  # a clone begins where any dtype may


def is_flat(raw: torch.Tensor) -> bool:
    """Whether these are bytes in a row, any stretch of which can be copied alone."""
    return raw.dtype == torch.uint8 and raw.ndim == 1 and raw.is_contiguous()


class _Accelerator:
    """`Device` over a module like torch.cuda, which torch.npu copies name by name."""

    def __init__(self, kind: str, place: torch.device, module: Any, pin: Callable[[int], torch.Tensor]) -> None:
        self.kind = kind
        self.name = str(place)
        self.pin = pin
        self._place = place
        self._module = module

    def mark(self) -> Event:
        with _translated(self.name):
            return _Mark(self.name, self._module.Event(), self._module.current_stream(self._place))

    def pack(self, raws: Sequence[torch.Tensor]) -> torch.Tensor:
        with _translated(self.name):
            return pack(raws)

    def lane(self) -> Lane:
        with _translated(self.name):
            return _Stream(self._module, self._place)


class _Mark:
    """`Event` over that of a module."""

    def __init__(self, name: str, event: Any, stream: Any) -> None:
        self._name = name
        self._event = event
        event.record(stream)

    def is_done(self) -> bool:
        with _translated(self._name):
            return bool(self._event.query())


class _Stream:
    """`Lane` over a stream of a module."""

    def __init__(self, module: Any, place: torch.device) -> None:
        self._module = module
        self._place = place
        self._stream = module.Stream(place)

    def fetch(self, pairs: Iterable[Pair]) -> None:
        with self._entered():
            for raw, area in pairs:
                area.copy_(raw, non_blocking=True)

    def deliver(self, pairs: Iterable[Pair]) -> None:
        with self._entered():
            for raw, area in pairs:
                raw.copy_(area, non_blocking=True)

    def unpack(self, raws: Sequence[torch.Tensor], packed: torch.Tensor) -> None:
        with self._entered():
            unpack(raws, packed.to(self._place, non_blocking=True))

    def digest(self, rows: torch.Tensor) -> torch.Tensor:
        with self._entered():
            found = digest_rows(rows)
            landed = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            return landed.copy_(found, non_blocking=True)

    def mark(self) -> Event:
        with _translated(str(self._place)):
            return _Mark(str(self._place), self._module.Event(), self._stream)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Torch's work goes to this lane; outside of autograd, whatever mode the thread is in."""
        with _translated(str(self._place)), torch.no_grad(), self._module.stream(self._stream):
            yield


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """What a runtime says becomes an error of ours: no memory, a fault in a kernel of the caller's, a lost device."""
    try:
        yield
    except RuntimeError as error:
        raise EngineUnavailable(f"{name}: {error}") from error


def _cuda(place: torch.device) -> Device:
    if not torch.cuda.is_available():
        raise Unreachable("torch finds no CUDA device or was built without CUDA; install a CUDA build of torch")
    return _Accelerator("cuda", place, torch.cuda, _pin_for_cuda)


def _npu(place: torch.device) -> Device:
    try:
        module = importlib.import_module("torch_npu").npu
    except Exception as error:  # it fails by other errors than ImportError without a driver
        raise Unreachable(f"torch_npu cannot be imported ({error}); install torch_npu and CANN") from error
    return _Accelerator("npu", place, module, _pin_for_npu)


def _pin_for_cuda(nbytes: int) -> torch.Tensor:
    """Exactly as many bytes as asked for: torch's own pinned allocator rounds up to a power of two."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        pages = _Pages(-1, nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        pages.lock(memory.data_ptr(), nbytes)
    except (OSError, RuntimeError) as error:
        raise Unpinnable(f"{nbytes} bytes of pinned host memory: {error}") from error
    return memory


def _pin_for_npu(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=nbytes > 0)
    except RuntimeError as error:
        raise Unpinnable(f"{nbytes} bytes of pinned host memory: {error}") from error


def _runtime() -> Any:
    """The CUDA runtime's few functions that torch passes on."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Pages(mmap.mmap):
    """Anonymous memory that the CUDA driver has locked: unlocked before it is unmapped.

    Shared, as `mmap` maps by default: a fork never copies its pages away from under the device.
    """

    locked_at = 0

    def lock(self, address: int, nbytes: int) -> None:
        failure = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
        if failure:
            raise RuntimeError(f"cudaHostRegister returned {failure}")
        self.locked_at = address

    def __del__(self) -> None:
        if self.locked_at:
            # Its code means nothing here: at the interpreter's end the runtime may have unlocked everything already.
            _runtime().cudaHostUnregister(self.locked_at)


#: {torch's name of a type of device: how one of them is reached}.
KINDS: dict[str, Callable[[torch.device], Device]] = {"cuda": _cuda, "npu": _npu}

#: Guards `_opened`: hubs of several threads register at the same time.
_lock = threading.Lock()
_opened: dict[str, Device] = {}
