"""Turns repeated timings into ratios that a busy machine cannot fool: interleaved pairs, medians, quartiles.

It measures nothing itself and judges nothing: whether a ratio is good enough, its question says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

#: Fewer pairs say little on a shared machine.
PAIRS_MIN = 7


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeated measurements of one thing: median and quartiles, in its unit."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """One answer. `bound` is what was hoped for ("at least 0.95"); `value` is a median, `low` and `high` quartiles."""

    name: str
    value: float
    low: float
    high: float
    count: int
    bound: str = ""
    holds: bool | None = None


def interleave(
    functions: Mapping[str, Callable[[], float]], pairs: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Run every function once per pair, first to last and last to first in turns; what each returned, by pair.

    `tell` hears what runs next, for whoever waits.
    """
    measured: dict[str, list[float]] = {name: [] for name in functions}
    for pair in range(pairs):
        order = list(functions) if pair % 2 == 0 else list(reversed(list(functions)))
        for name in order:
            tell(f"pair {pair + 1} of {pairs}: {name}")
            measured[name].append(functions[name]())
    return measured


def sample(values: Sequence[float]) -> Sample:
    """Median and quartiles of at least one value."""
    if len(values) == 1:
        return Sample(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Sample(median, low, high, len(values))


def ratio(
    name: str,
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Ratio:
    """The median of the ratios of each pair: what slowed both of a pair cancels out."""
    found = sample([above / below for above, below in zip(numerators, denominators, strict=True)])
    return figure(name, found, at_least=at_least, at_most=at_most)


def figure(name: str, found: Sample, *, at_least: float | None = None, at_most: float | None = None) -> Ratio:
    """A sample held against its bound."""
    bound, holds = "", None
    if at_least is not None:
        bound, holds = f"at least {at_least:g}", found.median >= at_least
    if at_most is not None:
        bound, holds = f"at most {at_most:g}", found.median <= at_most
    return Ratio(name, found.median, found.low, found.high, found.count, bound, holds)
