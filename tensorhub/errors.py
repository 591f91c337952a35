"""Every error TensorHub raises, and the one value (`Where`) by which each names its subject.

Nothing here decides anything. Errors survive pickling (Ray ships them) and the wire (the server refuses by error name).

    TensorHubError
    ├── UsageError                the caller broke the contract; never retried
    │   ├── NotRegistered         an operation needs `register()` first
    │   ├── AlreadyPublished      the buffer set is published; unpublish before publishing or writing again
    │   ├── NotPublished          nothing to unpublish
    │   ├── VersionOrder          a version that is no int, or falls within its lineage
    │   ├── VersionConflict       the same version was published with other bytes
    │   ├── SeatTaken             another live process already holds this (replica, shard)
    │   ├── LayoutMismatch        names, shapes, dtypes or shard counts differ; lists every difference
    │   ├── UnsupportedTensor     meta, sparse or otherwise byte-less tensors; overlaps that cannot be written
    │   ├── ContractBroken        a published tensor was written to; names who read it
    │   ├── Busy                  a second operation on a hub while one runs
    │   ├── GroupMismatch         shards of one replica asked for different things
    │   ├── Closed                the hub, session or server is closed
    │   ├── BadRequest            a malformed argument, address or message
    │   └── Unauthorized          no valid token was shown
    ├── Unavailable               the world failed; carries what was tried; may be retried
    │   ├── ServerUnavailable     no reference server answers
    │   │   └── NoServer          there is none, and whoever asked only looks: it starts none
    │   ├── VersionUnavailable    nobody can serve the version any more
    │   ├── WaitTimeout           the deadline passed: no version matched, or the transfer was not complete
    │   ├── DrainTimeout          readers still read at the deadline; the version stays hidden
    │   ├── SourceFailed          a source died, stalled or served wrong bytes and no other is left
    │   │   └── SourceSilent      nothing came from it for too long; it may be waiting for its own source
    │   ├── GroupAborted          another shard of this replica failed
    │   ├── LeaseLost             this process was silent for longer than its lease
    │   ├── OutcomeUnknown        the commit's reply was lost; the registered tensors count as torn until asked again
    │   └── EngineUnavailable     no transfer engine reaches the source; says why for each
    └── Broken                    we are wrong; also an AssertionError, carries the story
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class Where:
    """The subject of an error. Every field is optional; unknown ones stay None."""

    model: str | None = None
    version: str | int | None = None
    replica: str | None = None
    shard: int | None = None
    shards: int | None = None
    source: str | None = None
    tensor: str | None = None
    bytes_done: int | None = None

    def __str__(self) -> str:
        parts: list[str] = []
        if self.model is not None:
            parts.append(f"model {self.model!r}")
        if self.version is not None:
            parts.append(f"version {self.version}")
        if self.replica is not None:
            parts.append(f"replica {self.replica!r}")
        if self.shard is not None:
            parts.append(f"shard {self.shard}" + (f" of {self.shards}" if self.shards is not None else ""))
        if self.source is not None:
            parts.append(f"source {self.source!r}")
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor!r}")
        if self.bytes_done is not None:
            parts.append(f"{self.bytes_done} bytes done")
        return ", ".join(parts)

    def over(self, outer: Where) -> Where:
        """This place, its unknown fields filled from `outer`."""
        known = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(outer, **known)


class TensorHubError(Exception):
    """Base of all errors. `message` says what happened and what to do; `where` names the subject."""

    def __init__(self, message: str, where: Where | None = None) -> None:
        super().__init__(message, where)
        self.message = message
        self.where = where if where is not None else Where()

    def __str__(self) -> str:
        place = str(self.where)
        return f"{self.message} [{place}]" if place else self.message

    def at(self, outer: Where) -> TensorHubError:
        """Fill the unknown fields of `where` from an outer place; returns self, for `raise error.at(...)`."""
        self.where = self.where.over(outer)
        self.args = (self.message, self.where)
        return self


class UsageError(TensorHubError):
    """The caller broke the contract; never retried."""


class NotRegistered(UsageError):
    """An operation needs `register()` first."""


class AlreadyPublished(UsageError):
    """The buffer set is published; unpublish before publishing or writing again."""


class NotPublished(UsageError):
    """There is nothing to unpublish."""


class VersionOrder(UsageError):
    """A version that is no int, or falls within its lineage."""


class VersionConflict(UsageError):
    """The same version was published with other bytes."""


class SeatTaken(UsageError):
    """Another live process already holds this (replica, shard)."""


class LayoutMismatch(UsageError):
    """Names, shapes, dtypes or shard counts differ; the message lists every difference."""


class UnsupportedTensor(UsageError):
    """A tensor that has no bytes to move, or overlaps that cannot be written."""


class ContractBroken(UsageError):
    """A published tensor was written to; names who read it."""


class Busy(UsageError):
    """A second operation on a hub while one runs."""


class GroupMismatch(UsageError):
    """Shards of one replica asked for different things."""


class Closed(UsageError):
    """The hub, session or server is closed."""


class BadRequest(UsageError):
    """A malformed argument, address or message."""


class Unauthorized(UsageError):
    """No valid token was shown."""


class Unavailable(TensorHubError):
    """The world failed; carries what was tried; may be retried."""


class ServerUnavailable(Unavailable):
    """No reference server answers."""


class NoServer(ServerUnavailable):
    """There is none, and whoever asked only looks: it starts none."""


class VersionUnavailable(Unavailable):
    """Nobody can serve the version any more."""


class WaitTimeout(Unavailable):
    """The deadline passed: no version matched, or the transfer was not complete."""


class DrainTimeout(Unavailable):
    """Readers still read at the deadline; the version stays hidden."""


class SourceFailed(Unavailable):
    """A source died, stalled or served wrong bytes and no other is left."""


class SourceSilent(SourceFailed):
    """Nothing came from a source for too long. It may be waiting for its own source, or stand still."""


class GroupAborted(Unavailable):
    """Another shard of this replica failed."""


class LeaseLost(Unavailable):
    """This process was silent for longer than its lease."""


class OutcomeUnknown(Unavailable):
    """The commit's reply was lost; the registered tensors count as torn until asked again."""


class EngineUnavailable(Unavailable):
    """No transfer engine reaches the source; says why for each."""


class Broken(TensorHubError, AssertionError):
    """We are wrong. Carries the story that led here."""


def _subclasses(base: type[TensorHubError]) -> list[type[TensorHubError]]:
    found = [base]
    for child in base.__subclasses__():
        found.extend(_subclasses(child))
    return found


#: {name: class}, for errors that cross the wire by name.
BY_NAME: dict[str, type[TensorHubError]] = {cls.__name__: cls for cls in _subclasses(TensorHubError)}
