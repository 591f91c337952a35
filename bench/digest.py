"""Question: which digest can be taken of every byte without being felt?

The candidates over the same memory with one thread, in turns; `docs/digest.md` says what follows from the answer.
"""

from __future__ import annotations

import importlib
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.measure import PAIRS_MIN, interleave, ratio, sample
from bench.report import Report
from tensorhub import native
from tensorhub.pipeline.device_digest import digest_rows

NBYTES = 128 << 20
CHUNK_BYTES = 1 << 20


def measure(report: Report) -> None:
    """A few seconds."""
    data = np.random.default_rng(0).integers(0, 256, NBYTES, dtype=np.uint8)
    torch.set_num_threads(1)
    works = {name: timed(work) for name, work in candidates(data).items()}
    for work in works.values():
        work()
    measured = interleave(works, PAIRS_MIN, report.tell)
    for name, seconds in measured.items():
        report.add(name, "GB/s", sample([NBYTES / s / 1e9 for s in seconds]))
    # Rates over the rate of xxh3: seconds the other way round.
    report.ratios += [
        ratio(f"digest_{name}_over_xxh3", measured["xxh3"], seconds)
        for name, seconds in measured.items()
        if name != "xxh3"
    ]


def candidates(data: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, Callable[[], object]]:
    """What could be taken; optional ones only where they are installed."""
    chunks = len(data) // CHUNK_BYTES
    addresses = np.arange(chunks, dtype=np.uint64) * np.uint64(CHUNK_BYTES) + np.uint64(data.ctypes.data)
    sizes, firsts = np.full(chunks, CHUNK_BYTES, dtype=np.uint64), np.arange(chunks + 1, dtype=np.uint64)
    out = np.zeros(chunks, dtype=np.uint64)
    rows = torch.from_numpy(data).view(chunks, CHUNK_BYTES)
    weights = torch.arange(1, CHUNK_BYTES // 8 + 1, dtype=torch.int64)
    found: dict[str, Callable[[], object]] = {
        "xxh3": lambda: native.digest_runs(addresses, sizes, firsts, out),
        "crc32": lambda: zlib.crc32(data.data),
        "torch_lane_sum": lambda: (rows.view(torch.int64) * weights).sum(1),
        "torch_xxh3": lambda: digest_rows(rows),
    }
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError:
        return found
    return {**found, "blake3": lambda: blake3(data.data).digest()}


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return seconds
