"""A plan as a course: which bytes in which order, which digests into which slots."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub.pipeline.course import lay
from tensorhub.pipeline.plan import Plan
from tensorhub.ports import Ranges
from tensorhub.types import Generation

GENERATION = Generation(bytes(range(16)))
BLOCK, OWN = 0x10000, 0x20000
#: Of five chunks, numbers 1, 2 and 4 are planned: in two runs, one and three.
PLAN = Plan(
    Ranges(*(np.arange(6, dtype=np.uint64) + np.uint64(start) for start in (1000, 2000, 10))),
    np.array([0, 0, 2, 3, 3, 6], dtype=np.uint64),
)


def slots() -> np.ndarray:
    return np.arange(100, 105, dtype=np.uint64)


def test_each_chunk_is_its_bytes_and_then_its_digest() -> None:
    """Digests come from the source's slots into ours of the same number, behind the chunk that they cover."""
    digests = slots()
    course = lay(PLAN, BLOCK, GENERATION, OWN, digests, verified=True)
    there, here = BLOCK + 128, digests.ctypes.data
    assert course.ranges.remote.tolist() == [
        *(1000, 1001, there + 8),
        *(1002, there + 16),
        *(1003, 1004, 1005, there + 32),
    ]
    assert course.ranges.local.tolist() == [
        *(2000, 2001, here + 8),
        *(2002, here + 16),
        *(2003, 2004, 2005, here + 32),
    ]
    assert course.ranges.nbytes.tolist() == [10, 11, 8, 12, 8, 13, 14, 15, 8]
    assert course.firsts.tolist() == [0, 3, 5, 9]
    assert course.numbers.tolist() == [1, 2, 4]
    assert (course.whole, course.is_verified, course.generation) == (5, True, GENERATION)
    assert (course.source_block, course.own_block) == (BLOCK, OWN)


def test_slots_of_what_is_to_be_read_hold_nothing_that_could_match() -> None:
    """transport_lies: an engine that brings nothing finds no digest of an earlier version; other slots stay."""
    digests = slots()
    lay(PLAN, BLOCK, GENERATION, OWN, digests, verified=True)
    assert digests.tolist() == [100, 0, 0, 103, 0]


def test_without_digests_the_plan_is_the_course() -> None:
    """Versions published without them: no slot is read or written."""
    digests = slots()
    course = lay(PLAN, BLOCK, GENERATION, 0, digests, verified=False)
    for ours, planned in zip(
        (course.ranges.remote, course.ranges.local, course.ranges.nbytes),
        (PLAN.reads.remote, PLAN.reads.local, PLAN.reads.nbytes),
        strict=True,
    ):
        assert ours.tolist() == planned.tolist()
    assert (course.firsts.tolist(), course.numbers.tolist()) == ([0, 2, 3, 6], [1, 2, 4])
    assert (course.is_verified, course.own_block, digests.tolist()) == (False, 0, slots().tolist())


@pytest.mark.parametrize("verified", [True, False])
def test_what_a_course_tells_begins_at_nothing(verified: bool) -> None:
    """Arrays of its own, as long as its chunks, which the engine fills."""
    one, other = (lay(PLAN, BLOCK, GENERATION, OWN, slots(), verified=verified) for _ in range(2))
    assert (one.done.dtype, one.done.tolist(), one.told.tolist()) == (np.uint8, [0] * 3, [0] * 3)
    assert not np.shares_memory(one.done, other.done)
    assert not np.shares_memory(one.told, other.told)
