"""Copies and digests of this process's memory do what their docstrings promise, and refuse what they cannot do."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from tensorhub import native
from tensorhub.errors import BadRequest
from tensorhub.native.memory import SCRATCH_BYTES_MAX


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 16, 17, 240, 241, 1024, 1025, 65536, 65599])
def test_digest_is_xxh3(nbytes):
    """The digest equals the xxhash package's, on every code path of XXH3."""
    data = noise(nbytes)
    assert native.digest(data.ctypes.data, nbytes) == xxhash.xxh3_64_intdigest(data.tobytes())


def test_digest_runs_gathers_chunks_of_several_runs():
    """A chunk's digest depends on its bytes alone, not on how many runs hold them."""
    data = noise(5000)
    at = data.ctypes.data
    out = np.zeros(3, dtype=np.uint64)
    runs = [(3000, 700), (0, 100), (100, 1), (4000, 999), (2000, 300), (1000, 5)]
    addresses = u64(*(at + start for start, _ in runs))
    native.digest_runs(addresses, u64(*(n for _, n in runs)), u64(0, 1, 4, 6), out)
    pieces = [data[start : start + n].tobytes() for start, n in runs]
    expected = [pieces[0], b"".join(pieces[1:4]), b"".join(pieces[4:])]
    assert out.tolist() == [xxhash.xxh3_64_intdigest(chunk) for chunk in expected]


@pytest.mark.parametrize("firsts", [(0, 1), (1, 2), (0, 2, 2), (0, 0, 2)])
def test_digest_runs_refuses_chunks_that_do_not_tile_the_runs(firsts):
    """A run that no chunk has, and a chunk without runs, are refused before anything is read."""
    data = noise(16)
    at = data.ctypes.data
    out = np.zeros(len(firsts) - 1, dtype=np.uint64)
    with pytest.raises(BadRequest, match="firsts"):
        native.digest_runs(u64(at, at + 8), u64(8, 8), u64(*firsts), out)


def test_digest_runs_bounds_its_scratch():
    """A chunk of several runs above the largest chunk is refused, not gathered into ever more memory."""
    half = SCRATCH_BYTES_MAX // 2
    data = noise(16)
    at = data.ctypes.data
    with pytest.raises(BadRequest, match="larger than"):
        native.digest_runs(u64(at, at), u64(half, half + 1), u64(0, 2), np.zeros(1, dtype=np.uint64))


def test_gather_then_scatter_is_the_identity_100k_tiny_tensors():
    """100k_tiny_tensors: 100 000 ranges of 64 bytes go into one buffer and back, in two calls."""
    n = 100_000
    source, staged = noise(n * 64), np.zeros(n * 64, dtype=np.uint8)
    returned = np.zeros(n * 64, dtype=np.uint8)
    order = np.random.default_rng(1).permutation(n).astype(np.uint64) * np.uint64(64)
    nbytes = np.full(n, 64, dtype=np.uint64)
    offsets = np.arange(n, dtype=np.uint64) * np.uint64(64)
    native.gather(order + np.uint64(source.ctypes.data), nbytes, offsets, staged.ctypes.data)
    assert (staged.reshape(n, 64) == source.reshape(n, 64)[order // np.uint64(64)]).all()
    native.scatter(staged.ctypes.data, offsets, order + np.uint64(returned.ctypes.data), nbytes)
    assert (returned == source).all()


def test_copy_and_store_write_exactly_their_bytes():
    """Not a byte before or after the destination changes; an overlapping copy is a move."""
    target = np.zeros(32, dtype=np.uint8)
    native.store(target.ctypes.data + 8, b"12345678")
    assert target.tobytes() == bytes(8) + b"12345678" + bytes(16)
    native.copy(target.ctypes.data + 10, target.ctypes.data + 8, 8)
    assert target.tobytes() == bytes(8) + b"1212345678" + bytes(14)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (np.zeros(4, dtype=np.int64), "uint64 vector"),
        (np.zeros((2, 2), dtype=np.uint64), "uint64 vector"),
        (np.zeros(8, dtype=np.uint64)[::2], "contiguous"),
        (np.zeros(33, dtype=np.uint8)[1:].view(np.uint64), "aligned"),
        (np.zeros(3, dtype=np.uint64), "3 elements"),
        ([1, 2, 3, 4], "uint64 vector"),
    ],
)
def test_arrays_are_checked_before_their_addresses_are_used(bad, says):
    """A wrong dtype, shape, stride, alignment or length is a named error, never a wild read."""
    good = np.zeros(4, dtype=np.uint64)
    with pytest.raises(BadRequest, match=says):
        native.copy_ranges(bad, good, good)


def test_a_read_only_output_is_refused():
    """C never writes through an array that Python promised not to change."""
    data, out = noise(8), np.zeros(1, dtype=np.uint64)
    out.flags.writeable = False
    with pytest.raises(BadRequest, match="read-only"):
        native.digest_runs(u64(data.ctypes.data), u64(8), u64(0, 1), out)


def test_store_takes_bytes_only():
    """A header is an immutable value: a buffer that may change while it is copied is refused."""
    with pytest.raises(BadRequest, match="bytearray"):
        native.store(1, bytearray(8))


def test_digest_runs_tells_how_far_it_is_and_ends_when_told():
    """The count of chunks in place rises to all of them; with the second word set, nothing more is read or written."""
    data = np.arange(64, dtype=np.uint8)
    addresses, sizes = u64(*(data.ctypes.data + 8 * i for i in range(8))), u64(*[8] * 8)
    firsts, out, progress = np.arange(9, dtype=np.uint64), np.zeros(8, dtype=np.uint64), np.zeros(2, dtype=np.uint64)
    native.digest_runs(addresses, sizes, firsts, out, progress)
    assert progress.tolist() == [8, 0]
    assert out.all()
    before, progress[:] = out.copy(), (0, 1)
    out[:] = 7
    native.digest_runs(addresses, sizes, firsts, out, progress)
    assert progress.tolist() == [0, 1]
    assert (out == 7).all()
    assert before.any()
    with pytest.raises(BadRequest, match="progress has 2 words"):
        native.digest_runs(addresses, sizes, firsts, out, np.zeros(3, dtype=np.uint64))
