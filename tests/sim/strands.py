"""Threads of execution that can be stopped from outside: what SIGSTOP is to a process, on a loop that all share.

A strand is whatever stops together: a process's interpreter, its heartbeat thread. Every callback of the loop belongs
to the strand in whose context it was scheduled, or to none (the world itself). A frozen strand's callbacks and timers
are kept, in order, while time goes by; thawed, they run at once, late, as they do in a process that was stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

from tests.support.virtual_time import VirtualLoop

#: The strand that runs now; None for the world.
_CURRENT: ContextVar[Strand | None] = ContextVar("strand", default=None)


class Strand:
    """One thread of a simulated process. Used only in a `StrandLoop`."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Tasks that run in it, oldest first.
        self.tasks: dict[asyncio.Task[Any], None] = {}
        #: What its own code runs in.
        self.context = copy_context()
        self.context.run(_CURRENT.set, self)
        self._frozen_since_s: float | None = None
        self._frozen_s = 0.0
        #: (handle, what it calls), in the order in which it became due.
        self._held: list[tuple[asyncio.Handle, Callable[[], object]]] = []

    @property
    def frozen(self) -> bool:
        return self._frozen_since_s is not None

    def frozen_s(self, now_s: float) -> float:
        """For how long it has been frozen in its life."""
        return self._frozen_s + (0.0 if self._frozen_since_s is None else now_s - self._frozen_since_s)

    def freeze(self) -> None:
        """Run nothing until `thaw`. Idempotent."""
        if self._frozen_since_s is None:
            self._frozen_since_s = asyncio.get_running_loop().time()

    def thaw(self) -> None:
        """Run what became due meanwhile, in order. Idempotent."""
        if self._frozen_since_s is None:
            return
        loop = asyncio.get_running_loop()
        self._frozen_s += loop.time() - self._frozen_since_s
        self._frozen_since_s = None
        held, self._held = self._held, []
        for handle, call in held:
            loop.call_soon(_unless_cancelled, handle, call, context=self.context)

    def hold(self, handle: asyncio.Handle, call: Callable[[], object]) -> None:
        """Keep what became due. For `StrandLoop`."""
        self._held.append((handle, call))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this strand."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all its tasks; returns them."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        return tasks


class StrandLoop(VirtualLoop):
    """Virtual time on which strands can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        strand = _CURRENT.get() if context is None else context.get(_CURRENT, None)
        if strand is None or not strand.frozen:
            return super().call_soon(callback, *args, context=context)
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        strand.hold(handle, lambda: context.run(callback, *args))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        strand = _CURRENT.get() if context is None else context.get(_CURRENT, None)
        if strand is None:
            return super().call_at(when, callback, *args, context=context)

        def fire() -> None:
            if strand.frozen:
                strand.hold(timer, lambda: inside.run(callback, *args))
            else:
                callback(*args)

        inside = copy_context() if context is None else context
        timer = super().call_at(when, fire, context=inside)
        return timer


def run_stranded(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on a `StrandLoop`."""
    with asyncio.Runner(loop_factory=StrandLoop) as runner:
        return runner.run(main)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    strand = _CURRENT.get() if context is None else context.get(_CURRENT, None)
    if strand is not None:
        strand.tasks[task] = None
        task.add_done_callback(lambda done: strand.tasks.pop(done, None))
    return task


def _unless_cancelled(handle: asyncio.Handle, call: Callable[[], object]) -> None:
    if not handle.cancelled():
        call()
