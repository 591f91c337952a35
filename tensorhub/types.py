"""The words of the system as types: who (`Seat`), what (`Version`, `Selector`), which life (`SessionId`, `Generation`).

Frozen values only; no behaviour beyond parsing and printing. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

from tensorhub.errors import BadRequest, VersionOrder

#: Random id (16 bytes) of one process's session: its incarnation. A restarted process of the same name has another.
SessionId = NewType("SessionId", bytes)
#: Random id (16 bytes) of one filling of a buffer set. All zero bytes in a progress block mean "no longer valid".
Generation = NewType("Generation", bytes)
#: Random id (16 bytes) of one life of a server.
Epoch = NewType("Epoch", bytes)
#: blake2b-128 over the manifest, or over manifest digest and all chunk digests (the root).
Digest = NewType("Digest", bytes)
ReplicaId = NewType("ReplicaId", str)

ID_BYTES = 16
NO_GENERATION = Generation(bytes(ID_BYTES))
#: The root of a version published with `digest="off"`: nothing can be compared with it.
UNVERIFIED = Digest(b"")

DEFAULT_LINEAGE = "main"
DEFAULT_BUFFERS = "a"
#: Names are shown to people and kept by the server: long ones are a mistake.
NAME_BYTES_MAX = 256
#: One replica's shards; 16 hosts of 64 accelerators.
SHARDS_MAX = 1024
VERSION_MAX = 2**63 - 1
#: A selector as text: of thousands of digits Python makes no number.
SELECTOR_CHARS_MAX = 64
#: No wait is endless: a day is longer than any step of training.
TIMEOUT_S_MAX = 24 * 3600


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """(job, name). Two jobs on one cluster, or `actor` and `draft`, never share versions."""

    job: str
    name: str

    def __str__(self) -> str:
        return self.name if self.job == "default" else f"{self.job}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """(lineage, number). Which of two lineages is newer only the server knows; numbers compare within one."""

    lineage: str
    number: int

    def __str__(self) -> str:
        return str(self.number) if self.lineage == DEFAULT_LINEAGE else f"{self.number}@{self.lineage}"


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """Shard `shard` of replica `replica`: the place that one live process holds at a time."""

    model: ModelKey
    replica: ReplicaId
    shard: int

    def __str__(self) -> str:
        return f"{self.replica}#{self.shard}"


@dataclass(frozen=True, slots=True)
class Exactly:
    """Selector: this number, in the newest lineage that has it."""

    number: int

    def __str__(self) -> str:
        return str(self.number)


@dataclass(frozen=True, slots=True)
class Latest:
    """Selector: the newest readable version, or the one `back` versions before it."""

    back: int = 0

    def __str__(self) -> str:
        return "latest" if self.back == 0 else f"latest-{self.back}"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Selector: the newest readable version whose number is at least `number`."""

    number: int

    def __str__(self) -> str:
        return f"at least {self.number}"


@dataclass(frozen=True, slots=True)
class Newest:
    """Selector: the newest version that can be pulled within the reader's data centre, at most `staleness` behind."""

    staleness: int = 0

    def __str__(self) -> str:
        return f"newest, staleness {self.staleness}"


Selector = Exactly | Latest | AtLeast | Newest


@dataclass(frozen=True, slots=True)
class Location:
    """`dc/rack/host`, most general first; any depth, empty when unknown."""

    parts: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: object) -> Location:
        if not isinstance(text, str):
            raise BadRequest(f"location must be a str as 'dc/rack/host', not {text!r}")
        parts = tuple(part.strip() for part in text.split("/")) if text else ()
        if any(not part for part in parts):
            raise BadRequest(f"location {text!r} has an empty part; write it as 'dc/rack/host'")
        return cls(parts)

    def __str__(self) -> str:
        return "/".join(self.parts)


def check_version(number: object) -> int:
    """The number if it is a plain int in range, else `VersionOrder`. A bool is no version."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise VersionOrder(f"a version is an int, not {type(number).__name__} {number!r}")
    if not 0 <= number <= VERSION_MAX:
        raise VersionOrder(f"version {number} is outside 0 to {VERSION_MAX}")
    return number


def check_name(kind: str, name: object) -> str:
    """The name if it is a usable, printable string, else `BadRequest`."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise BadRequest(f"{kind} must be a non-empty printable string, not {name!r}")
    if len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX:
        raise BadRequest(f"{kind} {name[:40]!r}... is longer than {NAME_BYTES_MAX} bytes")
    return name


def check_texts(kind: str, given: object) -> tuple[str, ...]:
    """One str, or several, as several; else `BadRequest`."""
    several = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(each, str) for each in several):
        raise BadRequest(f"{kind} must be a str or several, not {given!r}")
    return several


def check_timeout(seconds: object) -> float:
    """The seconds if they are a finite number from 0 to `TIMEOUT_S_MAX`, else `BadRequest`."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise BadRequest(f"timeout must be a number of seconds, not {type(seconds).__name__} {str(seconds)[:40]!r}")
    if not 0 <= seconds <= TIMEOUT_S_MAX:
        raise BadRequest(f"timeout {seconds} s is outside 0 to {TIMEOUT_S_MAX}; every wait has an end")
    return float(seconds)


def parse_selector(value: object) -> Selector:
    """A selector from what users write: `7`, `"7"`, `"latest"`, `"latest-1"`, `AtLeast(7)`, `Newest(staleness=2)`."""
    match value:
        case AtLeast(number) | Exactly(number):
            check_version(number)
            return value
        case Latest(amount) | Newest(amount):
            check_version(amount)
            return value
        case int() if not isinstance(value, bool):
            return Exactly(check_version(value))
        case "latest":
            return Latest()
        case str() if value.startswith("latest-") and len(value) <= SELECTOR_CHARS_MAX and value[7:].isdecimal():
            return Latest(int(value[7:]))
        case str() if len(value) <= SELECTOR_CHARS_MAX and value.isdecimal():
            return Exactly(check_version(int(value)))
        case _:
            raise BadRequest(
                f"version {value!r} is no selector; use an int, 'latest', 'latest-1', AtLeast(7) or Newest(staleness=2)"
            )
