"""Bytes and ages as people read them. Nothing else."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """Bytes for people, in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def ago(seconds: float) -> str:
    """An age for people."""
    for limit, factor, unit in ((120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172_800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / factor:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
