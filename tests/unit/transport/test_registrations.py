"""A library never sees a range twice, an overlap, or nothing; and it sees every registered byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.errors import BadRequest, EngineUnavailable, NotRegistered
from tensorhub.transport.registrations import Registrations


class Strict:
    """A library that takes no second, overlapping or empty registration, and gives back only what it has."""

    def __init__(self) -> None:
        self.regions: dict[int, int] = {}
        self.refused: set[tuple[int, int]] = set()

    def give(self, address: int, nbytes: int) -> None:
        assert nbytes > 0
        assert not any(address < start + size and start < address + nbytes for start, size in self.regions.items())
        if (address, nbytes) in self.refused:
            raise EngineUnavailable("refused")
        self.regions[address] = nbytes

    def take_back(self, address: int) -> None:
        del self.regions[address]


def fresh() -> tuple[Strict, Registrations]:
    library = Strict()
    return library, Registrations(library.give, library.take_back)


def components(ranges: list[tuple[int, int]], grain: int) -> dict[int, int]:
    """{start: nbytes} of the regions, the naive way: colour every grain that a range is in, join neighbours."""
    coloured = {at for start, size in ranges for at in range(start // grain, (start + size - 1) // grain + 1)}
    regions: dict[int, int] = {}
    for first in sorted(at for at in coloured if at - 1 not in coloured):
        last = next(at for at in itertools.count(first) if at + 1 not in coloured)
        inside = [(start, start + size) for start, size in ranges if first <= start // grain <= last]
        begin = min(start for start, _ in inside)
        regions[begin] = max(end for _, end in inside) - begin
    return regions


@pytest.mark.parametrize("grain", [1, 8])
@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60), st.integers(1, 12)), max_size=25))
def test_the_library_holds_the_regions_that_a_read_may_span(grain, steps):
    """register_twice, overlapping_views: whatever overlaps, touches, repeats or ends, no registration does."""
    library = Strict()
    registered = Registrations(library.give, library.take_back, grain)
    model: list[tuple[int, int]] = []
    for is_added, address, nbytes in steps:
        if is_added:
            registered.add(address, nbytes)
            model.append((address, nbytes))
        elif (address, nbytes) in model:
            registered.remove(address, nbytes)
            model.remove((address, nbytes))
        else:
            with pytest.raises(NotRegistered):
                registered.remove(address, nbytes)
        assert library.regions == components(model, grain)
        assert all(registered.covers(start, size) for start, size in model)
        assert sorted(library.regions.items()) == registered.regions()
    registered.clear()
    assert not library.regions


def test_a_refused_registration_leaves_everything_as_it_was():
    """register_failure_is_fatal: a range that joins two regions and is refused undoes what it took back."""
    library, registered = fresh()
    registered.add(100, 10)
    registered.add(120, 10)
    library.refused = {(100, 30)}
    with pytest.raises(EngineUnavailable):
        registered.add(105, 20)
    assert library.regions == {100: 10, 120: 10}
    assert registered.regions() == [(100, 10), (120, 10)]
    with pytest.raises(NotRegistered):
        registered.remove(105, 20)


def test_a_region_that_a_library_does_not_take_again_is_not_claimed():
    """register_failure_is_fatal: what is lost in a failed exchange is known to be lost, and ends without an error."""
    library, registered = fresh()
    registered.add(100, 10)
    library.refused = {(100, 20), (100, 10)}
    with pytest.raises(EngineUnavailable):
        registered.add(105, 15)
    assert not library.regions
    assert not registered.covers(100, 10)
    registered.remove(100, 10)
    assert registered.regions() == []


def test_nothing_and_no_memory_are_refused():
    """zero_size_not_registered: size 0 never reaches the library, nor does address 0."""
    library, registered = fresh()
    for address, nbytes in ((4096, 0), (0, 8), (4096, -1), (2**64 - 4, 8)):
        with pytest.raises(BadRequest):
            registered.add(address, nbytes)
    assert not library.regions


@pytest.mark.parametrize("step", [1, -1], ids=["rising", "falling"])
def test_neighbours_in_a_row_become_one_region(step):
    """100k_tiny_tensors: ranges that touch share a region, so that one read may span them, at a cost near the last."""
    _, registered = fresh()
    for place in range(0, 64 * 2000, 64)[::step]:
        registered.add(4096 + place, 64)
    assert registered.regions() == [(4096, 64 * 2000)]
