"""Decides whether what a rollout holds is what the trainer published, from digests or from bytes.

Pure: it knows no hub, process or tensor. Its digests (blake2b) are independent of the ones the hub works with, so the
demo does not believe the system that it shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DIGEST_BYTES = 16
#: Exit codes of the command line.
EXIT_IDENTICAL = 0
EXIT_DIFFERENT = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one shard of a rollout that is not the trainer's, and how."""

    replica: str
    shard: int
    tensor: str
    reason: str

    def __str__(self) -> str:
        return f"{self.replica}#{self.shard} {self.tensor}: {self.reason}"


def digest(dtype: str, shape: tuple[int, ...], data: memoryview | bytes) -> str:
    """A strong digest of one tensor: of its dtype, its shape and every byte."""
    state = hashlib.blake2b(f"{dtype} {shape} ".encode(), digest_size=DIGEST_BYTES)
    state.update(data)
    return state.hexdigest()


def compare_digests(
    replica: str, shard: int, expected: Mapping[str, str], found: Mapping[str, str]
) -> list[Difference]:
    """Every name that differs, is missing, or is too many. A shard without tensors on both sides has none."""
    differences = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            differences.append(Difference(replica, shard, name, "missing in the rollout"))
        elif name not in expected:
            differences.append(Difference(replica, shard, name, "unknown to the trainer"))
        elif expected[name] != found[name]:
            reason = f"bytes differ (trainer {expected[name]}, rollout {found[name]})"
            differences.append(Difference(replica, shard, name, reason))
    return differences


def compare_piece(expected: bytes, found: bytes) -> int | None:
    """Offset of the first byte that differs, or None. A length that differs is a difference at the shorter's end."""
    if expected == found:
        return None
    for offset, (mine, theirs) in enumerate(zip(expected, found, strict=False)):
        if mine != theirs:
            return offset
    return min(len(expected), len(found))


def unchanged(names: Iterable[str], before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Those names that a train step left as they were: a demo that moves the same bytes twice shows nothing."""
    return sorted(name for name in names if name in before and before[name] == after.get(name))


def exit_code(differences: Iterable[Difference]) -> int:
    """What the process says to its shell."""
    return EXIT_DIFFERENT if any(True for _ in differences) else EXIT_IDENTICAL
