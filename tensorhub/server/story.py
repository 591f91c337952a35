"""What happened to a replica, in a bounded trail of lines, each with the id of its cause.

It decides nothing; errors quote it, so that a person sees how a state came about.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tensorhub.server.settings import STORY_MAX


@dataclass(frozen=True, slots=True)
class Line:
    at_ns: int
    #: The call that caused it (`3f2a/17`: session and call), or the kind of deadline.
    cause: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_ns / 1e6:.3f}ms {self.cause}: {self.what}"


@dataclass(slots=True)
class Story:
    """The last `STORY_MAX` lines, oldest first."""

    lines: deque[Line] = field(default_factory=lambda: deque(maxlen=STORY_MAX))

    def tell(self, at_ns: int, cause: str, what: str) -> None:
        self.lines.append(Line(at_ns, cause, what))

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)
