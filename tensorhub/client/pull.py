"""One replicate of one shard, from the request to the commit.

It decides what a failure means for the registered tensors: nothing happened yet (their old version stays), or bytes
may have landed (torn). Which version and which source, the server decides; how bytes move, `pipeline/follow.py`.

    Replicate -> Held ------------------------------------------------> Done -> Committed
              -> Granted -> manifest, map, plan -> end own generation -> (Serve, if it was not offered with Replicate)
                         -> follow source -> (source failed -> Reroute -> follow the next)
                         -> install -> Done -> Committed
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from tensorhub.client.arrival import Arrival
from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.client.results import PHASES, Replication
from tensorhub.client.sources import Sources
from tensorhub.client.telling import replication_of
from tensorhub.client.transaction import ABORT_S, Transaction
from tensorhub.errors import (
    Broken,
    Closed,
    EngineUnavailable,
    GroupAborted,
    LeaseLost,
    OutcomeUnknown,
    SourceFailed,
    TensorHubError,
    WaitTimeout,
    Where,
)
from tensorhub.messages import (
    Granted,
    Held,
    Notice,
    Progress,
    Serve,
    SourceLost,
    TransactionAborted,
)
from tensorhub.pipeline.counter import Counter
from tensorhub.pipeline.digest import root_digest
from tensorhub.pipeline.follow import BEAT_S, Filling
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.source import Blame, Source, fetch, fetch_map
from tensorhub.types import UNVERIFIED, Generation, Selector

if TYPE_CHECKING:
    from tensorhub.client.buffers import Buffers, Selection
    from tensorhub.client.holding import Holding
    from tensorhub.client.member import Member
    from tensorhub.client.on_device import Mark
    from tensorhub.client.slot import Slot

#: How often the server hears of a running filling: enough for a live picture, nothing beside one heartbeat.
PROGRESS_S = 0.5
#: And at first of a source: rates are measured from the first one on, and a slow host is to be found soon.
FIRST_PROGRESS_S = (0.05, 0.2, 0.2, 0.2)
FORGOTTEN = "this process was silent for longer than its lease, and its server has given it up"
#: Beyond the margin of the calls within, so that their errors arrive first: a lost commit is `OutcomeUnknown`, no mere
#: timeout. Two timeouts at one instant would end as the outer one.
OUTER_MARGIN_S = REPLY_MARGIN_S + ABORT_S + 0.5


class Pull:
    """A single use object: `run()` once. What it has come to is open to `telling.py`."""

    def __init__(
        self,
        member: Member,
        slot: Slot,
        selector: Selector,
        timeout_s: float,
        only: Sequence[str] | None,
        streams: Mark | None = None,
    ) -> None:
        self._member = member
        self.slot = slot
        #: What the server says meanwhile.
        self.notices: asyncio.Queue[Notice] = asyncio.Queue()
        self.selector = selector
        self.only = only
        self._loop = asyncio.get_running_loop()
        self.began = self._mark = self._loop.time()
        self._timeout_s = timeout_s
        self._deadline = self.began + timeout_s
        self.generation = Generation(member.fresh())
        self.transaction = Transaction(member, slot, self.left_s)
        on_device = slot.buffers.on_device
        kinds = on_device.kinds if on_device is not None else frozenset()
        self.sources = Sources(member, self.generation, self.left_s, kinds)
        #: Where the caller's streams were when it called.
        self._streams = streams
        #: How the server was told that the filling will be shown; None: not at all.
        self.offer: Holding | None = None
        self._arrival: Arrival | None = None
        self.phases = dict.fromkeys(PHASES, 0.0)
        #: What the server has heard of how we read, and when it last heard of us, or we began to read.
        self._told, self._reported = "", self.began
        self.filling: Filling | None = None
        #: What the server has decided: one of them, or none yet.
        self.grant: Granted | None = None
        self.held: Held | None = None
        #: Lapses of the lease before the grant: one more, and the source may have been told that we are gone.
        self._lapses = member.session.lapses
        #: A byte may have landed: a failure from here on tears the registered tensors.
        self._written = False

    @property
    def _where(self) -> Where:
        version = str(self.grant.version) if self.grant is not None else str(self.selector)
        source = str(self.grant.source.seat) if self.grant is not None else None
        return Where(version=version, bytes_done=self.bytes_done, source=source).over(self._member.where)

    async def run(self) -> Replication:
        """The whole replicate; every error names model, version, replica, shard, source and bytes done."""
        slot = self.slot
        slot.pull = self
        try:
            async with asyncio.timeout_at(self._deadline + OUTER_MARGIN_S):
                await self.transaction.settle_unknown()
                return await self._run()
        except TimeoutError:
            error: TensorHubError = WaitTimeout(f"not complete within {self._timeout_s:g} s{self.sources.history}")
            await self._fail(error)
            raise error.at(self._where) from None
        except OutcomeUnknown as unknown:
            # The bytes are whole and verified, only the decision is not known: keep serving, show no version.
            if self._written:
                slot.tear()
            self.transaction.stop("its deadline passed before it knew of a commit")
            raise unknown.at(self._where) from None
        except TensorHubError as failure:
            await self._fail(failure)
            if self.grant is not None and self._member.session.lapses != self._lapses:
                raise LeaseLost(f"{FORGOTTEN}: {failure.message}").at(self._where) from failure
            failure.at(self._where)
            raise
        except BaseException as failure:
            await self._fail(failure)
            raise
        finally:
            slot.pull = None

    async def _run(self) -> Replication:
        slot = self.slot
        offer = self.offer = slot.holding if self.only is None else None
        reply = await self.transaction.ask(self.selector, self.generation, self._timeout_s, offer)
        self._lap("wait")
        if isinstance(reply, Held):
            self.held = reply
            await self.transaction.commit(reply.version, self.generation, slot.root, 0)
            return replication_of(self, reply.version)
        self.grant, self._lapses = reply, self._member.session.lapses
        drained_s = min(reply.drained_ns / NS, self.phases["wait"])
        self.phases["wait"] -= drained_s
        self.phases["drain"] += drained_s
        return await self._pull(reply)

    async def _pull(self, grant: Granted) -> Replication:
        slot, whole = self.slot, self.only is None
        source, target = await self._prepare_from_any(grant)
        self._lap("plan")
        self._take_over(grant, target)
        if whole and not (slot.holding is self.offer and slot.holding.manifest.digest == grant.content.manifest):
            self._told = self.sources.route
            request = Serve(
                self._member.seat, self.generation, slot.holding.locators, slot.holding.exposure, self._told
            )
            await self._member.session.call(request, self.left_s() + REPLY_MARGIN_S)
        self._lap("register")
        arrival = self._arrival = Arrival(target.on_device, self._streams, self._member.offload, self.left_s)
        await arrival.begin()
        filling = self.filling = self._make_filling(grant, target, arrival)
        await self._fill(source, filling)
        self._lap("transfer")
        self.phases["transfer"] -= filling.confirm_s
        self.phases["verify"] += filling.confirm_s
        root = UNVERIFIED
        if grant.content.verified and whole:
            root = root_digest(target.manifest.digest, filling.digests)
            self._lap("verify")
        await self._member.offload.run(target.install)
        await arrival.finish()
        self._lap("install")
        await self.transaction.commit(grant.version, self.generation, root, self.bytes_done)
        self._lap("wait")
        slot.complete(grant.version, root)
        return replication_of(self, grant.version)

    # ------------------------------------------------------------ plan

    async def _prepare_from_any(self, grant: Granted) -> tuple[Source, Buffers | Selection]:
        """Prepare with the first source that answers."""
        while True:
            began = self._loop.time()
            try:
                source = self.sources.open(grant)
                return source, await self._prepare(source, grant)
            except (SourceFailed, EngineUnavailable) as failure:
                blame = Blame.SILENCE if self._loop.time() - began >= self._member.stall_s else Blame.ENGINE
                grant = self.grant = await self.sources.next(grant, failure, 0, 0, blame)

    async def _prepare(self, source: Source, grant: Granted) -> Buffers | Selection:
        """Everything that can be refused before a byte moves: manifest, aliases, coverage."""
        own = self.slot.buffers
        theirs = await self._manifest(source, grant)
        if self.only is not None:
            return own.subset(self.only, theirs, self._where)
        if self.slot.holding.manifest.digest == theirs.digest:
            return self.slot.holding.buffers
        return own if own.manifest.digest == theirs.digest else own.adopt(theirs, self._where)

    async def _manifest(self, source: Source, grant: Granted) -> Manifest:
        """The version's manifest: our own when it is the same, else the source's, checked against its digest."""
        for known in (self.slot.holding.manifest, self.slot.buffers.manifest):
            if known.digest == grant.content.manifest:
                return known
        exposure = source.exposure
        with self._reading():
            encoded = await fetch(
                source.engine, source.peer, exposure.manifest, exposure.manifest_bytes, self._member.stall_s
            )
        manifest = Manifest.decode(encoded)
        if manifest.digest != grant.content.manifest:
            raise SourceFailed("the source's manifest does not match its digest")
        return manifest

    def _take_over(self, grant: Granted, target: Buffers | Selection) -> None:
        """From here on the tensors hold no version. Our own old generation ends before the first byte lands."""
        slot = self.slot
        self._written = True
        slot.holding.end()
        is_whole = self.only is None
        slot.fill(grant.version, verified=grant.content.verified, is_whole=is_whole)
        if not is_whole:
            return
        if target is not slot.holding.buffers:
            # Only a Selection has no regions, and only `only` makes one.
            slot.show(target, self._member.engines, self._member.session.id)  # type: ignore[arg-type]
        slot.holding.begin(self.generation, digests=grant.content.verified)

    # ------------------------------------------------------------ transfer

    def _make_filling(self, grant: Granted, target: Buffers | Selection, arrival: Arrival) -> Filling:
        manifest, whole = target.manifest, self.only is None
        holding = self.slot.holding

        def raise_to(watermark: int) -> None:
            if whole:  # a subset never serves
                holding.raise_to(watermark)
            arrival.reach(watermark)

        def shown(watermark: int) -> None:
            holding.shown(watermark)
            arrival.reach(watermark)

        return Filling(
            manifest,
            target.memory,
            holding.digests if whole else np.zeros(manifest.chunks, dtype=np.uint64),
            Counter(manifest.chunk_ends, None if whole else target.wanted),  # type: ignore[union-attr]
            raise_to,
            shown,
            self._fence,
            grant.content.verified,
            arrival.digest_landed,
            arrival.batch_bytes_min,
            stall_s=self._member.stall_s,
            beat=holding.beat if whole else _nothing,
            own_block=holding.block if whole else 0,
            sample_s=arrival.sample_s,
        )

    async def _fill(self, source: Source, filling: Filling) -> None:
        """Read from one source after another until the filling is complete."""
        opened: Source | None = source
        while True:
            before = filling.counter.bytes_done
            try:
                if opened is None:  # one that we have failed with before may be granted again
                    opened = self.sources.open(self._granted)
                with self._reading():
                    return await self._read_from(opened, filling)
            except (SourceFailed, EngineUnavailable) as failure:
                counter = filling.counter
                with _beating(filling):
                    self.grant = await self.sources.next(
                        self._granted, failure, counter.watermark, counter.bytes_done, filling.blame
                    )
            finally:
                self.sources.count(filling.counter.bytes_done - before)
            opened = None

    async def _read_from(self, source: Source, filling: Filling) -> None:
        """Follow one source, telling the server how far we are, until it is read, lost, or the group is aborted."""
        self._reported = self._loop.time()
        if self.sources.route != self._told:
            await self._post_progress(filling)
        reading = asyncio.ensure_future(_read(source, filling))
        periods_s = iter(FIRST_PROGRESS_S)
        try:
            while not reading.done():
                notice = asyncio.ensure_future(self.notices.get())
                try:
                    await asyncio.wait(
                        [reading, notice], timeout=next(periods_s, PROGRESS_S), return_when=asyncio.FIRST_COMPLETED
                    )
                    if notice.done():
                        self._obey(notice.result(), source, filling)
                finally:
                    notice.cancel()
                if not reading.done():
                    await self._post_progress(filling)
            await reading
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, TensorHubError):
                await reading

    def _obey(self, notice: Notice, source: Source, filling: Filling) -> None:
        match notice:
            case SourceLost(source=lost, reason=reason) if lost == source.generation:
                filling.blame = Blame.SOURCE
                raise SourceFailed(reason)
            case TransactionAborted(sequence=sequence, reason=reason) if sequence == self.transaction.sequence:
                raise GroupAborted(reason)
            case _:
                return  # meant for an earlier source or transaction

    async def _post_progress(self, filling: Filling) -> None:
        filling.sample()
        counter, route, now = filling.counter, self.sources.route, self._loop.time()
        news, period_ns = "" if route == self._told else route, int((now - self._reported) * NS)
        told = Progress(self._member.seat, self.generation, counter.watermark, counter.bytes_done, news, period_ns)
        with suppress(TensorHubError):
            await self._member.session.post(told)
            self._told, self._reported = route, now

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A read of another's memory: not begun without a lease, and `close` leaves the seat only after it."""
        self._fence()
        ended = self.slot.reading = self._loop.create_future()
        try:
            yield
        finally:
            self.slot.reading = None
            ended.set_result(None)

    def _fence(self) -> None:
        """Stop reading when the server says that it has forgotten us: the source may have been told that we are gone.

        While it says nothing it may as well be dead itself, and no reason to stop: what the source overwrites meanwhile
        is noticed, as it ends its generation first.
        """
        if self._member.closed:
            raise Closed("the hub was closed")
        if self._member.session.lapses != self._lapses:
            raise LeaseLost(FORGOTTEN)

    # ------------------------------------------------------------ the end

    async def _fail(self, failure: BaseException) -> None:
        """Make the failure true everywhere: nothing torn is served, the group knows, the next call starts afresh."""
        if self._arrival is not None:
            await self._arrival.close()
        if self._written:
            self.slot.holding.end()
            self.slot.tear()
        elif self.grant is not None:
            # Granted, so our old reference was withdrawn, but not a byte was written: still held, not served.
            self.slot.hidden = True
        await self.transaction.abort(failure)

    @property
    def _granted(self) -> Granted:
        if self.grant is None:
            raise Broken("a source was read without a grant")
        return self.grant

    @property
    def bytes_done(self) -> int:
        return self.filling.counter.bytes_done if self.filling is not None else 0

    def left_s(self) -> float:
        return max(0.0, self._deadline - self._loop.time())

    def _lap(self, phase: str) -> None:
        now = self._loop.time()
        self.phases[phase] += now - self._mark
        self._mark = now


def _nothing() -> None:
    """Nobody looks."""


@contextmanager
def _beating(filling: Filling) -> Iterator[None]:
    """While we wait for another source, those that read from here see that we live."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            filling.beat()

    beating = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        beating.cancel()


async def _read(source: Source, filling: Filling) -> None:
    began, stream_bytes = asyncio.get_running_loop().time(), filling.manifest.stream_bytes
    try:
        source_map = await fetch_map(source.engine, source.peer, source.exposure, stream_bytes, filling.stall_s)
    except SourceFailed:
        filling.blame = Blame.ENGINE
        filling.note_silence(began)
        raise
    await filling.read_from(source, source_map)
