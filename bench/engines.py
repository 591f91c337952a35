"""Ratios of the data plane's parts to their bare counterparts in the same run: reads, digests, gathers.

`python -m bench.engines`: prints medians of interleaved rounds, asserts nothing. Figures of one machine compare only
with each other.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import time
import zlib
from collections.abc import Callable

import numpy as np
import torch

from tensorhub import native
from tensorhub.pipeline.device_digest import digest_rows
from tensorhub.ports import Ranges
from tensorhub.transport import local
from tensorhub.transport.local import LocalEngine

GIB = 1 << 30
ROUNDS = 7
#: What a bare loop passes to one call; the same as in the field's own measurements of this system call.
STEP_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
NEVER_NS = 2**62


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def bare_loop(pid: int, remote: int, target: int, nbytes: int) -> None:
    """One thread, one range a call: what anyone would write first."""
    libc = ctypes.CDLL(None)
    mine, theirs = Vector(), Vector()
    for offset in range(0, nbytes, STEP_BYTES):
        mine.base, mine.nbytes = target + offset, STEP_BYTES
        theirs.base, theirs.nbytes = remote + offset, STEP_BYTES
        got = libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if got != STEP_BYTES:
            raise OSError(f"process_vm_readv read {got} of {STEP_BYTES} bytes")


def interleaved(works: dict[str, Callable[[], object]], nbytes: int) -> dict[str, float]:
    """Median GB/s of each, round by round in turns, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}


def show(title: str, rates: dict[str, float]) -> None:
    base = next(iter(rates.values()))
    print(title)
    for name, rate in rates.items():
        print(f"  {name:36s} {rate:8.2f} GB/s   {rate / base:6.3f} of the first")


def bench_reads() -> None:
    """A forked child serves a copy-on-write image of this array: the same pages, another process."""
    data = np.random.default_rng(0).integers(0, 256, GIB, dtype=np.uint8)
    target = np.zeros(GIB, dtype=np.uint8)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        locator = LocalEngine().locate()
        os.write(ready[1], locator)
        os.close(done[1])
        os.read(done[0], 1)
        os._exit(0)
    peer = os.read(ready[0], 4096)
    source, destination = data.ctypes.data, target.ctypes.data
    ranges = Ranges(u64(source), u64(destination), u64(GIB))

    async def measure() -> dict[str, float]:
        engines = {1: LocalEngine(), 2: LocalEngine()}  # an engine's threads are made at its first large read
        loop = asyncio.get_running_loop()

        def engine_read(threads: int) -> None:
            local.READ_THREADS_MAX = threads
            asyncio.run_coroutine_threadsafe(engines[threads].read(peer, ranges, 60.0), loop).result()

        works = {
            "bare loop, one thread": lambda: bare_loop(child, source, destination, GIB),
            "local engine, one thread": lambda: engine_read(1),
            "local engine, two threads": lambda: engine_read(2),
            "copy within the process, one thread": lambda: native.copy(destination, source, GIB),
        }
        try:
            return await asyncio.to_thread(interleaved, works, GIB)
        finally:
            for engine in engines.values():
                await engine.close()

    show("read of 1 GiB between two processes", asyncio.run(measure()))
    os.close(done[1])
    os.waitpid(child, 0)
    if not (target == data).all():
        raise RuntimeError("the bytes differ")


def bench_digests() -> None:
    nbytes = 128 << 20
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    at, chunks = data.ctypes.data, nbytes // CHUNK_BYTES
    addresses = np.arange(chunks, dtype=np.uint64) * np.uint64(CHUNK_BYTES) + np.uint64(at)
    sizes, firsts = np.full(chunks, CHUNK_BYTES, dtype=np.uint64), np.arange(chunks + 1, dtype=np.uint64)
    out = np.zeros(chunks, dtype=np.uint64)
    words, rows = torch.from_numpy(data).view(torch.int64), torch.from_numpy(data).view(chunks, CHUNK_BYTES)
    weights = torch.arange(1, CHUNK_BYTES // 8 + 1, dtype=torch.int64)
    torch.set_num_threads(1)
    works: dict[str, Callable[[], object]] = {
        "xxh3-64 of 1 MiB chunks, native": lambda: native.digest_runs(addresses, sizes, firsts, out),
        "crc32 (zlib)": lambda: zlib.crc32(data),
        "weighted lane sum, torch int64": lambda: (words.view(chunks, -1) * weights).sum(1),
        "xxh3-64, torch int64 (the oracle)": lambda: digest_rows(rows),
    }
    try:
        import blake3
    except ImportError:
        print("blake3 is not installed: not measured")
    else:
        works["blake3, one thread"] = lambda: blake3.blake3(data).digest()
    show(f"digest of {nbytes >> 20} MiB, one thread", interleaved(works, nbytes))


def bench_gathers() -> None:
    n, each = 100_000, 64
    source, target = np.ones(n * each, dtype=np.uint8), np.zeros(n * each, dtype=np.uint8)
    offsets = np.arange(n, dtype=np.uint64) * np.uint64(each)
    sizes, addresses = np.full(n, each, dtype=np.uint64), offsets + np.uint64(source.ctypes.data)
    works = {
        "one copy of the same bytes": lambda: native.copy(target.ctypes.data, source.ctypes.data, n * each),
        "gather of 100 000 x 64 bytes": lambda: native.gather(addresses, sizes, offsets, target.ctypes.data),
    }
    rates = interleaved(works, n * each)
    show("gather", rates)
    print(f"  one gather takes {n * each / rates['gather of 100 000 x 64 bytes'] / 1e6:.2f} ms")


if __name__ == "__main__":
    bench_reads()
    bench_digests()
    bench_gathers()
