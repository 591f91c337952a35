"""The CUDA driver's calls over host memory, as `transport/cuda_driver.py` makes them. Never used outside tests.

Allocations are files in memory, so that an opened handle is the same bytes at another address, as between processes.
Their bytes are kept scrambled: only `cuMemcpyAsync` crosses rightly between a device and the host. Copies run when the
stream is asked whether it is done.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

HANDLE_BYTES = 64
_INVALID_VALUE, _NOT_INITIALIZED, _INVALID_CONTEXT, _NOT_SUPPORTED = 1, 3, 201, 801


class FakeGpu:
    """The device memory of a host: {handle: (file, size, ordinal)}. Each `FakeCuda` is a process that uses it."""

    def __init__(self, scramble: int = 0x5A) -> None:
        self.scramble = scramble
        self.allocations: dict[bytes, tuple[int, int, int]] = {}

    def close(self) -> None:
        for file, _, _ in self.allocations.values():
            os.close(file)
        self.allocations.clear()


class FakeCuda:
    """One process's `libcuda.so.1`."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.is_initialized = False
        self.contexts: list[int] = []
        self.retained = 0
        self.streams = 0
        #: Mapped by handle and not yet closed.
        self.opened: dict[int, bytes] = {}
        #: Allocations that cannot be exported, as those of expandable segments.
        self.unexportable: set[int] = set()
        #: Copies that the device has not made yet; it makes none while `is_stuck`.
        self.queued: list[tuple[int, int, int]] = []
        self.copies = 0
        self.is_stuck = False
        self._maps: dict[int, tuple[mmap.mmap, int, bytes]] = {}

    # ------------------------------------------------------------ what a framework does

    def allocate(self, nbytes: int, ordinal: int = 0) -> int:
        """As cudaMalloc."""
        self.is_initialized = True
        file = os.memfd_create("gpu")
        os.ftruncate(file, nbytes)
        handle = os.urandom(HANDLE_BYTES)
        self.gpu.allocations[handle] = file, nbytes, ordinal
        return self._map(handle)

    def free(self, address: int) -> None:
        """As cudaFree."""
        handle = self._maps[address][2]
        os.close(self.gpu.allocations.pop(handle)[0])
        self._unmap(address)

    def write(self, address: int, data: bytes) -> None:
        """What a kernel writes."""
        ctypes.memmove(address, (np.frombuffer(data, np.uint8) ^ self.gpu.scramble).tobytes(), len(data))

    def peek(self, address: int, nbytes: int) -> bytes:
        """What a kernel reads."""
        return (np.frombuffer(ctypes.string_at(address, nbytes), np.uint8) ^ self.gpu.scramble).tobytes()

    def close(self) -> None:
        """The process ends: what it allocated is free again."""
        for address, (_, _, handle) in list(self._maps.items()):
            if address not in self.opened and handle in self.gpu.allocations:
                self.free(address)
            else:
                self._unmap(address)

    # ------------------------------------------------------------ the driver's calls

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.is_initialized = True
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:  # noqa: N802
        self.retained += 1
        context._obj.value = 1000 + device
        return 0 if self.is_initialized else _NOT_INITIALIZED

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:  # noqa: N802
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:  # noqa: N802
        self.contexts.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.contexts.pop()
        return 0

    def cuPointerGetAttribute(self, value: Any, attribute: int, address: int) -> int:  # noqa: N802
        if not self.is_initialized:
            return _NOT_INITIALIZED
        found = self._base_of(address)
        if found is None:
            return _INVALID_VALUE
        value._obj.value = {2: 2, 9: self.gpu.allocations[self._maps[found][2]][2]}[attribute]
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, address: int) -> int:  # noqa: N802
        found = self._base_of(address)
        if found is None or not self.contexts:
            return _INVALID_CONTEXT
        base._obj.value, nbytes._obj.value = found, self._maps[found][1]
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: int) -> int:  # noqa: N802
        if not self.contexts:
            return _INVALID_CONTEXT
        if base in self.unexportable:
            return _INVALID_VALUE
        ctypes.memmove(ctypes.addressof(handle._obj), self._maps[base][2], HANDLE_BYTES)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:  # noqa: N802
        key = bytes(handle.reserved)
        if not self.contexts or any(key == own for _, _, own in self._maps.values()):
            return _INVALID_CONTEXT  # a process cannot open its own handle, nor one twice
        if key not in self.gpu.allocations:
            return _INVALID_VALUE
        address._obj.value = self._map(key)
        self.opened[address._obj.value] = key
        return 0

    def cuIpcCloseMemHandle(self, address: int) -> int:  # noqa: N802
        del self.opened[address]
        self._unmap(address)
        return 0

    def cuMemcpyAsync(self, destination: int, source: int, nbytes: int, stream: int) -> int:  # noqa: N802
        if not self.contexts:
            return _INVALID_CONTEXT
        self.queued.append((destination, source, nbytes))
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        self.streams += 1
        stream._obj.value = 7
        return 0

    def cuStreamQuery(self, stream: int) -> int:  # noqa: N802
        if self.is_stuck:
            return 600
        for destination, source, nbytes in self.queued:
            crosses = (self._base_of(destination) is None) != (self._base_of(source) is None)
            data = ctypes.string_at(source, nbytes)
            if crosses:
                data = (np.frombuffer(data, np.uint8) ^ self.gpu.scramble).tobytes()
            ctypes.memmove(destination, data, nbytes)
            self.copies += 1
        self.queued.clear()
        return 0

    def cuStreamDestroy_v2(self, stream: int) -> int:  # noqa: N802
        self.streams -= 1
        return 0

    def cuGetErrorString(self, code: int, words: Any) -> int:  # noqa: N802
        words._obj.value = {_INVALID_VALUE: b"invalid argument", _INVALID_CONTEXT: b"invalid device context"}.get(code)
        return 0

    def _map(self, handle: bytes) -> int:
        file, nbytes, _ = self.gpu.allocations[handle]
        mapping = mmap.mmap(file, nbytes)
        view = (ctypes.c_char * 1).from_buffer(mapping)
        address = ctypes.addressof(view)
        del view
        self._maps[address] = mapping, nbytes, handle
        return address

    def _unmap(self, address: int) -> None:
        self._maps.pop(address)[0].close()

    def _base_of(self, address: int) -> int | None:
        for base, (_, nbytes, _) in self._maps.items():
            if base <= address < base + nbytes:
                return base
        return None
