"""Copies within the host memory of this process, many at a time.

Decides nothing; whoever makes `Moves` says what goes where, and whoever runs them when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub.native import copy_ranges, differing
from tensorhub.ports import U64


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """`nbytes[i]` bytes from `sources[i]` to `destinations[i]`; no two overlap."""

    sources: U64
    destinations: U64
    nbytes: U64

    def run(self) -> None:
        if len(self.nbytes):
            copy_ranges(self.sources, self.destinations, self.nbytes)

    def differing(self) -> NDArray[np.int64]:
        """Indices of the moves whose two places hold different bytes."""
        return differing(self.sources, self.destinations, self.nbytes)

    def back(self) -> Moves:
        return Moves(self.destinations, self.sources, self.nbytes)
