"""The digest in tensor operations equals the host's, bit for bit: what adds and multiplies can compute it."""

from __future__ import annotations

import pytest
import torch
import xxhash

from tensorhub.errors import BadRequest
from tensorhub.pipeline import device_digest
from tensorhub.pipeline.device_digest import digest_rows

KIB = 1024
LENGTHS = [
    *(241, 255, 256, 257, 319, 320, 321, 1023, 1024, 1025, 1087, 1088, 1089),
    *(k * KIB + d for k in (2, 3, 16) for d in (-1, 0, 1, 63, 64, 65)),
    *(64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 64 * KIB + 63),
]


def host(rows: torch.Tensor) -> list[int]:
    return [xxhash.xxh3_64_intdigest(bytes(row.tolist())) for row in rows]


def device(rows: torch.Tensor) -> list[int]:
    return [value & 2**64 - 1 for value in digest_rows(rows).tolist()]


def noise(chunks: int, nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (chunks, nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))


@pytest.mark.parametrize("nbytes", LENGTHS)
def test_bit_for_bit_at_every_boundary(nbytes):
    """slice_boundary: around the short path's end, stripes, blocks and chunks, several chunks at once."""
    rows = noise(3, nbytes)
    assert device(rows) == host(rows)


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_extreme_words_wrap_as_on_the_host(fill):
    """Signed tensor words at their extremes wrap exactly as unsigned ones."""
    rows = torch.full((2, 5 * KIB + 17), fill, dtype=torch.uint8)
    assert device(rows) == host(rows)


@pytest.mark.parametrize("shift", range(1, 9))
def test_unaligned_and_strided_rows(shift):
    """noncontig_src: rows that start at any byte of a larger buffer, as large tensors do in an unpadded stream."""
    rows = noise(3, 4 * KIB + 9)[:, shift : shift + 3 * KIB + 1]
    assert device(rows) == host(rows)


def test_slabs_do_not_show(monkeypatch):
    """chunk_size_invariance: scratch of one block at a time gives the same digests as all blocks at once."""
    rows = noise(3, 7 * KIB + 5)
    monkeypatch.setattr(device_digest, "SLAB_BYTES", 1)
    assert device(rows) == host(rows)


def test_no_rows_have_no_digests():
    """Nothing to digest is an empty answer."""
    assert digest_rows(torch.zeros((0, KIB), dtype=torch.uint8)).tolist() == []


@pytest.mark.parametrize(
    "rows", [torch.zeros((1, 240), dtype=torch.uint8), torch.zeros((1, 512)), torch.zeros(512, dtype=torch.uint8)]
)
def test_what_belongs_to_the_host_is_refused(rows):
    """Short inputs take other paths of XXH3, computed on the host; other dtypes and shapes are mistakes."""
    with pytest.raises(BadRequest, match="more than 240"):
        digest_rows(rows)
