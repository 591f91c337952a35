"""What one case of chaos saw, and what of it was not as it had to be. Pure: it starts, signals and reads nothing.

It decides what counts as whole, as refused and as read again. Whether bytes are the right ones it is told, by digests
that are independent of the hub's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorhub.cli.compare import Difference
from tensorhub.errors import BY_NAME, Unavailable

#: Complaints that are printed of one case; the rest is counted.
COMPLAINTS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """One replicate, from outside: what it said, and what lay in memory when it had."""

    member: str
    version: int
    seconds: float
    #: Monotonic; when it returned or raised.
    at_s: float
    nbytes: int = 0
    bytes_read: int = 0
    sources: tuple[str, ...] = ()
    #: Name and words of the error that it raised; empty when it returned.
    error: str = ""
    message: str = ""
    #: Against what was published. Only where it returned.
    differences: tuple[Difference, ...] = ()

    @property
    def bytes_again(self) -> int:
        """Bytes that landed in vain and had to be read once more."""
        return self.bytes_read - self.nbytes


@dataclass(slots=True)
class Record:
    """What happens in one case, as it happens."""

    #: Bytes of a chunk: what is read again is counted in these.
    chunk_bytes: int
    seen: list[Seen] = field(default_factory=list)
    #: What was noticed, in words and order.
    notes: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    #: {figure: value}, for whoever measures.
    figures: dict[str, float] = field(default_factory=dict)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Complain unless it holds."""
        if not holds:
            self.complaints.append(otherwise)

    def whole(self, seen: Seen, version: int, *, chunks_again: float | None = None) -> None:
        """It had to return this version with the published bytes, reading at most so many chunks again."""
        self.seen.append(seen)
        if seen.error:
            self.complaints.append(f"{seen.member} raised {seen.error}: {seen.message}")
            return
        self.expect(seen.version == version, f"{seen.member} returned version {seen.version}, not {version}")
        self._right(seen)
        self.expect(seen.bytes_read > 0, f"{seen.member} did not count what it read")
        again = seen.bytes_again / self.chunk_bytes
        if chunks_again is not None:
            self.expect(
                again <= chunks_again,
                f"{seen.member} read {again:.2f} chunks again ({seen.bytes_again} bytes), not at most {chunks_again:g}",
            )

    def refused(self, seen: Seen, *names: str, says: str = "") -> None:
        """It had to raise one of these errors (any `Unavailable` for none), and to name what matters."""
        self.seen.append(seen)
        if not seen.error:
            self.complaints.append(f"{seen.member} returned version {seen.version} although it could not be whole")
            self._right(seen)
            return
        self.expect(is_refusal(seen.error, names), f"{seen.member} raised {seen.error}: {seen.message}")
        self.expect(says in seen.message, f"{seen.member} does not name {says!r}: {seen.message}")

    def untorn(self, seen: Seen, version: int) -> bool:
        """It may return this version, whole, or raise an `Unavailable`; whether it returned."""
        if seen.error:
            self.refused(seen)
        else:
            self.whole(seen, version)
        return not seen.error

    def within(self, what: str, seconds: float, limit_s: float) -> None:
        """Note how long something took, and complain if it was too long."""
        self.notes.append(f"{what} after {seconds:.2f} s")
        self.expect(seconds <= limit_s, f"{what} only after {seconds:.2f} s, not within {limit_s:g} s")

    def _right(self, seen: Seen) -> None:
        for difference in seen.differences:
            self.complaints.append(f"WRONG BYTES: {difference}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case, done. `skipped` says why it did not run here; it is neither ok nor failed then."""

    case: str
    did: str
    must: str
    ok: bool
    seconds: float
    #: Bytes that were held against independent digests, and found right.
    verified_bytes: int = 0
    bytes_again: int = 0
    errors: tuple[str, ...] = ()
    happened: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped else "ok" if self.ok else "FAILED"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def outcome(case: str, did: str, must: str, seconds: float, record: Record) -> Outcome:
    """What a record comes to. A case that saw no replicate proves nothing."""
    complaints = list(record.complaints)
    if not record.seen:
        complaints.append("no replicate was seen to its end")
    return Outcome(
        case=case,
        did=did,
        must=must,
        ok=not complaints,
        seconds=seconds,
        verified_bytes=sum(seen.nbytes for seen in record.seen if not seen.error and not seen.differences),
        bytes_again=sum(seen.bytes_again for seen in record.seen if not seen.error),
        errors=tuple(dict.fromkeys(seen.error for seen in record.seen if seen.error)),
        happened=(*(told(seen) for seen in record.seen), *record.notes),
        complaints=tuple(complaints),
    )


def told(seen: Seen) -> str:
    """One replicate in a line."""
    if seen.error:
        return f"{seen.member}: {seen.error} after {seen.seconds:.2f} s"
    verdict = "WRONG BYTES" if seen.differences else "identical"
    again = f", {seen.bytes_again} bytes read again" if seen.bytes_again else ""
    return (
        f"{seen.member}: version {seen.version} from {' then '.join(seen.sources)} in {seen.seconds:.2f} s, "
        f"{verdict}{again}"
    )


def is_refusal(error: str, names: Sequence[str] = ()) -> bool:
    """Whether an error is one of these by name or ancestry; of none, whether it is an `Unavailable`."""
    wanted = tuple(BY_NAME[name] for name in names) or (Unavailable,)
    found = BY_NAME.get(error)
    return found is not None and issubclass(found, wanted)
