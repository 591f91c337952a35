"""What a process costs right now: resident memory, descriptors, threads, from /proc. Reads only its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resident and peak resident bytes, open descriptors, threads."""

    rss: int
    peak_rss: int
    descriptors: int
    threads: int


def footprint() -> Footprint:
    """This process's, now."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if ":" in line
    )
    return Footprint(
        rss=_kib(fields["VmRSS"]),
        peak_rss=_kib(fields["VmHWM"]),
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # without the one that lists
        threads=len(os.listdir("/proc/self/task")),
    )


def reset_peak() -> None:
    """Let the peak begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * 1024
