"""What is remembered of how fast a filling is. Plain fields; `pace.py` decides what they mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """How fast a filling is, by its reports."""

    #: Since when it fills at all.
    began_ns: int = 0
    #: It has told of bytes from its present source.
    has_begun: bool = False
    #: The open period has lasted so long by its own clock, and began with so many bytes.
    open_ns: int = 0
    from_bytes: int = 0
    #: Bytes per second in the last whole period, which ended then; 0 and 0 before there is one.
    rate: int = 0
    measured_ns: int = 0
    #: Periods in a row that were far below what others did, and what its source did.
    below: int = 0
    behind: int = 0
