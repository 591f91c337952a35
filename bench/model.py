"""A closed form for T(N): how long until N readers hold a shard that they all asked for before it was published.

Pure arithmetic; docs/model.md derives it. What varies from machine to machine is fitted on N = 1 alone, the rest are
constants of the code: that is why a prediction for N > 1 can be wrong, and is printed beside what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Constants:
    """What the code decides."""

    #: Bytes a reader passes on at once at the least: watermarks count whole chunks.
    chunk_bytes: int
    #: A batch takes about this long, and the watermark rises by batches.
    batch_s: float
    #: Between two looks at a watermark, while bytes are in flight.
    poll_s: float
    #: Readers that a source has at once, at most.
    readers_per_source: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """What one reader alone shows."""

    #: Bytes per second of payload that one pull gets out of the link.
    bytes_per_s: float
    #: All of a replicate but the transfer: transaction, plan, registration, the last look, installation.
    around_s: float
    #: One look at a source's progress block.
    look_s: float

    @classmethod
    def of(cls, shard_bytes: int, seconds: Sequence[float], transfer_s: Sequence[float], look_s: float) -> Fitted:
        """From repeated pulls by one reader: whole times, the transfers among them, and a look's."""
        whole, transfer = median(seconds), median(transfer_s)
        return cls(shard_bytes / transfer, max(whole - transfer, 0.0), look_s)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a distribution graph: hops from the first source to the last reader, readers of its busiest source."""

    depth: int
    fan_out: int

    @classmethod
    def of(cls, readers: int, readers_per_source: int) -> Shape:
        """Of a crowd that is placed as its sources fill up, level by level."""
        if readers < 1 or readers_per_source < 1:
            raise ValueError(f"{readers} readers at {readers_per_source} per source make no graph")
        depth, placed, level = 0, 0, 1
        while placed < readers:
            level *= readers_per_source
            placed += level
            depth += 1
        return cls(depth, min(readers, readers_per_source))


def hop_s(constants: Constants, fitted: Fitted) -> float:
    """How much later a reader has a byte than its source has: a batch must be whole, and must be noticed."""
    batch = max(constants.batch_s, constants.chunk_bytes / fitted.bytes_per_s)
    return batch + constants.poll_s / 2 + fitted.look_s


def predict(constants: Constants, fitted: Fitted, shard_bytes: int, readers: int) -> float:
    """Seconds until the last of `readers` has everything.

    The busiest source sends the shard `fan_out` times over one link; every further hop adds its delay.
    """
    shape = Shape.of(readers, constants.readers_per_source)
    transfer = shard_bytes * shape.fan_out / fitted.bytes_per_s
    return fitted.around_s + transfer + (shape.depth - 1) * hop_s(constants, fitted)


def error(predicted: float, measured: float) -> float:
    """Relative, of what was measured."""
    return abs(predicted - measured) / measured
