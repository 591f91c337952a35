"""One group transaction as one shard sees it: ask, commit, abort; and an outcome that was lost, asked again.

The server decides for the whole replica; this module makes what it decided true of the slot. A sequence number is
used up by whatever ends it, on every shard alike; after a failure the server says which one is next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.errors import (
    BadRequest,
    Broken,
    Closed,
    GroupAborted,
    LeaseLost,
    OutcomeUnknown,
    ServerUnavailable,
    TensorHubError,
    Unavailable,
    WaitTimeout,
)
from tensorhub.messages import (
    Abort,
    Committed,
    Done,
    Granted,
    Held,
    Notice,
    Replicate,
    Reply,
    TransactionAborted,
)
from tensorhub.types import Digest, Generation, Selector, Version

if TYPE_CHECKING:
    from tensorhub.client.holding import Holding
    from tensorhub.client.member import Member
    from tensorhub.client.slot import Slot

#: Servers that may die during one question; more means that something else is wrong, and a loop must end.
LIVES_MAX = 8
#: Telling the server of a failure must not hold up the error for long.
ABORT_S = 2.0
#: Of why: an error may list every tensor of a large layout, and siblings hear it word for word.
REASON_CHARS_MAX = 4000


class Transaction:
    """Sequence number `sequence` of this seat in incarnation `group` of its group."""

    def __init__(self, member: Member, slot: Slot, left_s: Callable[[], float]) -> None:
        self._member = member
        self._slot = slot
        self._left_s = left_s
        self._group, self.sequence = member.group, member.sequence

    async def ask(
        self, selector: Selector, generation: Generation, timeout_s: float, offer: Holding | None
    ) -> Held | Granted:
        """Ask for a version; the answer is the group's decision and this shard's source.

        `offer` is what will be filled if the version has its manifest; None: what is filled serves nobody.
        """
        session = self._member.session
        for _ in range(LIVES_MAX):
            life = session.epoch, session.lapses
            try:
                return await self._ask(selector, generation, timeout_s, offer)
            except (BadRequest, GroupAborted):
                if (session.epoch, session.lapses) == life:
                    raise
                # The server forgot us, or died, while this was asked: again, in the numbers that it has told us since.
                self._group, self.sequence = self._member.group, self._member.sequence
        raise ServerUnavailable(f"{LIVES_MAX} servers died while this was asked")

    async def _ask(
        self, selector: Selector, generation: Generation, timeout_s: float, offer: Holding | None
    ) -> Held | Granted:
        request = Replicate(
            self._member.seat,
            self._slot.buffers.name,
            self._group,
            self.sequence,
            selector,
            int(min(timeout_s, self._left_s()) * NS),
            generation,
        )
        if offer is None:
            request = replace(request, serves=False)
        else:
            request = replace(request, manifest=offer.manifest.digest, locators=offer.locators, exposure=offer.exposure)
        reply = await self._member.session.call(request, self._left_s() + REPLY_MARGIN_S)
        if not isinstance(reply, Held | Granted):
            raise Broken(f"Replicate was answered by {reply!r}")
        self._member.past.saw(reply.version, reply.lineage)
        return reply

    def end_behind(self, group: int, sequence: int, notices: asyncio.Queue[Notice]) -> None:
        """A server that we have come back to says that the group's next transaction has these numbers: if this one is
        before it, its pull has to stop."""
        if group != self._group or sequence > self.sequence:
            reason = "the server was away, and the group has moved on meanwhile"
            notices.put_nowait(TransactionAborted(self._member.seat, self._group, self.sequence, reason))

    async def commit(self, version: Version, generation: Generation, root: Digest, nbytes: int) -> None:
        """This shard is done; returns once all are. Until the answer is known, `slot.pending` keeps the question."""
        slot = self._slot
        slot.pending = Done(self._member.seat, self._group, self.sequence, generation, root, nbytes)
        try:
            reply = await self._member.session.call(slot.pending, self._left_s() + REPLY_MARGIN_S)
        except OutcomeUnknown as unknown:
            reply = await self._decide(slot.pending, unknown)
        if not isinstance(reply, Committed) or reply.version != version:
            raise Broken(f"Done of version {version} was answered by {reply!r}")
        slot.pending = None
        self._member.past.committed(self._group, self.sequence, version)
        self._advance()

    async def _decide(self, pending: Done, unknown: OutcomeUnknown) -> Reply:
        """The deadline passed before all shards were done: end the transaction, unless it is committed by now."""
        try:
            async with asyncio.timeout(ABORT_S):
                return await self._resolve(pending, ABORT_S)
        except GroupAborted as aborted:
            raise WaitTimeout(
                f"not all shards of the replica were done in time; every shard must call replicate: {aborted.message}"
            ) from aborted
        except (Unavailable, TimeoutError):
            raise unknown from None

    async def _resolve(self, pending: Done, timeout_s: float) -> Reply:
        """How it ended, for good. What is not committed yet is aborted first: a sibling that asks only now would
        commit it during our next call, which would then wait for that sibling in the transaction after."""
        reason = f"shard {self._member.seat.shard} gave up waiting for the commit"
        await self._member.session.call(Abort(self._member.seat, pending.group, pending.sequence, reason), timeout_s)
        return await self._member.session.call(pending, timeout_s)

    async def settle_unknown(self) -> None:
        """Ask again how an earlier transaction ended, whose commit reply was lost."""
        slot, pending = self._slot, self._slot.pending
        if pending is None:
            return
        self._group, self.sequence = pending.group, pending.sequence
        try:
            reply = await self._resolve(pending, self._left_s() + REPLY_MARGIN_S)
        except (GroupAborted, LeaseLost):
            slot.holding.end()
        else:
            if not isinstance(reply, Committed):
                raise Broken(f"Done asked again was answered by {reply!r}")
            slot.complete(reply.version, pending.root)
            self._member.past.committed(pending.group, pending.sequence, reply.version)
        slot.pending = None
        self._advance()
        if slot.version is not None:
            await self._member.resync(self._left_s() + REPLY_MARGIN_S)  # another life may not know that we hold it
        self._group, self.sequence = self._member.group, self._member.sequence

    async def abort(self, failure: BaseException) -> None:
        """The sequence number is over for the whole group, because of this shard, unless that is known already."""
        self._slot.pending = None
        self._advance()
        if isinstance(failure, Closed):
            return
        reason = failure.message[:REASON_CHARS_MAX] if isinstance(failure, TensorHubError) else type(failure).__name__
        stopped = self.stop("" if isinstance(failure, GroupAborted) else reason)
        with suppress(TensorHubError, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await asyncio.wait([stopped])  # which does not hear of its cancellation, when the hub is closed now
                await self._member.resync(ABORT_S)

    def stop(self, reason: str) -> asyncio.Task[None]:
        """All reads of this transaction have ended, and no other will be made: the server hears of it sooner or later.

        Whoever unpublishes our source may be waiting for just that, so it is said until it is heard.
        """
        return self._member.spawn(self._say(Abort(self._member.seat, self._group, self.sequence, reason)))

    async def _say(self, stopped: Abort) -> None:
        while True:
            try:
                await self._member.session.call(stopped, ABORT_S)
            except ServerUnavailable:
                continue  # after ABORT_S: a session that will not come back refuses by another error
            except TensorHubError:
                return
            return

    def _advance(self) -> None:
        """A group that has moved on meanwhile counts from 0 again by itself."""
        if (self._member.group, self._member.sequence) == (self._group, self.sequence):
            self._member.sequence += 1
