"""The sources of one pull, one after another: how each is reached, what it gave, and where to go when it fails.

The server chooses who; the router chooses over which engine. This module decides whether a failure is worth another
engine before the server is asked for another source, remembers for errors and for `Replication`, and turns a grant
into a `Source` that the pipeline can follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tensorhub.client.holding import taking
from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.client.results import SourceUse
from tensorhub.errors import Broken, EngineUnavailable, TensorHubError, VersionUnavailable
from tensorhub.messages import Granted, Reroute
from tensorhub.pipeline.exposure import Exposure
from tensorhub.pipeline.source import Blame, Source
from tensorhub.transport.router import Choice, choose
from tensorhub.types import Generation

if TYPE_CHECKING:
    from tensorhub.client.member import Member

#: One filling may lose this many sources, or engines to one; more means that something else is wrong: a loop must end.
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
        #: {source: {engine that failed with it: why}}
        self._failed: dict[Generation, dict[str, str]] = {}
        #: The engine that the present source was opened over, and why; empty when none reaches it.
        self.engine = self.route = ""
        #: What each source was used for so far; the last is the present one.
        self.uses: list[SourceUse] = []

    @property
    def history(self) -> str:
        """What was tried and how it failed, to append to an error."""
        return f"; tried {'; '.join(self._tried)}" if self._tried else ""

    def open(self, grant: Granted) -> Source:
        """The granted source, over the best engine that reaches it and has not failed with it.

        `EngineUnavailable` says why none does.
        """
        self.engine = self.route = ""
        choice = self._choose(grant)
        self.engine, self.route = choice.engine.name, choice.reason
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
            grant.begun,
        )

    def count(self, nbytes: int) -> None:
        """The present source gave so many more bytes."""
        if self.uses:
            last = self.uses[-1]
            self.uses[-1] = SourceUse(last.replica, last.shard, last.nbytes + nbytes, last.engine, last.reason)

    def _choose(self, grant: Granted) -> Choice:
        engines = taking(self._member.engines, self._kinds)
        failed = self._failed.get(grant.source.generation)
        return choose(engines, grant.source.locators, [engine.name for engine in engines], failed)

    async def next(
        self, grant: Granted, failure: TensorHubError, watermark: int, bytes_done: int, blame: Blame
    ) -> Granted:
        """Where to go on after the granted source failed: the same grant when another engine may do better, else what
        the server chooses; `VersionUnavailable` when it has nobody else.
        """
        over = f" over {self.engine}" if self.engine else ""
        self._tried.append(f"{grant.source.seat}{over}: {failure.message}")
        if len(self._tried) > REROUTES_MAX:
            raise VersionUnavailable(f"{REROUTES_MAX} sources failed in a row{self.history}") from failure
        if self.engine and (blame is Blame.ENGINE or isinstance(failure, EngineUnavailable)):
            self._failed.setdefault(grant.source.generation, {})[self.engine] = failure.message
            if self._has_another_way(grant):
                return grant
        left_s = self._left_s()
        request = Reroute(
            self._member.seat,
            self._generation,
            grant.source.generation,
            failure.message,
            watermark,
            bytes_done,
            int(left_s * NS),
        )
        try:
            reply = await self._member.session.call(request, left_s + REPLY_MARGIN_S)
        except VersionUnavailable as lost:
            raise VersionUnavailable(lost.message + self.history, lost.where) from failure
        if not isinstance(reply, Granted):
            raise Broken(f"Reroute was answered by {reply!r}")
        return reply

    def _has_another_way(self, grant: Granted) -> bool:
        try:
            self._choose(grant)
        except EngineUnavailable:
            return False
        return True
