"""Our side of every pull: a publisher and a reader process with a hub each, and pulls between them that are checked.

It decides where the clock runs and that a pull counts only when the bytes arrived; what it is compared with is the
sections' business.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench import hubs
from bench.process import cpu_seconds
from bench.remote import Remote, both


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull: seconds of the replicate call, seconds from the call of publish to its return, cores both ends used."""

    seconds: float
    installed_seconds: float
    cores: float


class Puller:
    """One publisher's next version into one reader: train, publish, replicate, check, unpublish."""

    def __init__(self, publisher: Remote, reader: Remote, name: str, engine: str = "") -> None:
        self.publisher = publisher
        self.reader = reader
        self.name = name
        #: That must have moved the bytes; any, if empty.
        self.engine = engine
        self.version = 0

    def __call__(self, digest: str = "background") -> float:
        """Seconds from the call of publish, while the reader waits, to the return of replicate."""
        self._train()
        act = (hubs.publish, self.name, self.version, digest)
        published, got = both(self.reader, (hubs.replicate, self.name, self.version), self.publisher, act)
        self._check(digest, got)
        return float(got["returned"] - published[0])

    def sealed(self) -> Pull:
        """A verified pull of a version whose every chunk is digested and sealed before the replicate call."""
        called = self._publish()
        self.publisher.call(hubs.wait_sealed, self.name, self.version)
        return self._replicate(called)

    def fresh(self) -> Pull:
        """A verified pull that is called as soon as publish has returned: digests run beside it."""
        return self._replicate(self._publish())

    def _publish(self) -> float:
        self._train()
        called, _ = self.publisher.call(hubs.publish, self.name, self.version, "background")
        return float(called)

    def _replicate(self, called: float) -> Pull:
        ends = (self.publisher.pid, self.reader.pid)
        before = sum(map(cpu_seconds, ends))
        got = self.reader.call(hubs.replicate, self.name, self.version)
        used = sum(map(cpu_seconds, ends)) - before
        self._check("background", got)
        seconds = float(got["returned"] - got["called"])
        return Pull(seconds, float(got["returned"] - called), used / seconds)

    def _train(self) -> None:
        self.version += 1
        self.publisher.call(hubs.train, self.name)

    def _check(self, digest: str, got: dict[str, Any]) -> None:
        """A fast pull of nothing, over another engine, or an unverified one that claims otherwise, is no result."""
        there, here = self.publisher.call(hubs.first_bytes, self.name), self.reader.call(hubs.first_bytes, self.name)
        moved_by = self.engine or got["engine"]
        if there != here or got["verified"] != (digest != "off") or got["engine"] != moved_by:
            raise RuntimeError(
                f"version {self.version} is no result: reader holds {here}, publisher {there}, engine {moved_by!r} is "
                f"measured, reply {got}"
            )
        self.publisher.call(hubs.unpublish, self.name)


@contextmanager
def opened(sizes: list[int], engine: str) -> Iterator[Puller]:
    """Two fresh processes with tensors of these sizes, warm. `Missing` where the engine cannot start."""
    wanted = "" if engine == "auto" else engine
    with Remote(f"publisher-{engine}") as publisher, Remote(f"reader-{engine}") as reader:
        publisher.call(hubs.allocate, "large", sizes, 1)
        reader.call(hubs.allocate, "large", sizes, 0)
        link(publisher, reader, "large", new_job(), engine)
        puller = Puller(publisher, reader, "large", wanted)
        puller.sealed()  # first contact
        yield puller


def link(publisher: Remote, reader: Remote, name: str, job: str, engine: str = "auto") -> None:
    """Open both ends of a model."""
    publisher.call(hubs.open_hub, name, name, "publisher", job, engine)
    reader.call(hubs.open_hub, name, name, "reader", job, engine)


def new_job() -> str:
    """A name that no other run has."""
    return f"bench-{secrets.token_hex(8)}"
