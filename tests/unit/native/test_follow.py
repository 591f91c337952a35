"""What is refused before C follows a batch: everything that it would believe."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import BadRequest
from tensorhub.ports import TOLD_WORDS


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


#: Two chunks, each its digest and two runs.
NBYTES, FIRSTS = u64(3, 4, 8, 5, 6, 8), u64(0, 3, 6)


def good() -> native.Follow:
    told = np.zeros(TOLD_WORDS, dtype=np.uint64)
    return native.Follow(u64(4, 9), np.zeros(2, dtype=np.uint8), told, 10, 4096, 8192, bytes(16), 1, True)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_what_fits_is_taken() -> None:
    """With and without digests, with and without a block of its own; the last number may be the stream's last."""
    for changes in ({}, {"own_block": 0}, {"is_verified": False}, {"numbers": u64(0, 1)}):
        assert replace(good(), **changes).pack(NBYTES, FIRSTS) is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": bytes(15)}, "16 bytes, not 15"),
        ({"done": np.zeros(3, dtype=np.uint8)}, "uint8 vector of 2"),
        ({"done": np.zeros(2, dtype=np.uint64)}, "uint8 vector of 2"),
        ({"done": read_only(np.zeros(2, dtype=np.uint8))}, "writable uint8"),
        ({"numbers": u64(4)}, "has 1 elements"),
        ({"numbers": u64()}, "has 0 elements"),
        ({"numbers": np.array([4, 9])}, "uint64 vector"),
        ({"numbers": u64(4, 4)}, "must rise"),
        ({"numbers": u64(9, 4)}, "must rise"),
        ({"numbers": u64(2**63 + 1, 0)}, "must rise"),
        ({"numbers": u64(4, 10)}, "below 10"),
        ({"told": u64(0, 0)}, "3 words, not 2"),
        ({"told": read_only(u64(0, 0, 0))}, "read-only"),
        ({"own_block": 8193}, "not aligned"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    """Lengths, kinds, order and limits: C would read or write beside what it was given."""
    with pytest.raises(BadRequest, match=message):
        replace(good(), **changes).pack(NBYTES, FIRSTS)


@pytest.mark.parametrize("firsts", [None, u64(0), u64(0, 3, 5)], ids=["none", "empty", "ranges behind"])
def test_a_followed_batch_consists_of_chunks(firsts: np.ndarray | None) -> None:
    """Ranges that belong to no chunk have no mark: nobody could say when they may be read."""
    with pytest.raises(BadRequest, match="consists of chunks"):
        good().pack(NBYTES, firsts)


@pytest.mark.parametrize(
    ("nbytes", "firsts"),
    [(u64(3, 8, 5, 7), u64(0, 2, 4)), (u64(3, 8, 8), u64(0, 2, 3)), (u64(8, 3, 8), u64(0, 1, 3))],
    ids=["seven bytes", "no bytes before the last", "no bytes before the first"],
)
def test_a_verified_chunk_ends_with_its_digest(nbytes: np.ndarray, firsts: np.ndarray) -> None:
    """Else the digest of something else would be compared, or bytes beside the batch be read."""
    with pytest.raises(BadRequest, match="its digest, 8 bytes"):
        good().pack(nbytes, firsts)
    assert replace(good(), is_verified=False).pack(nbytes, firsts) is not None


def test_both_ways_of_reading_refuse_alike() -> None:
    """Nothing of a refused batch is kept."""
    at = np.arange(6, dtype=np.uint64)
    for begin in (lambda *rest: native.Reading(os.getpid(), *rest), native.StreamReading):
        with pytest.raises(BadRequest, match="must rise"):
            begin(at, at, NBYTES, 1, FIRSTS, None, replace(good(), numbers=u64(9, 4)))
        with pytest.raises(BadRequest, match="consists of chunks"):
            begin(at, at, NBYTES, 1, None, None, good())
