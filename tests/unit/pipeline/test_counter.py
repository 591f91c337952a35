"""Batches and the watermark of one pull."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.errors import Broken
from tensorhub.pipeline.counter import Counter

ENDS = np.array([100, 150, 300, 400, 1000], dtype=np.uint64)


def test_batches_fill_up_to_their_target() -> None:
    """As many chunks as fit, at least one however large, never past the source's watermark."""
    counter = Counter(ENDS)
    assert counter.take(0, 1000) is None
    assert counter.take(5, 1) == (0, 1)
    assert counter.take(5, 200) == (1, 3)
    assert counter.take(4, 10_000) == (3, 4)
    assert counter.take(4, 10_000) is None
    assert counter.take(5, 10_000) == (4, 5)
    assert counter.in_flight == 4


def test_a_batch_never_exceeds_its_target_by_a_byte() -> None:
    """The first batch, like any other, is of chunks that fit, to the byte."""
    assert Counter(ENDS).take(5, 149) == (0, 1)
    assert Counter(ENDS).take(5, 150) == (0, 2)


def test_what_one_batch_could_get_is_known_before() -> None:
    """Bytes of the lowest chunks in a row that nobody reads and the source has."""
    counter = Counter(ENDS, [(0, 2), (3, 5)])
    assert [counter.ready_bytes(watermark) for watermark in range(6)] == [0, 100, 150, 150, 150, 150]
    assert counter.take(5, 150) == (0, 2)
    assert [counter.ready_bytes(watermark) for watermark in (2, 3, 4, 5)] == [0, 0, 100, 700]
    assert counter.take(5, 1000) == (3, 5)
    assert counter.ready_bytes(5) == 0


def test_the_watermark_is_the_verified_prefix() -> None:
    """Batches complete in any order; only an unbroken prefix counts, and bytes count as they come."""
    counter = Counter(ENDS)
    a, b, c = (counter.take(5, 150), counter.take(5, 150), counter.take(5, 100))
    assert (a, b, c) == ((0, 2), (2, 3), (3, 4))
    assert (counter.verified((3, 4)), counter.bytes_done) == (0, 100)
    assert (counter.verified((0, 2)), counter.bytes_done) == (2, 250)
    assert (counter.verified((2, 3)), counter.bytes_done) == (4, 400)
    assert not counter.is_complete
    assert counter.take(5, 1) == (4, 5)
    assert counter.verified((4, 5)) == 5
    assert counter.is_complete


def test_a_failed_batch_is_taken_again_first() -> None:
    """What failed comes before what was never read, and may be cut anew for another source."""
    counter = Counter(ENDS)
    assert counter.take(5, 300) == (0, 3)
    counter.failed((0, 3))
    assert counter.take(2, 1000) == (0, 2)
    assert counter.take(2, 1000) is None
    assert counter.take(5, 1000) == (2, 3)
    assert counter.take(5, 1000) == (3, 5)


def test_an_empty_version_is_complete_at_once() -> None:
    """empty_rank: no chunks, nothing to take, complete."""
    counter = Counter(np.zeros(0, dtype=np.uint64))
    assert counter.is_complete
    assert counter.watermark == 0
    assert counter.take(0, 1) is None


def test_a_subset_reads_only_wanted_chunks() -> None:
    """subset_selection_exact: chunks nobody wants are never taken and do not hold the watermark back."""
    counter = Counter(ENDS, [(1, 2), (4, 5)])
    assert counter.watermark == 1
    assert counter.take(5, 10_000) == (1, 2)
    assert counter.take(5, 10_000) == (4, 5)
    assert counter.verified((1, 2)) == 4
    assert counter.verified((4, 5)) == 5
    assert (counter.is_complete, counter.bytes_done) == (True, 650)


def test_settling_what_is_not_in_flight_is_our_fault() -> None:
    """A batch is verified or failed once; spans that make no sense are refused."""
    counter = Counter(ENDS)
    counter.take(5, 100)
    counter.verified((0, 1))
    for settle in (counter.verified, counter.failed):
        with pytest.raises(Broken, match="not in flight"):
            settle((0, 1))
    for wanted in ([(1, 1)], [(2, 3), (0, 1)], [(0, 2), (1, 3)], [(4, 6)], [(-1, 1)]):
        with pytest.raises(Broken, match="ascending spans"):
            Counter(ENDS, wanted)


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 50), max_size=20))
def test_every_chunk_is_verified_once_and_the_watermark_only_rises(data: st.DataObject, sizes: list[int]) -> None:
    """Whatever the order, sizes, failures and source: each chunk is verified exactly once, and the watermark is what a
    set of verified chunks says it is."""
    ends = np.cumsum(sizes).astype(np.uint64)
    counter = Counter(ends)
    done: set[int] = set()
    flying: list[tuple[int, int]] = []
    before = 0
    failures = 5
    while not counter.is_complete:
        have = data.draw(st.integers(0, len(sizes))) if not done.issuperset(range(len(sizes) - 1)) else len(sizes)
        batch = counter.take(have, data.draw(st.integers(0, 120)))
        if batch is not None:
            assert batch[1] <= have
            assert not done.intersection(range(*batch))
            flying.append(batch)
        if flying and (batch is None or data.draw(st.booleans())):
            batch = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
            if failures and data.draw(st.booleans()):
                failures -= 1
                counter.failed(batch)
            else:
                counter.verified(batch)
                done.update(range(*batch))
        prefix = next((i for i in range(len(sizes)) if i not in done), len(sizes))
        assert counter.watermark == prefix >= before
        before = prefix
    assert counter.bytes_done == sum(sizes)
    assert done == set(range(len(sizes)))


def test_narrowing_counts_all_but_what_is_left() -> None:
    """What an engine has done by itself, in any order: bytes, prefix and spans are those of the rest."""
    counter = Counter(ENDS)
    left = np.array([1, 2, 4], dtype=np.uint64)
    assert counter.narrow(left) == 1
    assert (counter.bytes_done, counter.todo) == (200, [(1, 3), (4, 5)])
    assert counter.narrow(left) == 1
    assert counter.bytes_done == 200
    assert counter.narrow(left[:0]) == 5
    assert (counter.bytes_done, counter.is_complete) == (1000, True)
    assert counter.narrow(left[:0]) == 5


def test_narrowing_to_what_was_not_to_do_is_our_fault() -> None:
    """A chunk is verified once; one that is in flight belongs to its batch. What is refused changes nothing."""
    counter = Counter(ENDS, [(0, 2), (3, 5)])
    for left in ([2], [0, 1, 2, 3, 4], [5], [0, 2**63]):
        with pytest.raises(Broken, match="are to do, after"):
            counter.narrow(np.array(left, dtype=np.uint64))
        assert (counter.todo, counter.bytes_done, counter.watermark) == ([(0, 2), (3, 5)], 0, 0)
    counter.narrow(np.array([1, 3, 4], dtype=np.uint64))
    with pytest.raises(Broken, match="are to do, after"):
        counter.narrow(np.array([0], dtype=np.uint64))
    counter.take(5, 1)
    with pytest.raises(Broken, match="in flight"):
        counter.narrow(np.array([3], dtype=np.uint64))
    assert counter.todo == [(3, 5)]


@pytest.mark.slow
@settings(deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_narrowing_is_verifying_chunk_by_chunk(data: st.DataObject, sizes: list[int]) -> None:
    """Two counters, one told of sets, one of batches of one chunk each: they agree in everything, after every step."""
    ends = np.cumsum(sizes).astype(np.uint64)
    wanted = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    at_once, one_by_one = (Counter(ends, [(chunk, chunk + 1) for chunk in wanted]) for _ in range(2))
    left = list(wanted)
    while left:
        kept = data.draw(st.sets(st.sampled_from(left)))
        done, left = set(left) - kept, sorted(kept)
        taken = []
        while (batch := one_by_one.take(len(sizes), 1)) is not None:
            taken.append(batch)
        for batch in taken:
            (one_by_one.verified if batch[0] in done else one_by_one.failed)(batch)
        assert at_once.narrow(np.array(left, dtype=np.uint64)) == one_by_one.watermark
        assert at_once.bytes_done == one_by_one.bytes_done == sum(sizes[chunk] for chunk in wanted if chunk not in left)
        assert at_once.is_complete == one_by_one.is_complete
        assert [c for span in at_once.todo for c in range(*span)] == left
