"""An asyncio loop whose clock jumps to the next timer instead of waiting: hours pass at once, nothing sleeps.

It has no selector, no socket and no thread: whoever opens one gets `NotImplementedError`. What is due at the same time
runs in the order in which it was scheduled.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

#: Zero would be falsy, and is what uninitialised clocks show.
BEGIN_S = 1000.0


class _Handle(asyncio.Handle):
    """What asyncio's own is, without looking whether the loop debugs: made for each callback, so its making counts."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: VirtualLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(_Handle, asyncio.TimerHandle):
    """The same, with a time."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        _Handle.__init__(self, callback, args, loop, context)
        self._when = when
        self._scheduled = True


class VirtualLoop(asyncio.BaseEventLoop):
    """Its `time` moves only when nothing is left to do now. `events` counts the callbacks that ran."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = BEGIN_S
        self._due: deque[asyncio.Handle] = deque()
        #: (time, number, handle): the number keeps the order of those due at one time.
        self._timers: list[tuple[float, int, _Timer]] = []
        self._scheduled_count = 0
        self.events = 0
        #: Asked before each callback runs, when set; True says that it was taken away and will be given back.
        self._withholds: Callable[[asyncio.Handle], bool] | None = None

    def time(self) -> float:
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError("Event loop is closed")
        handle = _Handle(callback, args, self, context)
        self._due.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError("Event loop is closed")
        self._scheduled_count += 1
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, self._scheduled_count, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def close(self) -> None:
        super().close()
        self._due.clear()
        self._timers.clear()

    def _run_once(self) -> None:
        """Everything that is due, once; if nothing is, first go to when something will be."""
        due, timers = self._due, self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not due:
            if not timers:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                raise AssertionError("nothing is left that could ever happen: every task waits without a deadline")
            self._now_s = max(self._now_s, timers[0][0])
        while timers and timers[0][0] <= self._now_s:
            due.append(heapq.heappop(timers)[2])
        for _ in range(len(due)):
            handle = due.popleft()
            if not handle._cancelled and (self._withholds is None or not self._withholds(handle)):
                self.events += 1
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time has come."""

    def _write_to_self(self) -> None:
        """Nobody waits anywhere: what another thread or a signal has scheduled is seen at once."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
