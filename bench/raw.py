"""The raw peers that figures are held against: bare loops over the kernel's and libc's calls, nothing around them.

Each touches the same bytes as what it is compared with and returns seconds. No verification, no protocol, no batching
beyond the 4 MiB steps that are fastest for `process_vm_readv`.
"""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash
from numpy.typing import NDArray

STEP_BYTES = 4 << 20

Bytes = NDArray[np.uint8]


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.process_vm_readv.restype = ctypes.c_ssize_t
_LIBC.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.POINTER(_Iovec),
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def buffer(nbytes: int) -> Bytes:
    """Memory whose every page is there already: page faults are nobody's merit."""
    data = np.empty(nbytes, np.uint8)
    data.fill(1)
    return data


def read_process(pid: int, ranges: list[tuple[int, int]], into: Bytes, threads: int = 1) -> float:
    """Seconds to read `ranges` (address, nbytes) of a process, back to back, into a buffer."""
    steps = []
    at = into.ctypes.data
    for address, nbytes in ranges:
        for start in range(0, nbytes, STEP_BYTES):
            length = min(STEP_BYTES, nbytes - start)
            steps.append((address + start, at, length))
            at += length
    if at - into.ctypes.data > into.nbytes:
        raise ValueError("the buffer is smaller than the ranges")
    if threads == 1:
        started = time.perf_counter()
        _read_steps(pid, steps)
        return time.perf_counter() - started
    share = -(-len(steps) // threads)
    parts = [steps[i : i + share] for i in range(0, len(steps), share)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: None, range(threads)))  # the threads exist before the clock starts
        started = time.perf_counter()
        list(pool.map(lambda part: _read_steps(pid, part), parts))
        return time.perf_counter() - started


def _read_steps(pid: int, steps: list[tuple[int, int, int]]) -> None:
    mine, theirs = _Iovec(), _Iovec()
    for remote, local, length in steps:
        done = 0
        while done < length:
            mine.base, mine.nbytes = local + done, length - done
            theirs.base, theirs.nbytes = remote + done, length - done
            count = _LIBC.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            if count <= 0:
                code = ctypes.get_errno()
                raise OSError(code, f"process_vm_readv: {os.strerror(code)}")
            done += count


def copy(source: Bytes, into: Bytes) -> float:
    """Seconds for one memcpy."""
    started = time.perf_counter()
    ctypes.memmove(into.ctypes.data, source.ctypes.data, source.nbytes)
    return time.perf_counter() - started


def digest(arrays: list[Bytes], chunk_bytes: int) -> float:
    """Seconds to digest every chunk of every array by xxh3-64 in one thread."""
    started = time.perf_counter()
    for array in arrays:
        view = array.data
        for start in range(0, array.nbytes, chunk_bytes):
            xxhash.xxh3_64_intdigest(view[start : start + chunk_bytes])
    return time.perf_counter() - started
