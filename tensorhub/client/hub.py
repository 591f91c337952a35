"""The public object: one shard of one replica, as its process uses it.

Every method is synchronous, has a deadline in seconds, and may be called from any one thread at a time; the work is
done by `client/member.py` on the runtime's loop. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tensorhub.client import ray_runtime
from tensorhub.client.holding import direct_kinds
from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.client.member import Member
from tensorhub.client.results import Replication, Transfer
from tensorhub.client.runtime import Runtime, close_at_exit
from tensorhub.client.session import Session
from tensorhub.client.telling import transfer_of
from tensorhub.errors import BadRequest, Broken, Closed, ServerUnavailable
from tensorhub.messages import Event, Found, List, Listing, Status, StatusView, VersionView, Wait
from tensorhub.pipeline.source import STALL_S
from tensorhub.ports import Engine
from tensorhub.transport.route import advertised_host
from tensorhub.types import (
    DEFAULT_BUFFERS,
    DEFAULT_LINEAGE,
    ID_BYTES,
    SHARDS_MAX,
    TIMEOUT_S_MAX,
    Location,
    ModelKey,
    ReplicaId,
    Seat,
    Selector,
    check_name,
    check_texts,
    check_timeout,
    parse_selector,
)

if TYPE_CHECKING:
    import torch

    from tensorhub.client.allocating import Make
    from tensorhub.client.on_device import Mark

    Tensors = Mapping[str, torch.Tensor] | torch.nn.Module

T = TypeVar("T")

#: A server that is away must not hold up the end of a process.
CLOSE_S = 5.0

Digests = Literal["background", "now", "off"]


class Hub:
    """A seat in a model: made by `tensorhub.open`, a context manager, closed at exit.

    `publish` what is registered, or `replicate` into it. Tensors are written in place, their `data_ptr` never changes.
    """

    def __init__(self, runtime: Runtime, member: Member) -> None:
        self._runtime = runtime
        self._member = member
        self._closed = False
        self._forget = close_at_exit(self.close)

    def __repr__(self) -> str:
        states = ", ".join(f"{name}: {slot.describe()}" for name, slot in self._member.slots.items()) or "unregistered"
        return f"<tensorhub.Hub {self._member.seat.model} {self._member.seat} {states}>"

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ tensors

    def register(self, tensors: Tensors, *, buffers: str = DEFAULT_BUFFERS) -> None:
        """Name the tensors to publish from or replicate into: a mapping of names to tensors, or an nn.Module.

        Once per set of memory; again after tensors were allocated anew. `buffers` names a second set for double
        buffering. Raises `UnsupportedTensor` listing every tensor without plain memory of its own.
        """
        from tensorhub.client import registry

        check_name("buffers", buffers)
        fresh = registry.register(
            tensors, name=buffers, where=self._member.where, direct=direct_kinds(self._member.engines)
        )
        self._on_loop(_call(lambda: self._member.register(fresh)), CLOSE_S)

    def register_as_published(self, make: Make | None = None, *, buffers: str = DEFAULT_BUFFERS) -> None:
        """Let the version say which tensors there are: `replicate` makes them, and `tensors` names them.

        `make(name, shape, dtype)` returns a contiguous tensor in host memory, whatever it holds; `torch.empty` else.
        Versions whose names, shapes, dtypes and ties are the same share one set of tensors; another gets new ones.
        """
        from tensorhub.client.allocating import AsPublished

        fresh = AsPublished.of(check_name("buffers", buffers), make, self._member.where)
        self._on_loop(_call(lambda: self._member.register(fresh)), CLOSE_S)

    def tensors(self, *, buffers: str = DEFAULT_BUFFERS) -> dict[str, torch.Tensor]:
        """{name: tensor} of what is registered. After `register_as_published`: of what was replicated last."""
        shown: Any = self._member.slot(buffers).holding.buffers
        named: dict[str, torch.Tensor] = shown.named()
        return named

    def publish(
        self,
        *,
        version: int,
        buffers: str = DEFAULT_BUFFERS,
        digest: Digests = "background",
        timeout: float = 30.0,
    ) -> None:
        """Announce the registered tensors as `version`, in place; returns in milliseconds, whatever their size.

        From now on they are immutable until `unpublish`. Digests follow in the background, readers start at once below
        them. `digest="now"` digests first, so that no write can slip in between, at the cost of one pass;
        `digest="off"` gives verification up, visibly. Raises `AlreadyPublished`, `VersionOrder`, `VersionConflict`,
        `NotRegistered`, `Busy`, `ServerUnavailable`.
        """
        if digest not in ("background", "now", "off"):
            raise BadRequest(f"digest is 'background', 'now' or 'off', not {digest!r}")
        timeout = check_timeout(timeout)
        mark = self._mark(buffers, gather=True)
        self._on_loop(self._member.publish(version, buffers, digest, timeout, mark), timeout)

    def unpublish(self, *, timeout: float = 30.0, abandon: bool = False, buffers: str = DEFAULT_BUFFERS) -> None:
        """Hide, drain, return: now the optimizer may write.

        Raises `DrainTimeout` (and stays hidden) when readers are left after `timeout` seconds, `ContractBroken` when a
        tensor was written to while published, `VersionConflict` when others published the same version with other
        bytes. `abandon=True` does not wait: readers that overlap fail untorn.
        """
        timeout = check_timeout(timeout)
        self._on_loop(self._member.unpublish(buffers, timeout, abandon=abandon), timeout)

    def replicate(
        self,
        version: object = "latest",
        *,
        timeout: float = 60.0,
        only: Iterable[str] | None = None,
        buffers: str = DEFAULT_BUFFERS,
    ) -> Replication:
        """Pull a version into the registered tensors, verify every byte, then serve it.

        `version`: an int, "latest", "latest-1", `AtLeast(7)`, `Newest(staleness=2)`. Waits until a match exists. All
        shards of the replica get the same version; returns after the whole group has committed. `only` updates exactly
        the named tensors, serves nobody, and leaves `hub.version` at None. On failure the tensors count as torn, unless
        not a byte was written.
        """
        selector, timeout = parse_selector(version), check_timeout(timeout)
        names = None if only is None else self._names(only)
        mark = self._mark(buffers, gather=False)
        return self._on_loop(self._member.replicate(selector, buffers, timeout, names, mark), timeout)

    def suspend(self, *, timeout: float = 30.0) -> None:
        """Before an engine frees its weights: leave the source pool, drain, deregister. Use after it is an error."""
        timeout = check_timeout(timeout)
        self._on_loop(self._member.suspend(timeout), timeout)

    def resume(self, tensors: Tensors, *, buffers: str = DEFAULT_BUFFERS) -> None:
        """After the engine has its weights again, perhaps elsewhere. They hold no version until a fresh replicate."""
        from tensorhub.client import registry

        fresh = registry.register(
            tensors, name=buffers, where=self._member.where, direct=direct_kinds(self._member.engines)
        )
        self._on_loop(_call(lambda: self._member.resume([fresh])), CLOSE_S)

    # ------------------------------------------------------------ what there is

    @property
    def closed(self) -> bool:
        """True after `close()`, and in a forked child."""
        return self._closed or self._runtime.pid != os.getpid()

    @property
    def version(self) -> int | None:
        """What the registered tensors (set "a") hold now, whole; None while filling, torn or unregistered."""
        slot = self._member.slots.get(DEFAULT_BUFFERS)
        return slot.version.number if slot is not None and slot.version is not None else None

    @property
    def state(self) -> dict[str, str]:
        """{buffers: state in words}, for example `torn(target 7, previous 6)`."""
        return {name: slot.describe() for name, slot in self._member.slots.items()}

    @property
    def staged_bytes(self) -> int:
        """Staging memory held beside the registered tensors: for tiny and strided ones, and for what lies on devices
        that not every engine reads."""
        return sum(slot.holding.buffers.staged_bytes for slot in self._member.slots.values())

    def progress(self, *, buffers: str = DEFAULT_BUFFERS) -> Transfer | None:
        """The running replicate of a buffer set, or None. Cheap, from any thread."""
        slot = self._member.slots.get(buffers)
        pull = slot.pull if slot is not None else None
        return transfer_of(pull) if pull is not None else None

    def versions(self, *, timeout: float = 10.0) -> list[VersionView]:
        """All versions of this model that the server knows, newest first."""
        timeout = check_timeout(timeout)
        reply = self._on_loop(self._member.session.call(List(self._member.seat.model), timeout), timeout)
        return list(expect(reply, Listing).versions)

    def status(self, *, timeout: float = 10.0) -> StatusView:
        """Sessions, versions, holdings and waits of this model, as the server sees them."""
        timeout = check_timeout(timeout)
        reply = self._on_loop(self._member.session.call(Status(self._member.seat.model), timeout), timeout)
        return expect(reply, StatusView)

    def wait(self, version: object = "latest", *, timeout: float = 60.0) -> int:
        """Block until a version matches, without pulling it; its number. Raises `WaitTimeout`."""
        member, timeout = self._member, check_timeout(timeout)
        request = Wait(member.seat.model, parse_selector(version), member.location, int(timeout * NS))
        reply = self._on_loop(member.session.call(request, timeout + REPLY_MARGIN_S), timeout + REPLY_MARGIN_S)
        return expect(reply, Found).version.number

    def watch(self, *, timeout: float = 60.0) -> Iterator[Event]:
        """Changes of this model as they happen, until none comes for `timeout` seconds."""
        timeout = check_timeout(timeout)
        events = self._member.session.watch(self._member.seat.model)
        try:
            while (event := self._on_loop(_next(events, timeout), timeout)) is not None:
                yield event
        finally:
            if not self._closed:
                self._on_loop(events.aclose(), CLOSE_S)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Give up the seat; readers go elsewhere. Idempotent. Call `unpublish` first to let them finish."""
        if self._closed or self._runtime.pid != os.getpid():
            return
        self._closed = True
        self._forget()
        try:
            self._runtime.run(_close(self._runtime, self._member), CLOSE_S * 3)
        finally:
            self._runtime.release()

    def _on_loop(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        if self._closed:
            work.close()
            raise Closed("the hub is closed; open a new one", self._member.where)
        return self._runtime.run(work, timeout_s)

    def _mark(self, buffers: str, *, gather: bool) -> Mark | None:
        """Where this thread's device streams are now; None for host memory. A current stream is one of a thread."""
        slot = self._member.slots.get(buffers)
        on_device = slot.buffers.on_device if slot is not None else None
        return on_device.mark(gather=gather) if on_device is not None else None

    def _names(self, only: Iterable[str]) -> Sequence[str]:
        names = [only] if isinstance(only, str) else list(only)
        if not names:
            raise BadRequest("only=[] names no tensor; leave it out to replicate all", self._member.where)
        return names


def open(  # noqa: A001  a public name, as in gzip and tarfile
    model: str,
    *,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    server: str | None = None,
    job: str | None = None,
    engine: str | Sequence[str] = "auto",
    spot: bool = False,
    location: str | None = None,
    lineage: str | None = None,
    layout: str = "",
    timeout: float = 30.0,
) -> Hub:
    """Take the seat of shard `shard` of `shards` in `replica`.

    `server`: "local" (default; or TENSORHUB_SERVER), "local:NAME", "ray://NAME", "grpc://HOST:PORT", "grpcs://…" or
    "frames://HOST:PORT".
    `engine`: "auto", a name ("memory", "cuda_ipc", "local", "mooncake", "tcp"), or several in order of preference; what
    is named must start. `job` separates runs on one cluster (TENSORHUB_JOB, else Ray's job, else "default"). `spot`
    marks a replica that may vanish.
    `location` is "dc/rack/host" (TENSORHUB_LOCATION). A trainer that resumes from a checkpoint opens a new `lineage`
    (TENSORHUB_LINEAGE). `layout` names how the model is cut into shards; different ones do not mix. Raises `SeatTaken`,
    `LayoutMismatch`, `BadRequest`, `ServerUnavailable`.
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= SHARDS_MAX:
        raise BadRequest(f"shards must be an int from 1 to {SHARDS_MAX}, not {shards!r}")
    if isinstance(shard, bool) or not isinstance(shard, int) or not 0 <= shard < shards:
        raise BadRequest(f"shard must be an int from 0 to {shards - 1}, not {shard!r}")
    timeout = check_timeout(timeout)
    key = model_key(model, job)
    seat = Seat(key, ReplicaId(check_name("replica", replica)), shard)
    place = place_of(location)
    branch = check_name("lineage", lineage or os.environ.get("TENSORHUB_LINEAGE") or DEFAULT_LINEAGE)
    address = default_server(server)
    preference = check_texts("engine", engine)
    runtime = Runtime.acquire()
    try:
        member = runtime.run(
            _join(runtime, address, preference, seat, shards, layout, branch, spot, place, timeout), timeout
        )
    except BaseException:
        runtime.release()
        raise
    return Hub(runtime, member)


def default_server(server: str | None) -> str:
    """The server to use when the caller names none."""
    return server or os.environ.get("TENSORHUB_SERVER") or "local"


def model_key(model: str, job: str | None) -> ModelKey:
    """A model of a job; without a job, of the one that this process belongs to."""
    return ModelKey(check_name("job", job or default_job()), check_name("model", model))


def place_of(location: str | None) -> Location:
    """Where this process is: as the caller says, else TENSORHUB_LOCATION, else unknown."""
    return Location.parse(location if location is not None else os.environ.get("TENSORHUB_LOCATION", ""))


def default_stall_s() -> float:
    """TENSORHUB_STALL_S, else `STALL_S`: seconds without progress after which a reader gives a source up."""
    text = os.environ.get("TENSORHUB_STALL_S")
    try:
        seconds = STALL_S if not text else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TIMEOUT_S_MAX:
        raise BadRequest(f"TENSORHUB_STALL_S={text!r} is no number of seconds from 0 to {TIMEOUT_S_MAX}")
    return seconds


def default_job() -> str:
    """TENSORHUB_JOB, else the id of the Ray job this process runs in, else "default"."""
    named = os.environ.get("TENSORHUB_JOB")
    if named:
        return named
    ray_job = ray_runtime.job_id()
    return "default" if ray_job is None else f"ray-{ray_job}"


async def _join(
    runtime: Runtime,
    address: str,
    preference: tuple[str, ...],
    seat: Seat,
    shards: int,
    layout: str,
    lineage: str,
    spot: bool,
    location: Location,
    timeout_s: float,
) -> Member:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    # One deadline for all of it, and for others of this process that open theirs first.
    session: Session = await _by(deadline, runtime.session(address, timeout_s), f"{address} gave no session")
    engines = None
    try:
        host = await _by(deadline, session.own_host(), f"the way to {address} was not found")
        engines = runtime.engines(preference, advertised_host(host))
        member = Member(
            session,
            engines,
            runtime.foreground,
            runtime.background,
            seat,
            shards,
            layout,
            lineage,
            spot,
            location,
            lambda: secrets.token_bytes(ID_BYTES),
            default_stall_s(),
        )
        await member.join(max(0.0, deadline - loop.time()))
        return member
    except BaseException:
        await _leave(runtime, session, engines)
        raise


async def _by(deadline: float, work: Coroutine[Any, Any, T], failure: str) -> T:
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        raise ServerUnavailable(f"{failure} in time; is this machine, or the server's, overloaded?") from None


async def _close(runtime: Runtime, member: Member) -> None:
    try:
        await member.close(CLOSE_S)
    finally:
        await _leave(runtime, member.session, member.engines)


async def _leave(runtime: Runtime, session: Session, engines: list[Engine] | None) -> None:
    """Give back what a hub shares with others of its process, all of it whatever fails."""
    try:
        if engines is not None:
            await runtime.leave_engines(engines)
    finally:
        await runtime.leave_session(session, CLOSE_S)


async def _call(work: Callable[[], None]) -> None:
    work()


async def _next(events: AsyncIterator[Event], timeout_s: float) -> Event | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(events)
    except (StopAsyncIteration, TimeoutError):
        return None


def expect(reply: object, kind: type[T]) -> T:
    """The reply, as what it must be."""
    if not isinstance(reply, kind):
        raise Broken(f"expected {kind.__name__}, the server answered {reply!r}")
    return reply


__all__ = ["Hub", "Selector", "default_job", "default_server", "open"]
