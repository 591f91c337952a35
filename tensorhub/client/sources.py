"""The sources of one pull, one after another: how each is reached, what it gave, and where to go when it fails.

The server chooses who; the router chooses over which engine. This module remembers, for errors and for `Replication`,
and turns a grant into a `Source` that the pipeline can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub.client.holding import taking
from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.client.results import SourceUse
from tensorhub.errors import Broken, TensorHubError, VersionUnavailable
from tensorhub.messages import Granted, Reroute
from tensorhub.pipeline.exposure import Exposure
from tensorhub.pipeline.follow import Source
from tensorhub.transport.router import choose
from tensorhub.types import Generation

if TYPE_CHECKING:
    from tensorhub.client.member import Member

#: One filling may lose this many sources; more means that something else is wrong, and a loop must end.
REROUTES_MAX = 32


class Sources:
    """All sources of the filling `generation`, in the order in which they were granted."""

    def __init__(
        self, member: Member, generation: Generation, left_s: Callable[[], float], kinds: frozenset[str]
    ) -> None:
        self._member = member
        #: Kinds of device memory that the destination has addresses of.
        self._kinds = kinds
        self._generation = generation
        self._left_s = left_s
        self._tried: list[str] = []
        #: What each source was used for so far; the last is the present one.
        self.uses: list[SourceUse] = []

    @property
    def history(self) -> str:
        """What was tried and how it failed, to append to an error."""
        return f"; tried {'; '.join(self._tried)}" if self._tried else ""

    def open(self, grant: Granted) -> Source:
        """The granted source, over the best engine that reaches it; `EngineUnavailable` says why none does."""
        engines = taking(self._member.engines, self._kinds)
        choice = choose(engines, grant.source.locators, [engine.name for engine in engines])
        seat = grant.source.seat
        reason = f"{grant.reason}; {choice.reason}"
        self.uses.append(SourceUse(seat.replica, seat.shard, 0, choice.engine.name, reason))
        return Source(
            str(seat),
            choice.engine,
            choice.peer,
            Exposure.unpack(grant.source.exposure),
            grant.source.session,
            grant.source.generation,
            grant.content.manifest,
        )

    def count(self, nbytes: int) -> None:
        """The present source gave so many more bytes."""
        if self.uses:
            last = self.uses[-1]
            self.uses[-1] = SourceUse(last.replica, last.shard, last.nbytes + nbytes, last.engine, last.reason)

    async def next(self, grant: Granted, failure: TensorHubError, watermark: int, *, stalled: bool) -> Granted:
        """Where to go on after the granted source failed: the server's choice.

        A source that was merely silent is followed further when there is no other; else `VersionUnavailable`.
        """
        self._tried.append(f"{grant.source.seat}: {failure.message}")
        if len(self._tried) > REROUTES_MAX:
            raise VersionUnavailable(f"{REROUTES_MAX} sources failed in a row{self.history}") from failure
        left_s = self._left_s()
        request = Reroute(
            self._member.seat,
            self._generation,
            grant.source.generation,
            failure.message,
            watermark,
            int(left_s * NS),
        )
        try:
            reply = await self._member.session.call(request, left_s + REPLY_MARGIN_S)
        except VersionUnavailable as lost:
            if stalled:
                return grant
            raise VersionUnavailable(lost.message + self.history, lost.where) from failure
        if not isinstance(reply, Granted):
            raise Broken(f"Reroute was answered by {reply!r}")
        return reply
