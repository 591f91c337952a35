"""One shard of one replica, as a client: what its buffer sets hold, and the asynchronous form of every hub call.

This module owns the client's truth: each buffer set is a `Slot` (see `slot.py`), and its state changes here.
It never blocks a thread and knows no clock but the loop's, so that the simulation runs it unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tensorhub.client.buffers import Buffers
from tensorhub.client.holding import close_all
from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.client.past import Past
from tensorhub.client.publication import Publication
from tensorhub.client.pull import Pull
from tensorhub.client.results import Replication
from tensorhub.client.session import Session
from tensorhub.client.slot import Slot, State
from tensorhub.errors import (
    AlreadyPublished,
    Broken,
    Busy,
    Closed,
    ContractBroken,
    DrainTimeout,
    EngineUnavailable,
    NotPublished,
    NotRegistered,
    SeatTaken,
    TensorHubError,
    Unavailable,
    UsageError,
    VersionConflict,
    Where,
)
from tensorhub.messages import (
    Announced,
    Conflicted,
    Join,
    Joined,
    Leave,
    Moved,
    Notice,
    Publish,
    Refused,
    Seal,
    SourceLost,
    TransactionAborted,
    Unpublish,
    Unpublished,
)
from tensorhub.pipeline.source import STALL_S
from tensorhub.ports import Engine, Offload
from tensorhub.types import (
    UNVERIFIED,
    Generation,
    Location,
    Seat,
    Selector,
    Version,
    check_version,
)

if TYPE_CHECKING:
    from tensorhub.client.on_device import Mark

#: `unpublish(abandon=True)` returns at once: the server hears it now or later.
ABANDON_S = 1.0
#: After a lost outcome: how long one try to tell the server takes, and how many there are before the lease must do.
RECONCILE_S = 2.0
RECONCILE_TRIES = 30


@dataclass(slots=True)
class Member:
    """A seat that is taken, with its buffer sets. Made by `join`."""

    session: Session
    engines: list[Engine]
    #: Foreground work (verify, install) and background work (digests of a publisher).
    offload: Offload
    background: Offload
    seat: Seat
    shards: int
    layout: str
    lineage: str
    spot: bool
    location: Location
    #: Fresh random ids; a parameter so that a simulation is deterministic.
    fresh: Callable[[], bytes]
    #: Seconds without progress after which a source is given up.
    stall_s: float = STALL_S
    slots: dict[str, Slot] = field(default_factory=dict)
    group: int = 0
    sequence: int = 0
    past: Past = field(default_factory=Past)
    closed: bool = False
    #: The server may believe that this seat holds what it does not, see `_reconcile`.
    unsettled: bool = False
    #: Why the seat is not ours any more: the server gave it to another process after a loss of connection.
    lost: Refused | None = None
    #: Publications' background halves, and words that no server has heard yet.
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def where(self) -> Where:
        return Where(model=str(self.seat.model), replica=self.seat.replica, shard=self.seat.shard, shards=self.shards)

    async def join(self, timeout_s: float) -> None:
        """Take the seat; `SeatTaken` while another live process holds it."""
        self.session.subscribe(self.seat, self._notice, self._join_request)
        try:
            await self.resync(timeout_s)
        except BaseException:
            self.session.unsubscribe(self.seat)
            with suppress(TensorHubError):  # the server may have heard the Join: the seat must not stay taken
                await self.session.post(Leave(self.seat))
            raise

    async def resync(self, timeout_s: float) -> None:
        """Join again, which changes nothing for a seat that is ours, and learn where the group's transactions are."""
        joined = await self.session.call(self._join_request(), timeout_s)
        if not isinstance(joined, Joined):
            raise Broken(f"Join was answered by {joined!r}", self.where)
        self.group, self.sequence = joined.group, joined.sequence
        self.unsettled = False

    def register(self, buffers: Buffers) -> None:
        """Name a set of tensors; again under the same name replaces it, when nothing of it is shown."""
        self._check_open()
        old = self.slots.get(buffers.name)
        if old is not None:
            self._refuse_shown(old, "register again")
            del self.slots[buffers.name]  # a failure from here on leaves nothing that is half registered
            old.holding.close()
        self.slots[buffers.name] = Slot.of(buffers, self.engines, self.session.id)

    def slot(self, name: str) -> Slot:
        """The buffer set of that name, usable; or the error that says why not."""
        self._check_open()
        if self.lost is not None:
            raise SeatTaken(f"this seat was lost: {self.lost.message}", self.lost.where.over(self.where))
        slot = self.slots.get(name)
        if slot is None:
            known = ", ".join(repr(known) for known in self.slots) or "none"
            raise NotRegistered(
                f"no tensors are registered as buffers {name!r} (registered: {known}); call register()", self.where
            )
        if slot.state is State.SUSPENDED:
            raise UsageError(
                f"buffers {name!r} are suspended; call resume() after the engine has its weights again", self.where
            )
        return slot

    # ------------------------------------------------------------ publish

    async def publish(self, number: int, name: str, digest: str, timeout_s: float, mark: Mark | None = None) -> None:
        """Announce in place; digests follow in the background (`digest="background"`), come first ("now"), or never."""
        version = Version(self.lineage, check_version(number))
        with self._exclusive(name, "publish", version) as slot:
            if self.unsettled:
                await self.resync(timeout_s)
            await self._publish(slot, version, digest, timeout_s, mark)

    async def _publish(self, slot: Slot, version: Version, digest: str, timeout_s: float, mark: Mark | None) -> None:
        name = slot.buffers.name
        where = Where(version=str(version)).over(self.where)
        if slot.state in (State.PUBLISHED, State.COMPLETE):
            raise AlreadyPublished(
                f"buffers {name!r} are shown as version {slot.version}; call unpublish() before publishing {version}",
                where,
            )
        slot.buffers.check_in_place(where)
        if slot.holding.buffers is not slot.buffers:
            # A replicate had adopted another publisher's aliases; what we publish has our own.
            slot.show(slot.buffers, self.engines, self.session.id)
        publication = Publication(slot.holding, where, self.background, slot.buffers.counters(), mark)
        slot.buffers.snapshot()
        verified = digest != "off"
        slot.holding.end()  # what a replicate with an unknown outcome left
        slot.holding.begin(Generation(self.fresh()), digests=verified)
        slot.pending = None
        try:
            if digest == "now":
                await publication.run(digests=True)
            request = Publish(
                self.seat,
                name,
                version,
                slot.holding.generation,
                slot.holding.content(verified),
                slot.holding.locators,
                slot.holding.exposure,
            )
            slot.offered = version
            reply = await self.session.call(request, timeout_s)
            if not isinstance(reply, Announced):
                raise Broken(f"Publish was answered by {reply!r}")
            self.past.published(version, reply.lineage)
        except BaseException as failure:
            slot.holding.end()
            if not isinstance(failure, UsageError):
                # The server may have heard it: it must hear that this is over, too.
                self.spawn(self._reconcile())
            raise
        finally:
            slot.offered = None
        slot.state, slot.version, slot.verified, slot.hidden = State.PUBLISHED, version, verified, False
        slot.root, slot.publication, slot.target, slot.previous = UNVERIFIED, publication, None, None
        slot.task = self.spawn(self._finish_publication(slot, publication, verified, timeout_s))

    async def _finish_publication(self, slot: Slot, publication: Publication, verified: bool, timeout_s: float) -> None:
        """Digest, then seal. A broken contract or a conflict is kept for the publisher's next call."""
        try:
            root = publication.root if publication.root is not None else await publication.run(digests=verified)
            if root is None or not verified or publication.stopped:
                return
            await self.session.call(Seal(self.seat, publication.holding.generation, root), timeout_s)
            slot.root = root
        except (ContractBroken, EngineUnavailable):
            await self._withdraw_quietly(slot)
        except VersionConflict as conflict:
            publication.broken = publication.broken or conflict
        except (Unavailable, NotPublished, Closed):
            # The server is away, or has forgotten this: `rejoin` claims the root once it is back. If it has forgotten
            # because of an unpublish meanwhile, the slot is about to be cleared anyway.
            slot.root = publication.root or UNVERIFIED
        except Exception as failure:  # noqa: BLE001 - nobody else would hear of it, and readers would wait
            publication.broken = Broken(f"the digests of {slot.version} failed: {failure!r}", self.where)
            await self._withdraw_quietly(slot)

    async def _withdraw_quietly(self, slot: Slot) -> None:
        """Nobody may start to read what its publisher spoils; who reads already fails untorn."""
        slot.hidden = True
        told = Unpublish(self.seat, slot.buffers.name, slot.holding.generation, 0, abandon=True)
        with suppress(TensorHubError):
            await self.session.call(told, REPLY_MARGIN_S)

    # ------------------------------------------------------------ unpublish

    async def unpublish(self, name: str, timeout_s: float, *, abandon: bool) -> None:
        """Hide, drain, invalidate. `DrainTimeout` leaves it hidden; `abandon` returns at once."""
        with self._exclusive(name, "unpublish") as slot:
            await self._unpublish(slot, timeout_s, abandon=abandon)

    async def _unpublish(self, slot: Slot, timeout_s: float, *, abandon: bool) -> None:
        name = slot.buffers.name
        if slot.state not in (State.PUBLISHED, State.COMPLETE):
            raise NotPublished(f"buffers {name!r} are {slot.describe()}: there is nothing to unpublish", self.where)
        where = Where(version=str(slot.version)).over(self.where)
        slot.hidden = True
        readers: tuple[str, ...] = ()
        request = Unpublish(self.seat, name, slot.holding.generation, int(timeout_s * NS), abandon)
        if abandon:
            slot.holding.end()  # first of all: who reads on must fail
        try:
            reply = await self.session.call(
                request, min(timeout_s, ABANDON_S) if abandon else timeout_s + REPLY_MARGIN_S
            )
            readers = reply.served if isinstance(reply, Unpublished) else ()
        except NotPublished:
            pass  # drained, when the answer was lost; or withdrawn after a conflict
        except DrainTimeout as error:
            raise error.at(where) from None
        except Unavailable as error:
            if not abandon:
                raise DrainTimeout(f"nobody could confirm that all readers are gone: {error.message}", where) from error
            self.spawn(self._reconcile())
        await self._take_back(slot)
        publication, slot.publication = slot.publication, None
        if publication is not None:
            publication.raise_if_broken(readers, where)

    async def _take_back(self, slot: Slot) -> None:
        """The last step of an unpublish: end the generation, stop the digests; the tensors are the user's again."""
        slot.holding.end()
        if slot.publication is not None:
            slot.publication.stopped = True
        if slot.task is not None:
            if slot.publication is not None and slot.publication.root is not None:
                slot.task.cancel()  # only its word to the server is outstanding, perhaps for long
            await asyncio.wait([slot.task])
            slot.task = None
        slot.clear()

    # ------------------------------------------------------------ replicate

    async def replicate(
        self,
        selector: Selector,
        name: str,
        timeout_s: float,
        only: Sequence[str] | None,
        mark: Mark | None = None,
    ) -> Replication:
        """Pull a version into the registered tensors, then serve it. See `client/pull.py`."""
        with self._exclusive(name, "replicate") as slot:
            if self._pulls():
                # Their transactions would have one number: what ends one would end the grant of the other.
                raise Busy("this shard replicates into other buffers already; one at a time", self.where)
            if slot.state is State.PUBLISHED:
                raise AlreadyPublished(
                    f"buffers {name!r} are published as version {slot.version}; unpublish before replicating into them",
                    self.where,
                )
            slot.buffers.check_large_in_place(self.where)
            slot.buffers.check_writable(self.where)
            if slot.state is State.COMPLETE and slot.holding.buffers.changed(slot.counters):
                # Written to since: it is that version no more, whatever the server says, and nobody may read it.
                await self._withdraw_quietly(slot)
                await self._take_back(slot)
            return await Pull(self, slot, selector, timeout_s, only, mark).run()

    # ------------------------------------------------------------ suspend, close

    async def suspend(self, timeout_s: float) -> None:
        """Leave the source pool, drain, and deregister every buffer set, before its memory is freed."""
        self._check_open()
        for slot in self.slots.values():
            self._refuse_busy(slot, "suspend")
        for name, slot in self.slots.items():
            if slot.state in (State.PUBLISHED, State.COMPLETE):
                await self.unpublish(name, timeout_s, abandon=False)
        for slot in self.slots.values():
            slot.state, slot.version = State.SUSPENDED, None
        close_all(slot.holding.close for slot in self.slots.values())

    def resume(self, buffers: Sequence[Buffers]) -> None:
        """The engine has its weights again, perhaps elsewhere: these sets are registered afresh and hold nothing."""
        for fresh in buffers:
            self.register(fresh)

    async def close(self, timeout_s: float) -> None:
        """Give up the seat: readers go elsewhere. Idempotent; never raises for a server that is away."""
        if self.closed:
            return
        self.closed = True
        try:
            await self._leave(timeout_s)
        finally:
            self.session.unsubscribe(self.seat)
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            try:
                close_all(slot.close for slot in self.slots.values())
            finally:
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, timeout_s: float) -> None:
        # Leaving says that we read nothing: the fence lets no read begin any more, those under way end first.
        reading = [slot.reading for slot in self.slots.values() if slot.reading is not None]
        if reading:
            await asyncio.wait(reading, timeout=timeout_s)
        with suppress(TensorHubError):  # the lease ends what cannot be said
            await self.session.call(Leave(self.seat), timeout_s)

    # ------------------------------------------------------------ what the session tells us

    def _notice(self, notice: Notice | Joined | Refused) -> None:
        match notice:
            case Joined(group=group, sequence=sequence):
                self.group, self.sequence, self.lost = group, sequence, None
                for pull in self._pulls():
                    pull.transaction.end_behind(group, sequence, pull.notices)
            case Refused():
                self.lost = notice
            case Moved(group=group, sequence=sequence):
                self.group, self.sequence = group, sequence
            case TransactionAborted(group=group, sequence=sequence) if not self._pulls():
                # Siblings have used this number up without us; ours is the next, or we would never meet again.
                if group == self.group:
                    self.sequence = max(self.sequence, sequence + 1)
            case SourceLost() | TransactionAborted():
                for pull in self._pulls():
                    pull.notices.put_nowait(notice)
            case Conflicted(generation=generation, reason=reason):
                for slot in self.slots.values():
                    if slot.publication is not None and slot.holding.generation == generation:
                        slot.publication.broken = VersionConflict(reason, self.where)

    def _pulls(self) -> list[Pull]:
        return [slot.pull for slot in self.slots.values() if slot.pull is not None]

    def _join_request(self) -> Join:
        slots = [slot for _, slot in sorted(self.slots.items())]
        claims = tuple(claim for slot in slots if (claim := slot.claim()) is not None)
        undertaken = next(filter(None, (slot.undertaken() for slot in slots)), None)
        standing = self.past.standing(self.group, self.sequence, claims, undertaken)
        return Join(self.seat, self.shards, self.layout, self.spot, self.location, claims, standing)

    # ------------------------------------------------------------ helpers

    async def _reconcile(self) -> None:
        """After an outcome that was lost: say what this seat holds until the server has heard it."""
        self.unsettled = True
        for _ in range(RECONCILE_TRIES):
            try:
                await self.resync(RECONCILE_S)
            except Unavailable:
                await asyncio.sleep(RECONCILE_S)
            except TensorHubError:
                return  # the seat is lost, or the session is over: then so is what it held
            if not self.unsettled:
                return

    def _check_open(self) -> None:
        if self.closed:
            raise Closed("the hub is closed; open a new one", self.where)

    @contextmanager
    def _exclusive(self, name: str, what: str, version: Version | None = None) -> Iterator[Slot]:
        """The usable slot of that name, for one operation at a time, whose errors say of what it was."""
        slot = self.slot(name)
        self._refuse_busy(slot, what)
        slot.running = what
        try:
            yield slot
        except TensorHubError as error:
            error.at(Where(version=None if version is None else str(version)).over(self.where))
            raise
        finally:
            slot.running = None

    def _refuse_busy(self, slot: Slot, what: str) -> None:
        if slot.running is not None:
            raise Busy(
                f"cannot {what} buffers {slot.buffers.name!r}: {slot.running} is running on them "
                f"(now {slot.describe()}); one operation at a time, call again when it has returned",
                self.where,
            )

    def _refuse_shown(self, slot: Slot, what: str) -> None:
        self._refuse_busy(slot, what)
        if slot.state in (State.PUBLISHED, State.COMPLETE):
            raise AlreadyPublished(
                f"buffers {slot.buffers.name!r} are {slot.describe()}; unpublish before you {what}", self.where
            )

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Work that outlives the call that it is of; it ends with this member."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
