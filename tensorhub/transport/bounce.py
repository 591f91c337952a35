"""Slabs: registered memory of our own in which bytes land before they are copied to where they belong.

Decides which slab is free. A slab that a library may still write to is quarantined until the library says that it is
done with it, and is never handed out before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import EngineUnavailable

#: One request: stays in a core's cache from landing to copy and digest, and costs far more than asking for it.
SLAB_BYTES = 1 << 20
#: All that one process lands in at once: a few reads with a few requests each in flight.
SLABS_MAX = 32
#: More than this may still be written to by a library that does not finish: it is sick, and says so.
QUARANTINED_MAX = 16


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """`SLAB_BYTES` registered bytes."""

    memory: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


class Lander(Protocol):
    """The library that writes to slabs."""

    def give(self, address: int, nbytes: int) -> None: ...
    def take_back(self, address: int) -> None: ...
    def status(self, batch: int) -> int:
        """0 while a batch may still write; asked once more after another answer, the batch is unknown."""
        ...


class Slabs:
    """The slabs of one library object. Any thread may use it."""

    def __init__(self, lander: Lander) -> None:
        self._lander = lander
        #: Guards everything below; held for a few calls of the library. A queue would not know about quarantine.
        self._lock = threading.Lock()
        self._free: list[Slab] = []
        #: Slabs with the batches that may still write to them; batches that have ended are gone from it.
        self._quarantined: list[tuple[Slab, list[int]]] = []
        self._made = 0

    def take(self) -> Slab | None:
        """A free slab, or None while all are in use. `EngineUnavailable` when too many do not come back."""
        with self._lock:
            self._sweep()
            if len(self._quarantined) > QUARANTINED_MAX:
                raise EngineUnavailable(
                    f"Mooncake is sick: {len(self._quarantined)} requests ended for us but not for it; "
                    "it is used again once it has given them up"
                )
            if self._free:
                return self._free.pop()
            if self._made >= SLABS_MAX:
                return None
            slab = Slab(np.zeros(SLAB_BYTES, dtype=np.uint8))
            self._lander.give(slab.address, SLAB_BYTES)
            self._made += 1
            return slab

    def give_back(self, slab: Slab, batches: Sequence[int] = ()) -> None:
        """Free again; quarantined while there are batches that may still write to it."""
        with self._lock:
            if batches:
                self._quarantined.append((slab, list(batches)))
            else:
                self._free.append(slab)

    @property
    def quarantined(self) -> int:
        with self._lock:
            self._sweep()
            return len(self._quarantined)

    def _sweep(self) -> None:
        still: list[tuple[Slab, list[int]]] = []
        for slab, batches in self._quarantined:
            left = [batch for batch in batches if self._lander.status(batch) == 0]
            if left:
                still.append((slab, left))
            else:
                self._free.append(slab)
        self._quarantined = still
