"""What a seat remembers of the lives of its server: all that a new life, which begins empty, could contradict.

Plain memory, bounded by the versions that it names; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tensorhub.references import Claim, LineageMark, Standing, Undertaking
from tensorhub.types import Version


@dataclass(slots=True)
class Past:
    """Of one seat."""

    #: The last commit that it heard of: incarnation of the group, number, version.
    _committed: tuple[int, int, Version] | None = None
    #: The last version that it published, and the newest that it was given.
    _published: Version | None = None
    _seen: Version | None = None
    #: {lineage: where it stands}, as last told.
    _marks: dict[str, LineageMark] = field(default_factory=dict)

    def saw(self, version: Version, mark: LineageMark) -> None:
        """The server gave this version: it is, or was, readable."""
        self._marks[mark.name] = mark
        if self._seen is None or self._rank(version) > self._rank(self._seen):
            self._seen = version

    def published(self, version: Version, mark: LineageMark) -> None:
        """This seat published it."""
        self._marks[mark.name] = mark
        self._published = version

    def committed(self, group: int, sequence: int, version: Version) -> None:
        """The group has committed."""
        self._committed = (group, sequence, version)

    def standing(self, group: int, sequence: int, claims: Iterable[Claim], undertaking: Undertaking | None) -> Standing:
        """All of it, for a `Join` with these claims."""
        named = [claim.version for claim in claims]
        named += [version for version in (self._published, self._seen) if version is not None]
        named += [] if undertaking is None else [undertaking.version]
        lineages = {version.lineage for version in named}
        self._marks = {name: mark for name, mark in self._marks.items() if name in lineages}
        at, version = -1, None
        if self._committed is not None and self._committed[0] == group:
            _, at, version = self._committed
        marks = tuple(sorted(self._marks.values(), key=lambda mark: mark.order))
        return Standing(group, sequence, at, version, self._published, self._seen, marks, undertaking)

    def _rank(self, version: Version) -> tuple[int, int]:
        mark = self._marks.get(version.lineage)
        return (-1 if mark is None else mark.order, version.number)
