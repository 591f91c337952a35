"""What turns a batch into one that is followed, as C takes it: checked here once, for every way of reading.

The arrays are the caller's; C writes to `done` and `told` while a read runs, and other threads may look at them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import BadRequest
from tensorhub.native.binding import address_of
from tensorhub.native.memory import writable
from tensorhub.ports import TOLD_WORDS

U64 = NDArray[np.uint64]

GENERATION_BYTES = 16
#: Equals BLOCK_WORD_BYTES in block.h.
BLOCK_WORD_BYTES = 8
DIGEST_BYTES = 8


class _Follow(ctypes.Structure):
    """Equals `struct follow` in batch.h."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("told", ctypes.c_void_p),
        ("whole", ctypes.c_uint64),
        ("source_block", ctypes.c_uint64),
        ("own_block", ctypes.c_uint64),
        ("generation", ctypes.c_uint8 * GENERATION_BYTES),
        ("stall_ns", ctypes.c_int64),
        ("is_verified", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Follow:
    """The chunks of a batch, chunk i being number `numbers[i]` of a stream of `whole`, read below a watermark.

    With `is_verified`, the last range of each chunk is its digest, 8 bytes. Chunks that are verified are marked in
    `done`, uint8, and shown as a prefix in the header at `own_block`, unless that is 0.
    """

    numbers: U64
    done: NDArray[np.uint8]
    #: As `ports.Course.told`.
    told: U64
    whole: int
    #: Addresses of the headers of two progress blocks: the source's, and our own or 0.
    source_block: int
    own_block: int
    #: Of the source, as granted.
    generation: bytes
    stall_ns: int
    is_verified: bool

    def pack(self, nbytes: U64, firsts: U64 | None) -> ctypes.Structure:
        """For C; whoever passes it on keeps it and this object alive. `BadRequest` unless it fits the chunks."""
        if firsts is None or len(firsts) < 2 or int(firsts[-1]) != len(nbytes):
            raise BadRequest("a batch that is followed consists of chunks, at least one, and of nothing behind them")
        chunks = len(firsts) - 1
        if len(self.generation) != GENERATION_BYTES:
            raise BadRequest(f"a generation has {GENERATION_BYTES} bytes, not {len(self.generation)}")
        if self.done.dtype != np.uint8 or self.done.shape != (chunks,) or not self.done.flags.writeable:
            raise BadRequest(f"done must be a writable uint8 vector of {chunks} elements")
        numbers, told = address_of("numbers", self.numbers, chunks), writable("told", self.told)
        if (self.numbers[1:] <= self.numbers[:-1]).any() or int(self.numbers[-1]) >= self.whole:
            raise BadRequest(f"the numbers of followed chunks must rise and stay below {self.whole}")
        if len(self.told) != TOLD_WORDS:
            raise BadRequest(f"told has {TOLD_WORDS} words, not {len(self.told)}")
        if self.own_block % BLOCK_WORD_BYTES:
            raise BadRequest(f"a progress block at {self.own_block:#x} is not aligned to {BLOCK_WORD_BYTES} bytes")
        if (
            self.is_verified
            and ((np.diff(firsts) < 2) | (nbytes[firsts[1:].astype(np.int64) - 1] != DIGEST_BYTES)).any()
        ):
            raise BadRequest(f"a verified chunk is its bytes, and then its digest, {DIGEST_BYTES} bytes")
        return _Follow(
            numbers,
            self.done.ctypes.data,
            told,
            self.whole,
            self.source_block,
            self.own_block,
            (ctypes.c_uint8 * GENERATION_BYTES).from_buffer_copy(self.generation),
            self.stall_ns,
            int(self.is_verified),
        )
