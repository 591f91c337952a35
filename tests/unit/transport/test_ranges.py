"""Batches are cut without losing a byte; registered ranges count, overlap and cover as a plain set of bytes would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.errors import BadRequest, NotRegistered
from tensorhub.ports import Ranges
from tensorhub.transport.ranges import RegisteredRanges, check_ranges, slices


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def bytes_of(ranges: Ranges) -> list[tuple[int, int]]:
    """Every byte of a batch as (remote, local), in order."""
    rows = zip(ranges.remote.tolist(), ranges.local.tolist(), ranges.nbytes.tolist(), strict=True)
    return [(remote + i, local + i) for remote, local, nbytes in rows for i in range(nbytes)]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 2**63), st.integers(1, 2**63), st.integers(1, 9)), min_size=1), st.integers(1, 12)
)
def test_slices_are_the_same_bytes_in_the_same_order(rows, nbytes_max):
    """slice_boundary: any batch, any limit: all slices full but the last, every byte once, in order, none empty."""
    ranges = Ranges(*(u64(*column) for column in zip(*rows, strict=True)))
    pieces = list(slices(ranges, nbytes_max))
    assert [byte for piece in pieces for byte in bytes_of(piece)] == bytes_of(ranges)
    assert all(piece.total_bytes == nbytes_max for piece in pieces[:-1])
    for piece in pieces:
        check_ranges(piece)


@pytest.mark.parametrize(
    ("remote", "local", "nbytes", "says"),
    [
        (u64(), u64(), u64(), "no ranges"),
        (u64(1, 9), u64(1, 9), u64(8, 0), "range 1 of a read is empty"),
        (u64(1), u64(1, 9), u64(8), "differ in length"),
        (u64(1).astype(np.int64), u64(1), u64(8), "uint64 vectors"),
        (u64(1, 2, 3, 4)[::2], u64(1, 2), u64(8, 8), "contiguous"),
    ],
)
def test_malformed_batches_are_refused(remote, local, nbytes, says):
    """zero_size_not_registered: an empty range, an empty batch, vectors that do not belong together."""
    with pytest.raises(BadRequest, match=says):
        check_ranges(Ranges(remote, local, nbytes))


small = st.tuples(st.integers(1, 60), st.integers(1, 20))


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), small), max_size=30), st.lists(small, min_size=1, max_size=10))
def test_coverage_equals_a_naive_twin(changes, questions):
    """register_twice, overlapping_views: a byte is covered as long as one registration that has it is left."""
    registered, twin = RegisteredRanges(), []
    for adds, (address, nbytes) in changes:
        if adds:
            registered.add(address, nbytes)
            twin.append((address, nbytes))
        elif (address, nbytes) in twin:
            registered.remove(address, nbytes)
            twin.remove((address, nbytes))
        else:
            with pytest.raises(NotRegistered, match="not registered"):
                registered.remove(address, nbytes)
        covered = {byte for address, nbytes in twin for byte in range(address, address + nbytes)}
        missing = [i for i, (a, n) in enumerate(questions) if not covered.issuperset(range(a, a + n))]
        addresses, sizes = (u64(*column) for column in zip(*questions, strict=True))
        assert registered.first_uncovered(addresses, sizes) == (missing[0] if missing else None)
    assert len(registered) == len(set(twin))


def test_what_is_no_memory_is_not_registered():
    """zero_size_not_registered: nothing, a null address and a range past the address space are refused."""
    registered = RegisteredRanges()
    for address, nbytes in [(4096, 0), (0, 8), (2**64 - 4, 8), (4096, -1)]:
        with pytest.raises(BadRequest, match="not a range of memory"):
            registered.add(address, nbytes)
    assert len(registered) == 0


def test_a_range_that_wraps_around_is_not_covered():
    """A peer that asks for more than the address space holds gets nothing."""
    registered = RegisteredRanges()
    registered.add(4096, 2**63)
    assert registered.first_uncovered(u64(5000), u64(2**64 - 100)) == 0
    registered.clear()
    assert registered.first_uncovered(u64(5000), u64(1)) == 0
