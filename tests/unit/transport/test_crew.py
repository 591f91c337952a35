"""Reads that occupy threads, when there is no thread to be had: none of them goes on behind its caller's back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tensorhub.errors import Closed
from tensorhub.transport.crew import Crews
from tensorhub.transport.following import NEVER_NS
from tests.support.streams import PATIENCE_S


class ShortOfThreads(ThreadPoolExecutor):
    """Has one thread; like the real pool of a process that gets no other, it keeps the job and raises."""

    def __init__(self) -> None:
        super().__init__(1)
        self.jobs = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs += 1
        kept = super().submit(fn, *args, **kwargs)
        if self.jobs > 1:
            raise RuntimeError("can't start new thread")
        return kept


def test_a_crew_without_threads_ends_with_those_that_have_begun() -> None:
    """timeout_then_late_write: a read that gets only some of its threads returns when they have ended, and none that
    comes later touches what was the read's."""
    began, cancelled, done = threading.Event(), threading.Event(), []

    def work() -> None:
        began.set()
        assert cancelled.wait(PATIENCE_S)
        done.append(threading.current_thread())

    def cancel() -> None:
        assert began.wait(PATIENCE_S)
        cancelled.set()

    async def run() -> None:
        with pytest.raises(Closed, match="no thread left"):
            await Crews().run(pool, work, cancel, 3, NEVER_NS)
        assert len(done) == 1, "it has ended, not only been told to"

    with ShortOfThreads() as pool:
        asyncio.run(run())
    assert len(done) == 1, "what the pool kept was turned away"
