"""What a process costs right now: resident memory, descriptors, threads, CPU time, from /proc. It changes nothing."""

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


def cpu_seconds(pid: int) -> float:
    """CPU time so far of a process and of all that descend from it and live; in steps of the kernel's tick (10 ms)."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    if pid not in ticks:
        raise ProcessLookupError(f"process {pid} has ended")
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(ticks[member] for member in family) / os.sysconf("SC_CLK_TCK")


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) * 1024
