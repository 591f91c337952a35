"""Reads that occupy threads: how an event loop waits for them, ends them early, and never leaves one behind.

Knows nothing of what the threads do, but that they return soon after `cancel`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tensorhub.errors import Closed


class Crews:
    """The reads of one engine that run in threads. For one event loop at a time."""

    def __init__(self) -> None:
        #: What each awaits, and how to end it early: `end` does the one and waits for the other.
        self._running: dict[asyncio.Future[None], Callable[[], None]] = {}

    async def run(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[], object],
        cancel: Callable[[], None],
        threads: int,
        deadline_ns: int,
    ) -> None:
        """Do `work` in several threads; return when none works on it any more, also when cancelled meanwhile.

        Raises what `work` raised. What has not begun at the deadline never does; what has must see it by itself.
        """
        crew = _Crew(work, threads, asyncio.get_running_loop())
        jobs: list[Future[None]] = []
        lacking: RuntimeError | None = None
        try:
            while len(jobs) < threads:
                jobs.append(pool.submit(crew.work))
        except RuntimeError as error:
            lacking = error
            cancel()  # those that have begun, which are waited for as ever
            crew.turn_away()
            jobs.clear()
        self._running[crew.finished] = cancel
        cancelled: asyncio.CancelledError | None = None
        left_s: float | None = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        while not crew.finished.done():
            try:
                await asyncio.wait([crew.finished], timeout=left_s)
            except asyncio.CancelledError as error:
                cancel()
                cancelled = error
            if not crew.finished.done():
                # Out of time: what runs ends by itself, what still waits behind other reads must not start.
                for job in jobs:
                    if job.cancel():
                        crew.leave()
                left_s = None
        del self._running[crew.finished]
        if lacking is not None:
            raise Closed("this process is ending, or has no thread left") from lacking
        if crew.error is not None:
            raise crew.error
        if cancelled is not None:
            raise cancelled

    async def end(self) -> None:
        """End every read that runs; return when no thread works on any."""
        for cancel in self._running.values():
            cancel()
        while self._running:
            await asyncio.wait(list(self._running))


class _Crew:
    """Threads that work on one read; the loop hears once, from the last of them."""

    def __init__(self, work: Callable[[], object], threads: int, loop: asyncio.AbstractEventLoop) -> None:
        self.finished: asyncio.Future[None] = loop.create_future()
        self.error: BaseException | None = None
        self._work = work
        self._loop = loop
        #: Guards the counts of those still at work and still to come; a queue would wake the loop once for each.
        self._lock = threading.Lock()
        self._left = self._expected = threads
        #: Of those that have not begun, none may begin any more.
        self._is_full = False

    def work(self) -> None:
        with self._lock:
            if self._is_full:
                return
            self._expected -= 1
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again where the read is awaited
            self.error = error
        self.leave()

    def turn_away(self) -> None:
        """Go on with those that have begun: a pool without threads may keep a job, and do it whenever it has one."""
        with self._lock:
            self._is_full = True
            absent = self._expected
        for _ in range(absent):
            self.leave()

    def leave(self) -> None:
        """One fewer; the last one tells the loop."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)
