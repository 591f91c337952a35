"""Copies by CUDA devices, and the mappings of peers' allocations that they need. All of it in one thread.

Decides when a copy is given up: never while a device may still write. Which ranges are copied, the engine says.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import EngineUnavailable
from tensorhub.ports import U64
from tensorhub.transport.cuda_driver import CudaDriver
from tensorhub.transport.cuda_exports import Rows

#: Enqueued at once: some milliseconds of a bus, after which the deadline and a `close` get their turn.
SLICE_BYTES = 256 << 20
#: Copies that were begun may land this long after the deadline; a device that takes longer is stuck.
STUCK_S = 30.0
#: Between two looks at a stream: the driver knows no wait with a deadline.
POLL_S = 50e-6


@dataclass(slots=True)
class Stop:
    """Set by another thread to end a copy after what was enqueued."""

    is_set: bool = False

    def set(self) -> None:
        self.is_set = True


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Ranges to copy; range i goes from `sources[i]` to `destinations[i]` by device `ordinals[i]`."""

    sources: U64
    destinations: U64
    nbytes: U64
    ordinals: NDArray[np.int64]


class Copies:
    """The mappings of one engine. For one thread at a time."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        #: {(peer's identity, handle): (mapped at, by which device)}
        self._mapped: dict[tuple[bytes, bytes], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def map(self, identity: bytes, table: Rows, rows: NDArray[np.int64], ordinals: NDArray[np.int64]) -> U64:
        """Where the allocations `rows` of a peer's table appear here; opened by the device that will read them first.

        What the peer does not export any more is given back.
        """
        handles = [row["handle"].tobytes() for row in table]
        self.unmap(identity, keep=set(handles))
        bases = np.zeros(len(rows), dtype=np.uint64)
        for i, (row, ordinal) in enumerate(zip(rows.tolist(), ordinals.tolist(), strict=True)):
            key = identity, handles[row]
            if key not in self._mapped:
                self._mapped[key] = self._driver.open(handles[row], ordinal), ordinal
            bases[i] = self._mapped[key][0]
        return bases

    def unmap(self, identity: bytes, keep: Collection[bytes] = ()) -> None:
        """Give back what is mapped of a peer, but for some handles."""
        for key in [key for key in self._mapped if key[0] == identity and key[1] not in keep]:
            self._driver.close_handle(*self._mapped.pop(key))

    def close(self) -> None:
        for identity in {identity for identity, _ in self._mapped}:
            self.unmap(identity)

    def run(self, copy: Copy, deadline: float, stop: Stop) -> bool:
        """Return when every byte has landed; False when the deadline passed, or it was stopped, before. In either case
        nothing lands any more, or `EngineUnavailable` says that a device is stuck."""
        ends = np.cumsum(copy.nbytes, dtype=np.uint64)
        first, ordinals = 0, [int(ordinal) for ordinal in np.unique(copy.ordinals)]
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, begin + SLICE_BYTES, side="right")))
            if stop.is_set or time.monotonic() >= deadline:
                return False
            try:
                for i in range(first, last):
                    self._driver.copy(
                        int(copy.destinations[i]), int(copy.sources[i]), int(copy.nbytes[i]), int(copy.ordinals[i])
                    )
            finally:
                self._wait(ordinals, deadline)
            first = last
        return True

    def _wait(self, ordinals: list[int], deadline: float) -> None:
        while not all(self._driver.is_idle(ordinal) for ordinal in ordinals):
            if time.monotonic() > deadline + STUCK_S:
                raise EngineUnavailable(
                    f"CUDA device {ordinals} did not finish a copy {STUCK_S:g} s after its deadline; "
                    "what it copies to may still change"
                )
            time.sleep(POLL_S)
