"""One replicate of one shard, from the request to the commit.

It decides what a failure means for the registered tensors: nothing happened yet (their old version stays), or bytes
may have landed (torn). Which version and which source, the server decides; how bytes move, `pipeline/follow.py`.

    Replicate -> Held ------------------------------------------------> Done -> Committed
              -> Granted -> manifest, map, plan -> end own generation -> Serve
                         -> follow source -> (source failed -> Reroute -> follow the next)
                         -> install -> Done -> Committed
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from tensorhub.client.holding import Holding
from tensorhub.client.results import PHASES, Replication, SourceUse, Transfer
from tensorhub.errors import (
    Broken,
    Closed,
    EngineUnavailable,
    GroupAborted,
    LeaseLost,
    OutcomeUnknown,
    SourceFailed,
    TensorHubError,
    VersionUnavailable,
    WaitTimeout,
    Where,
)
from tensorhub.messages import (
    Abort,
    Committed,
    Done,
    Granted,
    Held,
    Notice,
    Progress,
    Replicate,
    Reroute,
    Serve,
    SourceLost,
    TransactionAborted,
)
from tensorhub.pipeline.counter import Counter
from tensorhub.pipeline.digest import root_digest
from tensorhub.pipeline.exposure import Exposure
from tensorhub.pipeline.follow import Filling, Source, fetch, fetch_map
from tensorhub.pipeline.manifest import Manifest
from tensorhub.ports import Engine
from tensorhub.transport.router import choose
from tensorhub.types import NO_GENERATION, UNVERIFIED, Digest, Generation, Selector, Version

if TYPE_CHECKING:
    from tensorhub.client.buffers import Buffers, Selection
    from tensorhub.client.member import Member, Slot

NS = 1_000_000_000
#: Beyond the call's own deadline, so that the server's refusal, which names the culprits, arrives before ours.
REPLY_MARGIN_S = 1.0
#: How often the server hears of a running filling: enough for a live picture, nothing beside one heartbeat.
PROGRESS_S = 0.25
#: One filling may lose this many sources; more means that something else is wrong, and a loop must end.
REROUTES_MAX = 32
#: Telling the server of a failure must not hold up the error for long.
ABORT_S = 2.0


class Pull:
    """A single use object: `run()` once."""

    def __init__(
        self, member: Member, slot: Slot, selector: Selector, timeout_s: float, only: Sequence[str] | None
    ) -> None:
        self._member = member
        self._slot = slot
        self._selector = selector
        self._only = only
        self._loop = asyncio.get_running_loop()
        self._began = self._mark = self._loop.time()
        self._timeout_s = timeout_s
        self._deadline = self._began + timeout_s
        self._generation = Generation(member.fresh())
        self._group, self._sequence = member.group, member.sequence
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._uses: list[SourceUse] = []
        self._tried: list[str] = []
        self._filling: Filling | None = None
        self._written = False
        self._engine: Engine | None = None
        self._grant: Granted | None = None

    @property
    def _where(self) -> Where:
        version = str(self._grant.version) if self._grant is not None else str(self._selector)
        source = str(self._grant.source.seat) if self._grant is not None else None
        return Where(version=version, bytes_done=self._bytes_done, source=source).over(self._member.where)

    async def run(self) -> Replication:
        """The whole replicate; every error names model, version, replica, shard, source and bytes done."""
        slot = self._slot
        slot.notices = asyncio.Queue()
        slot.transfer = self._transfer
        try:
            async with asyncio.timeout_at(self._deadline + REPLY_MARGIN_S):
                await self._settle_unknown()
                self._group, self._sequence = self._member.group, self._member.sequence
                return await self._run()
        except TimeoutError:
            error: TensorHubError = WaitTimeout(f"not complete within {self._timeout_s:g} s{self._history()}")
            await self._fail(error)
            raise error.at(self._where) from None
        except OutcomeUnknown as unknown:
            # The bytes are whole and verified, only the decision is not known: keep serving, show no version.
            slot.state = type(slot.state).TORN if self._written else slot.state
            raise unknown.at(self._where) from None
        except TensorHubError as failure:
            await self._fail(failure)
            raise failure.at(self._where) from None
        except BaseException as failure:
            await self._fail(failure)
            raise
        finally:
            slot.notices = None
            slot.transfer = None

    async def _run(self) -> Replication:
        member, slot = self._member, self._slot
        reply = await member.session.call(
            Replicate(
                member.seat,
                slot.buffers.name,
                self._group,
                self._sequence,
                self._selector,
                int(self._timeout_s * NS),
                self._generation,
                serves=self._only is None,
            ),
            self._timeout_s + REPLY_MARGIN_S,
        )
        self._lap("wait")
        match reply:
            case Held(version):
                await self._commit(version, slot.holding.generation, slot.root, 0)
                return self._result(version, held=True)
            case Granted():
                return await self._pull(reply)
            case _:
                raise Broken(f"Replicate was answered by {reply!r}")

    async def _pull(self, grant: Granted) -> Replication:
        slot = self._slot
        self._grant = grant
        drained_s = min(grant.drained_ns / NS, self._phases["wait"])
        self._phases["wait"] -= drained_s
        self._phases["drain"] += drained_s
        source, target, grant = await self._prepare_from_any(grant)
        self._take_over(grant, target)
        if self._only is None:
            await self._call(Serve(self._member.seat, self._generation, slot.holding.locators, slot.holding.exposure))
        self._lap("register")
        filling = self._filling = self._make_filling(grant, target)
        await self._fill(source, grant)
        self._lap("transfer")
        self._phases["verify"] += filling.timers.verify
        self._phases["transfer"] = max(0.0, self._phases["transfer"] - filling.timers.verify)
        root = UNVERIFIED
        if grant.content.verified and self._only is None:
            root = root_digest(slot.holding.manifest.digest, filling.digests)
            self._lap("verify")
        await self._member.offload.run(target.install)
        self._lap("install")
        await self._commit(grant.version, self._generation, root, filling.counter.bytes_done)
        self._lap("wait")
        return self._result(grant.version, held=False)

    # ------------------------------------------------------------ plan

    async def _prepare_from_any(self, grant: Granted) -> tuple[Source, Buffers | Selection, Granted]:
        """Prepare with the first source that answers."""
        for _ in range(REROUTES_MAX):
            source = self._source(grant)
            try:
                return source, await self._prepare(source, grant), grant
            except (SourceFailed, EngineUnavailable) as failure:
                grant = await self._next_grant(source, grant, failure)
        raise SourceFailed(f"{REROUTES_MAX} sources failed in a row{self._history()}")

    async def _prepare(self, source: Source, grant: Granted) -> Buffers | Selection:
        """Everything that can be refused before a byte moves: manifest, aliases, coverage."""
        own = self._slot.buffers
        theirs = await self._manifest(source, grant)
        if self._only is not None:
            return own.subset(self._only, theirs, self._where)
        if self._slot.holding.manifest.digest == grant.content.manifest:
            return self._slot.holding.buffers
        if own.manifest.digest == grant.content.manifest:
            return own
        return own.adopt(theirs, self._where)

    def _source(self, grant: Granted) -> Source:
        choice = choose(self._member.engines, grant.source.locators)
        self._engine = choice.engine
        seat = grant.source.seat
        self._uses.append(
            SourceUse(seat.replica, seat.shard, 0, choice.engine.name, f"{grant.reason}; {choice.reason}")
        )
        return Source(
            str(seat),
            choice.engine,
            choice.peer,
            Exposure.unpack(grant.source.exposure),
            grant.source.session,
            grant.source.generation,
            grant.content.manifest,
        )

    async def _manifest(self, source: Source, grant: Granted) -> Manifest:
        """The version's manifest: our own when it is the same, else the source's, checked against its digest."""
        for known in (self._slot.holding.manifest, self._slot.buffers.manifest):
            if known.digest == grant.content.manifest:
                return known
        encoded = await fetch(source.engine, source.peer, source.exposure.manifest, source.exposure.manifest_bytes)
        manifest = Manifest.decode(encoded)
        if manifest.digest != grant.content.manifest:
            raise SourceFailed("the source's manifest does not match its digest")
        return manifest

    def _take_over(self, grant: Granted, target: Buffers | Selection) -> None:
        """From here on the tensors hold no version. Our own old generation ends before the first byte lands."""
        slot = self._slot
        self._lap("plan")
        slot.holding.end()
        if self._only is None and target is not slot.holding.buffers:
            slot.holding.close()
            # mypy cannot see that only a Selection has no regions
            slot.holding = Holding(target, self._member.engines, self._member.session.id)  # type: ignore[arg-type]
        slot.previous = slot.version if slot.version is not None else slot.previous
        slot.state, slot.version, slot.target = type(slot.state).FILLING, None, grant.version
        slot.verified, slot.hidden, slot.root = grant.content.verified, False, UNVERIFIED
        slot.upstream = grant.source.generation
        slot.pending = None
        self._written = True
        if self._only is None:
            slot.holding.begin(self._generation, digests=grant.content.verified)

    # ------------------------------------------------------------ transfer

    def _make_filling(self, grant: Granted, target: Buffers | Selection) -> Filling:
        manifest, whole = target.manifest, self._only is None
        holding = self._slot.holding
        return Filling(
            manifest,
            target.memory,
            holding.digests if whole else np.zeros(manifest.chunks, dtype=np.uint64),
            Counter(manifest.chunk_ends, None if whole else target.chunks),  # type: ignore[union-attr]
            holding.raise_to if whole else _nothing,
            self._member.offload,
            self._fence,
            grant.content.verified,
        )

    async def _fill(self, source: Source, grant: Granted) -> None:
        """Read from one source after another until the filling is complete."""
        for _ in range(REROUTES_MAX):
            before = self._bytes_done
            try:
                await self._read_from(source, grant)
                self._note_use(before)
                return
            except (SourceFailed, EngineUnavailable) as failure:
                self._note_use(before)
                grant = await self._next_grant(source, grant, failure)
                source = self._source(grant)
        raise SourceFailed(f"{REROUTES_MAX} sources failed in a row{self._history()}")

    async def _read_from(self, source: Source, grant: Granted) -> None:
        filling, slot = self._filling, self._slot
        if filling is None or slot.notices is None:
            raise Broken("a filling was read before it was made")
        reading = asyncio.ensure_future(self._read(filling, source, grant))
        try:
            while not reading.done():
                notice = asyncio.ensure_future(slot.notices.get())
                try:
                    await asyncio.wait([reading, notice], timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
                    if notice.done():
                        self._obey(notice.result(), source)
                finally:
                    notice.cancel()
                await self._post_progress(filling)
            await reading
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, TensorHubError):
                await reading

    async def _read(self, filling: Filling, source: Source, grant: Granted) -> None:
        source_map = await fetch_map(source.engine, source.peer, source.exposure, grant.content.shard_bytes)
        await filling.read_from(source, source_map)

    def _obey(self, notice: Notice, source: Source) -> None:
        match notice:
            case SourceLost(source=lost, reason=reason) if lost == source.generation:
                raise SourceFailed(reason)
            case TransactionAborted(sequence=sequence, reason=reason) if sequence == self._sequence:
                raise GroupAborted(reason)
            case _:
                return  # meant for an earlier source or transaction

    async def _next_grant(self, source: Source, grant: Granted, failure: TensorHubError) -> Granted:
        """Ask the server for another source; go on with a merely silent one when there is none."""
        self._tried.append(f"{source.name}: {failure.message}")
        filling = self._filling
        request = Reroute(
            self._member.seat,
            self._generation,
            source.generation,
            failure.message,
            filling.counter.watermark if filling is not None else 0,
            int(self._left_s() * NS),
        )
        try:
            reply = await self._call(request)
        except VersionUnavailable as lost:
            if filling is not None and filling.stalled:
                return grant
            raise VersionUnavailable(lost.message + self._history(), lost.where) from failure
        if not isinstance(reply, Granted):
            raise Broken(f"Reroute was answered by {reply!r}")
        self._grant = reply
        self._slot.upstream = reply.source.generation
        return reply

    def _fence(self) -> None:
        """Stop reading when the lease may have run out: the source may have been told that we are gone."""
        if self._member.closed:
            raise Closed("the hub was closed")
        if self._member.session.fenced():
            raise LeaseLost(
                f"this process could not reach its server for {self._member.session.lease_s:g} s, its lease"
            )

    # ------------------------------------------------------------ commit and failure

    async def _commit(self, version: Version, generation: Generation, root: bytes, nbytes: int) -> None:
        member, slot = self._member, self._slot
        done = Done(member.seat, self._group, self._sequence, generation, Digest(root), nbytes)
        slot.pending = done if self._written else None
        reply = await self._call(done)
        if not isinstance(reply, Committed) or reply.version != version:
            raise Broken(f"Done of version {version} was answered by {reply!r}")
        self._settle(version, Digest(root))

    def _settle(self, version: Version, root: bytes) -> None:
        slot = self._slot
        slot.pending = None
        self._advance()
        if not self._written:
            return
        states = type(slot.state)
        if self._only is None:
            slot.state, slot.version, slot.root = states.COMPLETE, version, Digest(root)
        else:
            # A mixture of two versions is neither of them.
            slot.state, slot.version = states.EMPTY, None
        slot.target, slot.upstream = None, NO_GENERATION

    def _advance(self) -> None:
        if self._member.group == self._group and self._member.sequence == self._sequence:
            self._member.sequence += 1

    async def _settle_unknown(self) -> None:
        """Ask again how an earlier replicate ended, whose commit reply was lost."""
        pending, slot = self._slot.pending, self._slot
        if pending is None:
            return
        self._group, self._sequence = pending.group, pending.sequence
        try:
            reply = await self._call(pending)
        except (GroupAborted, LeaseLost):
            slot.holding.end()
            slot.pending = None
            self._advance()
            return
        self._advance()
        if isinstance(reply, Committed):
            slot.state, slot.version, slot.root = type(slot.state).COMPLETE, reply.version, pending.root
            slot.pending, slot.target = None, None

    async def _fail(self, failure: BaseException) -> None:
        """Make the failure true everywhere: nothing torn is served, the group knows, the next call starts afresh."""
        slot, member = self._slot, self._member
        if self._written:
            slot.holding.end()
            slot.state, slot.version = type(slot.state).TORN, None
            slot.upstream, slot.pending = NO_GENERATION, None
        elif self._grant is not None:
            # Granted, so our old reference was withdrawn, but not a byte was written: still held, not served.
            slot.hidden = True
        if not isinstance(failure, GroupAborted | Closed):
            reason = failure.message if isinstance(failure, TensorHubError) else type(failure).__name__
            with suppress(TensorHubError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await member.session.call(Abort(member.seat, self._group, self._sequence, reason), ABORT_S)
        self._advance()

    # ------------------------------------------------------------ helpers

    async def _call(self, request: Serve | Reroute | Done) -> object:
        return await self._member.session.call(request, self._left_s() + REPLY_MARGIN_S)

    async def _post_progress(self, filling: Filling) -> None:
        with suppress(TensorHubError):
            await self._member.session.post(
                Progress(self._member.seat, self._generation, filling.counter.watermark, filling.counter.bytes_done)
            )

    @property
    def _bytes_done(self) -> int:
        return self._filling.counter.bytes_done if self._filling is not None else 0

    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._loop.time())

    def _lap(self, phase: str) -> None:
        now = self._loop.time()
        self._phases[phase] += now - self._mark
        self._mark = now

    def _note_use(self, before: int) -> None:
        if self._filling is not None and self._uses:
            use = self._uses[-1]
            moved = self._bytes_done - before
            self._uses[-1] = SourceUse(use.replica, use.shard, use.nbytes + moved, use.engine, use.reason)

    def _history(self) -> str:
        return f"; tried {'; '.join(self._tried)}" if self._tried else ""

    def _transfer(self) -> Transfer:
        filling, grant = self._filling, self._grant
        manifest = self._slot.holding.manifest
        done = filling.counter.watermark if filling is not None else 0
        return Transfer(
            str(grant.version) if grant is not None else str(self._selector),
            str(grant.source.seat) if grant is not None else "",
            self._engine.name if self._engine is not None else "",
            self._bytes_done,
            grant.content.shard_bytes if grant is not None else 0,
            manifest.entries_done(done),
            len(manifest.names),
        )

    def _result(self, version: Version, *, held: bool) -> Replication:
        return Replication(
            version.number,
            version.lineage,
            self._bytes_done,
            self._loop.time() - self._began,
            tuple(self._uses),
            dict(self._phases),
            held,
            self._slot.verified,
        )


def _nothing(watermark: int) -> None:
    """A subset shows no watermark: it never serves."""
