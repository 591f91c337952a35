"""Puts one failure into one process: at the k-th suspension of its tasks, or at its engine's k-th call.

It decides where and when; what must be true afterwards, `aftermath.py` says. A run without a failure counts the
places first, so that every one of them can be visited, each in a fresh and equal world.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from tensorhub.errors import EngineUnavailable, SourceFailed
from tensorhub.ports import Chunks, Ranges
from tests.sim.memory import SimEngine
from tests.sim.strands import _CURRENT, Strand, _make_task


class Mode(enum.Enum):
    """What happens at a suspension."""

    #: The operation's task is cancelled while it waits, or in the instant at which what it waits for has come.
    CANCEL = "cancel"
    CANCEL_LATE = "cancel late"
    #: Any task of the process meets an error that nobody expects, before what it waits for happens, or after.
    RAISE = "raise"
    RAISE_LATE = "raise late"
    #: The hub is closed by another task, while the operation waits.
    CLOSE = "close"
    #: The server dies, and comes back empty.
    RESTART = "restart"


#: What an engine's call may raise; the last ones it never should.
ERRORS: dict[str, Callable[[], BaseException]] = {
    "unavailable": lambda: EngineUnavailable("the engine cannot"),
    "failed": lambda: SourceFailed("the source cannot"),
    "os": lambda: OSError(5, "Input/output error"),
    "memory": MemoryError,
}
#: These concern the task of the operation alone: nobody else may cancel, or close from within, what the client spawned.
OF_THE_CALLER = (Mode.CANCEL, Mode.CANCEL_LATE, Mode.CLOSE, Mode.RESTART)


class Injected(RuntimeError):
    """An error that no code expects."""


@dataclass(eq=False)
class Injection:
    """One failure, or with `at=0` none: then it counts. `mode` is None for one of the engine."""

    mode: Mode | None
    at: int = 0
    #: Of an engine's call: what it raises.
    error: Callable[[], BaseException] = Injected
    #: Suspensions, or calls, seen while armed, and where each was.
    sites: list[str] = field(default_factory=list)
    #: Where it struck.
    struck: str = ""
    on_close: Callable[[], None] = lambda: None
    on_restart: Callable[[], None] = lambda: None
    main: asyncio.Task[Any] | None = None
    _strand: Strand | None = None

    def arm(self, strand: Strand) -> None:
        self._strand = strand

    def disarm(self) -> None:
        self._strand = None

    def is_armed(self, strand: Strand) -> bool:
        return strand is self._strand

    def make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """A task factory under which every suspension of a process's tasks is seen."""
        strand = _CURRENT.get() if context is None else context.get(_CURRENT, None)
        return _make_task(loop, work if strand is None else _Watched(work, strand, self), context)

    def strikes(self, strand: Strand, site: Callable[[], str]) -> bool:
        """Whether this suspension, the next of its process, is the one."""
        if strand is not self._strand or self.mode is None:
            return False
        if self.mode in OF_THE_CALLER and asyncio.current_task() is not self.main:
            return False
        return self._counted(site())

    def called(self, strand: Strand, call: str) -> None:
        """The process's engine is called: raises if this call is the one."""
        if strand is self._strand and self.mode is None and self._counted(call):
            raise self.error()

    def _counted(self, site: str) -> bool:
        self.sites.append(site)
        if len(self.sites) != self.at:
            return False
        self.struck = site
        return True


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine whose suspensions are counted, and one of them spoiled."""

    def __init__(self, work: Coroutine[Any, Any, Any], strand: Strand, injection: Injection) -> None:
        self._work, self._strand, self._injection = work, strand, injection
        #: To be raised instead of what comes next.
        self._late: BaseException | None = None
        self.__name__, self.__qualname__ = work.__name__, work.__qualname__

    def send(self, value: Any) -> Any:
        late, self._late = self._late, None
        if late is not None and self._injection.is_armed(self._strand):
            return self._watch(self._work.throw(late))
        return self._watch(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        self._late = None
        return self._watch(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError("only a task runs it")

    def _watch(self, waits_for: asyncio.Future[Any] | None) -> Any:
        if not self._injection.strikes(self._strand, lambda: site_of(self._work)):
            return waits_for
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("only a task is watched")
        match self._injection.mode:
            case Mode.RAISE:
                if waits_for is not None:
                    waits_for._asyncio_future_blocking = False
                return self._watch(self._work.throw(Injected()))
            case Mode.RAISE_LATE:
                self._late = Injected()
            case Mode.CANCEL_LATE if waits_for is not None:
                # This callback comes before the task's own, so that the cancellation meets what has happened.
                waits_for.add_done_callback(lambda _: task.cancel())
            case Mode.CANCEL | Mode.CANCEL_LATE:
                task.cancel()
            case Mode.CLOSE:
                self._injection.on_close()
            case Mode.RESTART:
                self._injection.on_restart()
        return waits_for


def site_of(work: Any) -> str:
    """Where a coroutine waits: the functions of its stack, and the line of the last one of ours."""
    names, line = [], 0
    while work is not None:
        frame = getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None) or getattr(work, "ag_frame", None)
        if frame is None:
            break
        names.append(work.__qualname__.rpartition(".")[2])
        if "tensorhub" in frame.f_code.co_filename:
            line = frame.f_lineno
        work = getattr(work, "cr_await", None) or getattr(work, "gi_yieldfrom", None)
    return f"{'>'.join(names)}:{line}"


class FailingEngine:
    """A process's engine, of which one call fails."""

    name = SimEngine.name
    kinds = frozenset({"host"})

    def __init__(self, inner: SimEngine, injection: Injection) -> None:
        self._inner, self._injection = inner, injection
        #: {range: how often it is registered}; none of them is 0.
        self.registered: dict[tuple[int, int], int] = {}

    def locate(self) -> bytes:
        self._injection.called(self._inner.process.strand, "locate")
        return self._inner.locate()

    def reaches(self, peer: bytes) -> str | None:
        return self._inner.reaches(peer)

    def register(self, address: int, nbytes: int) -> None:
        self._injection.called(self._inner.process.strand, "register")
        self._inner.register(address, nbytes)
        self.registered[address, nbytes] = self.registered.get((address, nbytes), 0) + 1

    def deregister(self, address: int, nbytes: int) -> None:
        self._inner.deregister(address, nbytes)
        self.registered[address, nbytes] -= 1
        if not self.registered[address, nbytes]:
            del self.registered[address, nbytes]
        self._injection.called(self._inner.process.strand, "deregister")  # done, and not well

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        self._injection.called(self._inner.process.strand, "read")
        await self._inner.read(peer, ranges, timeout_s, chunks)

    async def close(self) -> None:
        await self._inner.close()
