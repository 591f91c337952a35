"""The few calls of the CUDA driver that one-sided reads of device memory need, by ctypes: no framework, no toolkit.

Every code is checked and becomes `CudaFailure` with the driver's own words. Decides nothing: which memory is exported,
opened and copied is `cuda_ipc.py`'s business.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorhub.errors import EngineUnavailable

LIBRARY = "libcuda.so.1"
#: Bytes of a CUipcMemHandle.
HANDLE_BYTES = 64

_SUCCESS = 0
_NOT_READY = 600
#: Invalid value, not initialized, no context: the driver knows nothing of that address, so it is the host's.
_UNKNOWN_ADDRESS = (1, 3, 201)
_ATTRIBUTE_MEMORY_TYPE = 2
_ATTRIBUTE_DEVICE_ORDINAL = 9
_MEMORY_OF_DEVICE = 2
#: Peer access between two devices is switched on at the first copy.
_LAZY_PEER_ACCESS = 1
#: A stream that does not wait for the legacy default stream, nor it for ours.
_NON_BLOCKING = 1


class IpcHandle(ctypes.Structure):
    """A CUipcMemHandle: opaque bytes, passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class CudaFailure(Exception):
    """A call of the driver failed; translated by the engine, once."""

    def __init__(self, call: str, code: int, words: str) -> None:
        super().__init__(f"{call} returned {code} ({words})")
        self.code = code


_u64, _pointer, _int, _uint = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [_uint],
    "cuDeviceGet": [_pointer, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuDevicePrimaryCtxRelease_v2": [_int],
    "cuCtxPushCurrent_v2": [_pointer],
    "cuCtxPopCurrent_v2": [_pointer],
    "cuPointerGetAttribute": [_pointer, _int, _u64],
    "cuMemGetAddressRange_v2": [_pointer, _pointer, _u64],
    "cuIpcGetMemHandle": [_pointer, _u64],
    "cuIpcOpenMemHandle_v2": [_pointer, IpcHandle, _uint],
    "cuIpcCloseMemHandle": [_u64],
    "cuMemcpyAsync": [_u64, _u64, ctypes.c_size_t, _pointer],
    "cuStreamCreate": [_pointer, _uint],
    "cuStreamQuery": [_pointer],
    "cuStreamDestroy_v2": [_pointer],
    "cuGetErrorString": [_int, _pointer],
}


class CudaDriver:
    """One process's use of the driver.

    It is initialized at the first use of a device, never before: a process that has is of no use to CUDA after a fork,
    and most processes that could use a device never do. `place` says so of any address without that.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else _load()
        #: Whose memory this driver can name without opening a handle: that of this very process.
        self.origin = os.urandom(16)
        #: Guards `_contexts`: allocations are exported in one thread and copied in another.
        self._lock = threading.Lock()
        #: {device ordinal: (device, its primary context, which frameworks use as well)}
        self._contexts: dict[int, tuple[int, int]] = {}
        #: {device ordinal: stream}
        self._streams: dict[int, int] = {}

    def place(self, address: int) -> int | None:
        """Ordinal of the device on which an address lies; None for host memory, pinned or not."""
        kind, ordinal = _uint(0), _int(0)
        try:
            self._call("cuPointerGetAttribute", ctypes.byref(kind), _ATTRIBUTE_MEMORY_TYPE, address)
        except CudaFailure as error:
            if error.code in _UNKNOWN_ADDRESS:
                return None
            raise
        if kind.value != _MEMORY_OF_DEVICE:
            return None
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _ATTRIBUTE_DEVICE_ORDINAL, address)
        return ordinal.value

    def allocation(self, address: int, ordinal: int) -> tuple[int, int]:
        """(base, nbytes) of the allocation that holds an address."""
        base, nbytes = _u64(0), ctypes.c_size_t(0)
        with self._current(ordinal):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
        return base.value, nbytes.value

    def export(self, base: int, ordinal: int) -> bytes:
        """The handle by which other processes open an allocation."""
        handle = IpcHandle()
        with self._current(ordinal):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(handle.reserved)

    def open(self, handle: bytes, ordinal: int) -> int:
        """Where another process's allocation appears here."""
        address = _u64(0)
        with self._current(ordinal):
            by_value = IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), by_value, _LAZY_PEER_ACCESS)
        return address.value

    def close_handle(self, address: int, ordinal: int) -> None:
        """Undo one `open`."""
        with self._current(ordinal):
            self._call("cuIpcCloseMemHandle", address)

    def copy(self, destination: int, source: int, nbytes: int, ordinal: int) -> None:
        """Enqueue a copy between any two places, by a device; see `is_idle`."""
        with self._current(ordinal):
            self._call("cuMemcpyAsync", destination, source, nbytes, self._stream(ordinal))

    def is_idle(self, ordinal: int) -> bool:
        """Whether every copy of a device has landed."""
        if ordinal not in self._streams:
            return True
        with self._current(ordinal):
            code = int(self._library.cuStreamQuery(self._streams[ordinal]))
        if code not in (_SUCCESS, _NOT_READY):
            raise CudaFailure("cuStreamQuery", code, self._words(code))
        return code == _SUCCESS

    def close(self) -> None:
        """Give streams and contexts back; idempotent. No copy may be under way."""
        while self._streams:
            ordinal, stream = self._streams.popitem()
            with self._current(ordinal):
                self._call("cuStreamDestroy_v2", stream)
        while self._contexts:
            _, (device, _) = self._contexts.popitem()
            self._call("cuDevicePrimaryCtxRelease_v2", device)

    def _stream(self, ordinal: int) -> int:
        if ordinal not in self._streams:
            stream = _pointer(0)
            self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            self._streams[ordinal] = stream.value or 0
        return self._streams[ordinal]

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """The device's context is this thread's for a while; what was current before is so again afterwards."""
        with self._lock:
            if ordinal not in self._contexts:
                device, context = _int(0), _pointer(0)
                self._call("cuInit", 0)
                self._call("cuDeviceGet", ctypes.byref(device), ordinal)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device.value)
                self._contexts[ordinal] = device.value, context.value or 0
        self._call("cuCtxPushCurrent_v2", self._contexts[ordinal][1])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_pointer(0)))

    def _call(self, name: str, *arguments: Any) -> None:
        code = int(getattr(self._library, name)(*arguments))
        if code != _SUCCESS:
            raise CudaFailure(name, code, self._words(code))

    def _words(self, code: int) -> str:
        words = ctypes.c_char_p()
        if int(self._library.cuGetErrorString(code, ctypes.byref(words))) != _SUCCESS:
            return "no words for it"
        return (words.value or b"").decode(errors="replace")


def missing() -> str | None:
    """Why this machine has no CUDA driver, or None."""
    try:
        _load()
    except EngineUnavailable as error:
        return error.message
    return None


@functools.cache
def _load() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _int
    except (OSError, AttributeError) as error:
        raise EngineUnavailable(f"no usable CUDA driver: {error}; install NVIDIA's driver ({LIBRARY})") from error
    return library
