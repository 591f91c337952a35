"""Which CUDA allocations of this process others may open, and how a peer's are told: a table, and a locator of it.

Decides nothing but what is exported; opens and copies nothing. Handles of more than a few allocations would not fit in
a locator, so it names a table in the source's host memory, and its checksum:

    row    base (u8) | nbytes (u8) | CUipcMemHandle (64)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub.errors import EngineUnavailable
from tensorhub.ports import U64
from tensorhub.transport.cuda_driver import CudaDriver, CudaFailure
from tensorhub.transport.locators import malformed, packed, unpacked

#: Tables that readers may still fetch by a locator that they were given a moment ago.
TABLES_KEPT = 4
#: A table of more allocations than a device could hold is a mistake or an attack.
TABLE_BYTES_MAX = 16 << 20

ROW = np.dtype([("base", "<u8"), ("nbytes", "<u8"), ("handle", "V64")])
Rows = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Locator:
    """How a peer is reached: its process, its life as a user of the driver, and its table of allocations."""

    identity: bytes
    origin: bytes
    table: int
    table_bytes: int
    check: int

    def pack(self) -> bytes:
        return packed([self.identity, self.origin, self.table, self.table_bytes, self.check])

    @classmethod
    def unpack(cls, data: bytes) -> Locator:
        """`EngineUnavailable` for anything but what `pack` makes."""
        locator = cls(**unpacked(data, _TYPES))  # type: ignore[arg-type]  # checked: they are of these types
        if locator.table_bytes > TABLE_BYTES_MAX or locator.table_bytes % ROW.itemsize:
            raise malformed(f"a table of {locator.table_bytes} bytes")
        return locator

    def is_of(self, table: Rows) -> bool:
        """Whether these are the rows that were offered."""
        return xxhash.xxh3_64_intdigest(table.tobytes()) == self.check


_TYPES = {"identity": bytes, "origin": bytes, "table": int, "table_bytes": int, "check": int}


@dataclass(slots=True)
class _Allocation:
    """An allocation of ours, and how many registrations lie in it."""

    nbytes: int
    handle: bytes
    ordinal: int
    registrations: int = 0


class Exports:
    """The CUDA allocations of this process that are registered."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        #: {base: allocation}, none without registrations; {(address, nbytes): (base, how often)}.
        self._allocations: dict[int, _Allocation] = {}
        self._registered: dict[tuple[int, int], tuple[int, int]] = {}
        #: The last tables, newest last; the newest is that of `_allocations` unless `_is_stale`.
        self._tables: deque[Rows] = deque(maxlen=TABLES_KEPT)
        self._is_stale = True

    def add(self, address: int, nbytes: int) -> bool:
        """Export what holds a range; False for host memory, `EngineUnavailable` for memory that cannot be exported."""
        try:
            ordinal = self._driver.place(address)
            if ordinal is None:
                return False
            base, size = self._driver.allocation(address, ordinal)
            if address + nbytes > base + size:
                raise EngineUnavailable(f"{nbytes} bytes at {address:#x} lie in more than one allocation")
            if base not in self._allocations:
                self._allocations[base] = _Allocation(size, self._driver.export(base, ordinal), ordinal)
                self._is_stale = True
        except CudaFailure as error:
            raise EngineUnavailable(
                f"device memory at {address:#x} cannot be exported: {error}; allocators of expandable segments "
                "(PYTORCH_CUDA_ALLOC_CONF) make such memory"
            ) from error
        self._allocations[base].registrations += 1
        count = self._registered.get((address, nbytes), (base, 0))[1]
        self._registered[address, nbytes] = base, count + 1
        return True

    def remove(self, address: int, nbytes: int) -> bool:
        """Undo one `add`; False for what was not added."""
        base, count = self._registered.get((address, nbytes), (0, 0))
        if not count:
            return False
        if count > 1:
            self._registered[address, nbytes] = base, count - 1
        else:
            del self._registered[address, nbytes]
        self._allocations[base].registrations -= 1
        if not self._allocations[base].registrations:
            del self._allocations[base]
            self._is_stale = True
        return True

    def clear(self) -> None:
        self._allocations.clear()
        self._registered.clear()
        self._is_stale = True

    def locator(self, identity: bytes) -> Locator:
        """What readers are told, as of now."""
        if self._is_stale:
            rows = [(base, found.nbytes, found.handle) for base, found in sorted(self._allocations.items())]
            self._tables.append(np.array(rows, dtype=ROW))
            self._is_stale = False
        table = self._tables[-1]
        check = xxhash.xxh3_64_intdigest(table.tobytes())
        return Locator(identity, self._driver.origin, table.ctypes.data, table.nbytes, check)

    def devices_of(self, addresses: U64, nbytes: U64) -> NDArray[np.int64]:
        """Ordinal of the device on which each range lies; -1 for what is not registered here as device memory."""
        bases = sorted(self._allocations)
        sizes = np.array([self._allocations[base].nbytes for base in bases], dtype=np.uint64)
        ordinals = np.array([self._allocations[base].ordinal for base in bases] + [-1], dtype=np.int64)
        return ordinals[rows_of(np.array(bases, dtype=np.uint64), sizes, addresses, nbytes)]


def rows_of(bases: U64, sizes: U64, addresses: U64, nbytes: U64) -> NDArray[np.int64]:
    """Which of these allocations, ascending by base, holds each range; -1 for none."""
    if not len(bases):
        return np.full(len(addresses), -1, dtype=np.int64)
    row = np.searchsorted(bases, addresses, side="right").astype(np.int64) - 1
    ends = bases[row] + sizes[row]
    return np.where((row >= 0) & (addresses + nbytes <= ends), row, -1)
