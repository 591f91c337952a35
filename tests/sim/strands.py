"""Threads of execution that can be stopped from outside: what SIGSTOP is to a process, on a loop that all share.

A strand is whatever stops together: a process's interpreter, its heartbeat thread. Every callback of the loop belongs
to the strand in whose context it was scheduled, or to none (the world itself). A frozen strand's callbacks and timers
are kept when their turn comes, in order, while time goes by; thawed, they run at once, late, as they do in a process
that was stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

from tests.support.virtual_time import VirtualLoop

#: The strand that runs now; None for the world.
_CURRENT: ContextVar[Strand | None] = ContextVar("strand", default=None)
#: A strand forgets the tasks that are done when it has made so many more.
TASKS_KEPT_MAX = 64


class Strand:
    """One thread of a simulated process. Used only in a `StrandLoop`."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Tasks that run in it, oldest first; some of them are done.
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_max = TASKS_KEPT_MAX
        #: What its own code runs in.
        self.context = copy_context()
        self.context.run(_CURRENT.set, self)
        self._frozen_since_s: float | None = None
        self._frozen_s = 0.0
        #: In the order in which they became due.
        self._held: list[asyncio.Handle] = []

    @property
    def frozen(self) -> bool:
        return self._frozen_since_s is not None

    def frozen_s(self, now_s: float) -> float:
        """For how long it has been frozen in its life."""
        return self._frozen_s + (0.0 if self._frozen_since_s is None else now_s - self._frozen_since_s)

    def freeze(self) -> None:
        """Run nothing until `thaw`. Idempotent."""
        if self._frozen_since_s is None:
            loop = _loop()
            self._frozen_since_s = loop.time()
            loop.freeze(self)

    def thaw(self) -> None:
        """Run what became due meanwhile, in order. Idempotent."""
        if self._frozen_since_s is None:
            return
        loop = _loop()
        self._frozen_s += loop.time() - self._frozen_since_s
        self._frozen_since_s = None
        held, self._held = self._held, []
        loop.thaw(self, held)

    def hold(self, handle: asyncio.Handle) -> None:
        """Keep what became due. For `StrandLoop`."""
        self._held.append(handle)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this strand."""
        return asyncio.get_running_loop().create_task(work, context=self.context.copy())

    def own(self, task: asyncio.Task[Any]) -> None:
        """Remember a task that was made in this strand. For `StrandLoop`."""
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_max:
            self._tasks = [each for each in self._tasks if not each.done()]
            self._tasks_max = len(self._tasks) + TASKS_KEPT_MAX

    def cancel(self) -> list[asyncio.Task[Any]]:
        """Cancel all its tasks; returns them."""
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        return tasks


class StrandLoop(VirtualLoop):
    """Virtual time on which strands can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: set[Strand] = set()
        self.set_task_factory(_make_task)

    def freeze(self, strand: Strand) -> None:
        """From now on hold what is the strand's. For `Strand`."""
        self._frozen.add(strand)
        self._withholds = self._hold

    def thaw(self, strand: Strand, held: list[asyncio.Handle]) -> None:
        """Run what was held, after what is due already. For `Strand`."""
        self._frozen.discard(strand)
        if not self._frozen:
            self._withholds = None
        self._due.extend(held)

    def _hold(self, handle: asyncio.Handle) -> bool:
        strand = handle._context.get(_CURRENT)  # type: ignore[attr-defined]
        if strand is None or not strand.frozen:
            return False
        strand.hold(handle)
        return True


def run_stranded(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on a `StrandLoop`."""
    with asyncio.Runner(loop_factory=StrandLoop) as runner:
        return runner.run(main)


def _loop() -> StrandLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, StrandLoop):
        raise TypeError(f"strands need a StrandLoop, this is {loop!r}")
    return loop


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    strand = _CURRENT.get() if context is None else context.get(_CURRENT, None)
    if strand is not None:
        strand.own(task)
    return task
