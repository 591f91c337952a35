"""What one buffer set holds, as its process knows it. Only `member.py`, `pull.py` and `transaction.py` change it.

empty --publish--> published --unpublish--> empty          (hidden in between, while readers drain)
empty/complete --replicate--> filling --commit--> complete
                                      --failure, first byte landed--> torn --replicate--> filling
complete --unpublish--> empty         anything --suspend--> suspended --resume--> empty
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorhub.client.buffers import Buffers
from tensorhub.client.holding import Holding, show
from tensorhub.client.publication import Publication
from tensorhub.client.telling import undertaking_of
from tensorhub.messages import Done
from tensorhub.ports import Engine
from tensorhub.references import Claim, Undertaking
from tensorhub.types import NO_GENERATION, UNVERIFIED, Digest, SessionId, Version

if TYPE_CHECKING:
    from tensorhub.client.pull import Pull


class State(enum.Enum):
    """What a buffer set holds, see the drawing above."""

    EMPTY = "empty"
    PUBLISHED = "published"
    FILLING = "filling"
    COMPLETE = "complete"
    TORN = "torn"
    SUSPENDED = "suspended"


@dataclass(slots=True)
class Slot:
    """One buffer set of this member."""

    buffers: Buffers
    holding: Holding
    state: State = State.EMPTY
    #: What the registered tensors hold, whole; None unless published or complete.
    version: Version | None = None
    #: The tensors' write counters when they became complete.
    counters: list[int | None] = field(default_factory=list)
    #: What is, or was last, being filled in; and what was there before.
    target: Version | None = None
    previous: Version | None = None
    root: Digest = UNVERIFIED
    verified: bool = True
    #: A publish whose answer is awaited: claimed, should the server be another by then.
    offered: Version | None = None
    #: Offered to nobody while readers drain, or because a drain timed out.
    hidden: bool = False
    publication: Publication | None = None
    task: asyncio.Task[None] | None = None
    #: The operation that runs on this slot, in words; a second one is refused.
    running: str | None = None
    #: The replicate that runs on it.
    pull: Pull | None = None
    #: Done when the read of another's memory that is under way has ended; None while there is none.
    reading: asyncio.Future[None] | None = None
    #: A `Done` whose answer was lost: to be asked again before anything else.
    pending: Done | None = None
    #: Whether what was filled last is all of it; a subset makes a mixture of two versions, which is neither.
    is_whole: bool = True

    @classmethod
    def of(cls, buffers: Buffers, engines: Sequence[Engine], incarnation: SessionId) -> Slot:
        """Fresh buffers, shown to engines."""
        holding = show(buffers, engines, incarnation)
        return cls(holding.buffers, holding)

    def show(self, buffers: Buffers, engines: Sequence[Engine], incarnation: SessionId) -> None:
        """The same tensors, mapped otherwise: at each instant, also after a failure, what is shown can be read."""
        old, self.holding = self.holding, Holding(buffers, engines, incarnation)
        old.close()

    def fill(self, target: Version, *, verified: bool, is_whole: bool) -> None:
        """Bytes of `target` may land from now on: the tensors hold no version."""
        self.is_whole = is_whole
        self.previous = self.version if self.version is not None else self.previous
        self.state, self.version, self.target = State.FILLING, None, target
        self.verified, self.hidden, self.root, self.pending = verified, False, UNVERIFIED, None

    def complete(self, version: Version, root: Digest) -> None:
        """The group has committed: this is what the tensors hold, and what is served, if it was all of them."""
        if not self.is_whole:
            self.clear()
            return
        self.counters = self.holding.buffers.counters()
        self.state, self.version, self.root, self.hidden = State.COMPLETE, version, root, False
        self.target, self.previous = None, None

    def tear(self) -> None:
        """The tensors may hold bytes of `target` and of `previous`."""
        self.state, self.version = State.TORN, None

    def clear(self) -> None:
        """The tensors are the user's, and hold no version that we know of."""
        self.is_whole = True
        self.state, self.version, self.hidden, self.root = State.EMPTY, None, False, UNVERIFIED
        self.target, self.previous = None, None

    def close(self) -> None:
        """Nobody reads it any more, and nobody digests it."""
        if self.publication is not None:
            self.publication.stopped = True
        self.holding.close()

    def claim(self) -> Claim | None:
        """What to tell a server that does not know it, or may believe something else; None when nothing is shown."""
        version = self.version if self.state in (State.PUBLISHED, State.COMPLETE) else self.offered
        holding = self.holding
        if version is None or holding.generation == NO_GENERATION:
            return None
        if self.pull is not None and self.pull.grant is not None:
            return None  # about to be overwritten
        return Claim(
            self.buffers.name,
            version,
            holding.generation,
            holding.content(self.verified),
            self.root,
            self.state is not State.COMPLETE,
            holding.watermark,
            holding.locators,
            holding.exposure,
            self.hidden,
        )

    def undertaken(self) -> Undertaking | None:
        """What a replicate has been given to do, and has not ended; None for none."""
        return None if self.pull is None else undertaking_of(self.pull)

    def describe(self) -> str:
        """The state in words, for errors: `torn(target 7, previous 6)`."""
        match self.state:
            case State.FILLING | State.TORN:
                return f"{self.state.value}(target {self.target}, previous {self.previous})"
            case State.PUBLISHED | State.COMPLETE:
                return f"{'hidden ' if self.hidden else ''}{self.state.value} {self.version}"
            case _:
                return str(self.state.value)
