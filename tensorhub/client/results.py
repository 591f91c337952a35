"""What a replicate gives back: values for people and for metrics, frozen and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

#: The phases of a replicate in order, see `Replication.phases`.
PHASES = ("wait", "plan", "drain", "register", "transfer", "verify", "install")


@dataclass(frozen=True, slots=True)
class SourceUse:
    """One source this replicate read from: who, how many bytes, over which engine, and why it was chosen."""

    replica: str
    shard: int
    nbytes: int
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replication:
    """A replicate that succeeded: every byte of every registered tensor equals what the version's digests say.

    `nbytes` counts bytes that crossed and were verified, once each; `bytes_read` all that landed, those read in vain
    included (their source failed before they were verified), 0 where the data path did not count. `seconds` is the
    whole call. `phases` maps each name of `PHASES` to seconds: `wait`
    for a version and a decision, `plan` (manifest, map, check), `drain` of our own old readers, `register`,
    `transfer` (each chunk is verified as it lands), `verify` (the final look and the root digest), `install` (scatter,
    copies).
    `verified` is False only for versions published with `digest="off"`.
    """

    version: int
    lineage: str
    nbytes: int
    seconds: float
    sources: tuple[SourceUse, ...]
    phases: dict[str, float] = field(hash=False)
    already_held: bool = False
    verified: bool = True
    bytes_read: int = 0

    @property
    def engine(self) -> str:
        """The engine that moved the bytes, or "" when none moved."""
        return self.sources[-1].engine if self.sources else ""

    @property
    def engine_reason(self) -> str:
        """Why that engine and source."""
        return self.sources[-1].reason if self.sources else ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A replicate in progress, as `hub.progress()` shows it."""

    version: str
    source: str
    engine: str
    bytes_done: int
    bytes_total: int
    tensors_done: int
    tensors_total: int
