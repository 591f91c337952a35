"""XXH3-64 of many equally long chunks in plain tensor operations, on any device: the oracle for device kernels.

Decides nothing; equals the host's digest bit for bit (docs/digest.md). Within a block of 1024 bytes the 16 stripes
and 8 lanes add up in any order; only the scramble between blocks is sequential, and chunks are independent.

Shape suffixes: C chunks, B blocks, S stripes (16 a block), L lanes (8 a stripe).
"""

# ruff: noqa: N803, N806  (shape suffixes are capitals)

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tensorhub.errors import BadRequest

if TYPE_CHECKING:
    from torch import Tensor, device

#: Up to here XXH3 takes other, scalar paths: such inputs are digested on the host.
SHORT_BYTES_MAX = 240
STRIPE_BYTES = 64
STRIPES_PER_BLOCK = 16
BLOCK_BYTES = STRIPE_BYTES * STRIPES_PER_BLOCK
#: Stripes are widened to products slab by slab, so that scratch memory stays a small multiple of this.
SLAB_BYTES = 32 << 20

#: XXH3's default secret (xxHash specification, section "XXH3 Algorithm Overview").
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SECRET_LAST_STRIPE = len(_SECRET) - STRIPE_BYTES - 7
_SECRET_SCRAMBLE = len(_SECRET) - STRIPE_BYTES
_SECRET_MERGE = 11

_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_PRIME_AVALANCHE = 0x165667919E3779F9
_LANES_AT_START = (
    _PRIME32_3,
    _PRIME64_1,
    _PRIME64_2,
    _PRIME64_3,
    _PRIME64_4,
    _PRIME32_2,
    _PRIME64_5,
    _PRIME32_1,
)
_MASK32 = 0xFFFFFFFF


def digest_rows(data: Tensor) -> Tensor:
    """XXH3-64 (seed 0) of each row of a uint8 matrix (C, nbytes), more than 240 bytes each: int64 (C,), wrapped."""
    import torch

    if data.dtype != torch.uint8 or data.ndim != 2 or data.shape[1] <= SHORT_BYTES_MAX:
        raise BadRequest(f"digest_rows takes uint8 rows of more than {SHORT_BYTES_MAX} bytes, not {tuple(data.shape)}")
    length = data.shape[1]
    blocks, rest = divmod(length - 1, BLOCK_BYTES)
    acc_CL = _secret((_int64(value) for value in _LANES_AT_START), data)[None].repeat(len(data), 1)
    scramble_L = _secret(_secret_words(_SECRET_SCRAMBLE, 8), data)
    slab = max(1, SLAB_BYTES // (BLOCK_BYTES * max(1, len(data))))
    for first in range(0, blocks, slab):
        last = min(blocks, first + slab)
        sums_CBL = _block_sums(data[:, first * BLOCK_BYTES : last * BLOCK_BYTES])
        for block in range(last - first):
            acc_CL = _scramble(acc_CL + sums_CBL[:, block], scramble_L)
    stripes = rest // STRIPE_BYTES
    if stripes:
        tail = data[:, blocks * BLOCK_BYTES : blocks * BLOCK_BYTES + stripes * STRIPE_BYTES]
        acc_CL = acc_CL + _stripe_sums(_words(tail)[:, None], _stripe_secret(stripes, data))[:, 0]
    last_L = _secret(_secret_words(_SECRET_LAST_STRIPE, 8), data)
    acc_CL = acc_CL + _stripe_sums(_words(data[:, length - STRIPE_BYTES :])[:, None], last_L[None])[:, 0]
    return _merge(acc_CL, length)


def _block_sums(data: Tensor) -> Tensor:
    """What each whole block adds to the lanes, (C, B, L): a sum over its stripes, in any order."""
    words_CSL = _words(data)
    words_CBSL = words_CSL.reshape(len(data), words_CSL.shape[1] // STRIPES_PER_BLOCK, STRIPES_PER_BLOCK, 8)
    return _stripe_sums(words_CBSL, _stripe_secret(STRIPES_PER_BLOCK, data))


def _stripe_sums(words_CBSL: Tensor, secret_SL: Tensor) -> Tensor:
    keyed_CBSL = words_CBSL ^ secret_SL
    products_CBSL = (keyed_CBSL & _MASK32) * _shift_right(keyed_CBSL, 32)
    words_CBL = words_CBSL.sum(2)
    swapped_CBL = words_CBL.reshape(*words_CBL.shape[:2], 4, 2).flip(-1).reshape(words_CBL.shape)
    return products_CBSL.sum(2) + swapped_CBL


def _scramble(acc_CL: Tensor, secret_L: Tensor) -> Tensor:
    return (acc_CL ^ _shift_right(acc_CL, 47) ^ secret_L) * _PRIME32_1


def _merge(acc_CL: Tensor, length: int) -> Tensor:
    mixed_CL = acc_CL ^ _secret(_secret_words(_SECRET_MERGE, 8), acc_CL)
    folded = _multiply_fold(mixed_CL[:, 0::2], mixed_CL[:, 1::2])
    result = folded.sum(1) + _int64(length * _PRIME64_1)
    result = (result ^ _shift_right(result, 37)) * _int64(_PRIME_AVALANCHE)
    return result ^ _shift_right(result, 32)


def _multiply_fold(a: Tensor, b: Tensor) -> Tensor:
    """Upper and lower half of the 128-bit product, xored, from four 32 x 32 -> 64 products."""
    a_low, a_high, b_low, b_high = a & _MASK32, _shift_right(a, 32), b & _MASK32, _shift_right(b, 32)
    low, cross, other = a_low * b_low, a_high * b_low, a_low * b_high
    middle = _shift_right(low, 32) + (cross & _MASK32) + other
    upper = _shift_right(cross, 32) + _shift_right(middle, 32) + a_high * b_high
    return upper ^ ((middle << 32) | (low & _MASK32))


def _words(data: Tensor) -> Tensor:
    """Rows of whole stripes as little-endian words, (C, S, L); copied where rows are not 8-byte aligned."""
    import torch

    aligned = data.stride(1) == 1 and data.stride(0) % 8 == 0 and data.storage_offset() % 8 == 0
    if not aligned or data.data_ptr() % 8 != 0:
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(torch.int64).reshape(len(data), data.shape[1] // STRIPE_BYTES, 8)


def _stripe_secret(stripes: int, like: Tensor) -> Tensor:
    words = [word for stripe in range(stripes) for word in _secret_words(8 * stripe, 8)]
    return _secret(words, like).view(stripes, 8)


def _secret_words(offset: int, words: int) -> list[int]:
    return [_int64(int.from_bytes(_SECRET[at : at + 8], "little")) for at in range(offset, offset + 8 * words, 8)]


def _secret(words: Iterable[int], like: Tensor) -> Tensor:
    return _on_device(tuple(words), like.device)


@functools.lru_cache(maxsize=256)
def _on_device(words: tuple[int, ...], device: device) -> Tensor:
    """Constants, once per device: to bring them there waits for all that is queued before."""
    import torch

    return torch.tensor(words, dtype=torch.int64, device=device)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, where torch's own shift of int64 keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _int64(value: int) -> int:
    """The same 64 bits as a signed number."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
