"""How an input becomes another: a few edits of valid bytes, of the kinds that find mistakes in parsers.

It decides what an edit is; which edits are tried, chance or hypothesis says. The same edits give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Bytes that mean something to some format: lengths, types, ends, signs.
_LOADED = bytes.fromhex("0001027f80819091a0c0c1c4c6c7dcddde") + b"\xdf\xfe\xff"
#: Numbers around which counts and sums go wrong.
_NUMBERS = [0, 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
KINDS = 9


@dataclass(frozen=True, slots=True)
class Edit:
    """One change at `position`, which counts round the input's end; what `value` means follows from `kind`."""

    kind: int
    position: int
    value: int


def random_edits(source: random.Random, most: int = 6) -> list[Edit]:
    """Any edits; few, more often than many."""
    count = 1 + min(source.randrange(most), source.randrange(most))
    return [Edit(source.randrange(KINDS), source.randrange(1 << 16), source.randrange(1 << 16)) for _ in range(count)]


def edited(data: bytes, edits: Sequence[Edit], others: Sequence[bytes] = ()) -> bytes:
    """The input with each edit made, in order; `others` are inputs from which pieces may come."""
    for edit in edits:
        data = _edited(data, edit, others)
    return data


def _edited(data: bytes, edit: Edit, others: Sequence[bytes]) -> bytes:
    at, value = edit.position % (len(data) + 1), edit.value
    head, tail = data[:at], data[at:]
    match edit.kind:
        case 0:
            return head + bytes([value % 256]) + tail[1:]
        case 1:
            return head + _LOADED[value % len(_LOADED)].to_bytes() + tail[1:]
        case 2:
            return head + bytes([tail[0] ^ (1 << value % 8)]) + tail[1:] if tail else data
        case 3:
            return head  # cut off
        case 4:
            return head + tail[1 + value % 16 :]
        case 5:
            return head + tail[: 1 + value % 64] * (1 + value % 4) + tail
        case 6:
            width = (2, 4, 8)[value % 3]
            number = _NUMBERS[(value >> 2) % len(_NUMBERS)] % (1 << 8 * width)
            return head + number.to_bytes(width, "little" if value & 0x4000 else "big") + tail[width:]
        case 7:
            return head + bytes([value % 256]) * (1 + value // 256) + tail
        case _:
            other = others[value % len(others)] if others else b""
            return head + other[value % (len(other) + 1) :]
