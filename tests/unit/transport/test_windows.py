"""Requests cover every wanted byte exactly once, fit their slab, and are few where ranges lie close together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.ports import Ranges
from tensorhub.transport.windows import REQUESTS_MAX, apart, windows

SLAB = 1000
PAGE = 4096


def u64(values) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def landed(ranges: Ranges, memory: np.ndarray, grain: int, is_apart: bool) -> np.ndarray:
    """What a naive library brings: the source is `memory`, addresses are indices."""
    target = np.zeros(int((ranges.local + ranges.nbytes).max()) + 1, dtype=np.int64)
    through = 0
    for window in windows(ranges, SLAB, grain):
        slab = np.zeros(SLAB, dtype=np.int64)
        requests = [(window.remote, window.offsets, window.nbytes)]
        for remote, offsets, nbytes in apart(window) if is_apart else requests:
            assert len(remote) <= REQUESTS_MAX
            for start, offset, size in zip(remote, offsets, nbytes, strict=True):
                assert offset + size <= SLAB
                slab[offset : offset + size] = memory[start : start + size]
        for at, place, size in zip(window.at.tolist(), window.ranges.local, window.ranges.nbytes, strict=True):
            target[int(place) : int(place + size)] += slab[at : at + int(size)]
        assert window.through >= through
        through = window.through
    assert through == ranges.total_bytes
    return target


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 1500)), min_size=1, max_size=80),
    st.sampled_from([1, 64]),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_every_byte_lands_once_and_no_request_leaves_its_slab(pairs, grain, is_apart):
    """every_byte_written_once: whatever overlaps, touches or lies apart at the source, in any order."""
    memory = np.arange(1, 5001)
    remote, nbytes = u64([start for start, _ in pairs]), u64([size for _, size in pairs])
    local = np.cumsum(nbytes + np.uint64(1), dtype=np.uint64) - nbytes
    target = landed(Ranges(remote, local, nbytes), memory, grain, is_apart)
    expected = np.zeros_like(target)
    for start, place, size in zip(remote.tolist(), local.tolist(), nbytes.tolist(), strict=True):
        expected[place : place + size] = memory[start : start + size]
    assert (target == expected).all()


@pytest.mark.parametrize("stride", [64, 128, 512])
def test_tiny_tensors_of_an_allocator_share_requests(stride):
    """100k_tiny_tensors: ranges on neighbouring pages are asked for together, though not in order."""
    count = 20_000
    remote = u64(4096 + stride * np.arange(count)).reshape(-1, 4)[:, [2, 0, 3, 1]].ravel()
    batch = Ranges(remote, u64(64 * np.arange(count)), u64([64] * count))
    requests = sum(len(window.remote) for window in windows(batch, 1 << 20, PAGE))
    assert requests <= 2 + 3 * count * stride // (1 << 20)


def test_only_what_shares_a_region_is_asked_for_together():
    """The rule is that of `registrations.py`: neighbouring pages, or bytes that touch."""
    remote = u64([PAGE, 2 * PAGE + 4000, 4 * PAGE + 100, 4 * PAGE + 164])
    batch = Ranges(remote, u64([0, 64, 128, 192]), u64([64] * 4))
    (window,) = windows(batch, 1 << 20, PAGE)
    assert window.nbytes == [PAGE + 4064, 128]
    (window,) = windows(batch, 1 << 20, 1)
    assert window.nbytes == [64, 64, 128]


def test_a_window_has_few_requests():
    """A library queues so many requests per peer and refuses the rest: scattered ranges come in several windows."""
    count = 5 * REQUESTS_MAX + 1
    batch = Ranges(u64(1000 * np.arange(1, count + 1)), u64(8 * np.arange(count)), u64([8] * count))
    found = list(windows(batch, 1 << 20))
    assert [len(window.remote) for window in found] == [REQUESTS_MAX] * 5 + [1]
    assert [window.through for window in found] == [0] * 5 + [8 * count]
