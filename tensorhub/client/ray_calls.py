"""The way to a Ray actor where nothing but Ray gets through: frames as arguments and results of its methods.

It decides how frames become calls: one hand-in at a time, since Ray promises no order, and one poll that waits. Slower
than frames over TCP by an order of magnitude, and its heartbeat is a task of this process: it does not survive an
interpreter that is held for longer than the lease.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from tensorhub.client import ray_runtime
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.messages import Answer, Beat, Call, Ok
from tensorhub.types import SessionId
from tensorhub.wire.codec import decode_answer, encode_call

#: Calls that wait to be handed in; beyond it `send` waits: the server's own inbox is full.
CALLS_WAITING_MAX = 256
#: For the actor to take calls in; it waits while its inbox is full.
SUBMIT_S = 10.0
#: More than the actor lets a poll wait (`server/polled.py`), by what a busy cluster adds.
TAKE_S = 20.0
#: To say that a connection is over; if that does not get through, the server notices by itself.
CLOSE_S = 1.0
#: Beats that may be late by so many intervals, and at least by what a call takes on a busy node.
BEAT_PATIENCE = 3
BEAT_ACK_S = 2.0


class CallsConnection:
    """One connection by calls of `actor`. Two tasks: one hands calls in, one polls for answers."""

    def __init__(self, actor: Any, door_id: str, server: str) -> None:
        self._actor = actor
        self._door_id = door_id
        self._server = server
        self._calls: deque[bytes] = deque()
        self._answers: deque[bytes] = deque()
        #: Why it is over, or None.
        self._over: str | None = None
        #: Something of the above has changed.
        self._changed = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._until_over(work)) for work in (self._hand_in(), self._poll())]

    @classmethod
    async def open(cls, actor: Any, peer: str, server: str, timeout_s: float) -> CallsConnection:
        doing = f"opening a connection to {server} by actor calls"
        return cls(actor, await ray_runtime.called(actor.open, peer, timeout_s=timeout_s, doing=doing), server)

    async def send(self, call: Call) -> None:
        """`BadRequest` when the call has no bytes; then nothing was sent."""
        data = encode_call(call)
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or len(self._calls) < CALLS_WAITING_MAX)
            self._check()
            self._calls.append(data)
            self._changed.notify_all()

    async def receive(self) -> Answer:
        """Bounded by the heartbeat, and by the polls."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._over or self._answers)
            if not self._answers:
                self._check()
            data = self._answers.popleft()
            self._changed.notify_all()
        try:
            return decode_answer(data)
        except BadRequest as error:
            raise ServerUnavailable(f"{self._server} speaks badly: {error}") from error

    async def close(self) -> None:
        if self._over is None:
            await self._end("this side closed the connection")
            with suppress(ServerUnavailable):  # it is over either way
                await self._call("close", timeout_s=CLOSE_S)
        self.abandon()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def abandon(self) -> None:
        """End what runs here; the server notices that nobody polls."""
        for task in self._tasks:
            task.cancel()

    def _check(self) -> None:
        if self._over is not None:
            raise ServerUnavailable(f"the connection to {self._server} by actor calls is over: {self._over}")

    async def _hand_in(self) -> str:
        """All calls that wait, as one: the next only when it is through. Why this ended."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._calls)
                batch = list(self._calls)
                self._calls.clear()
                self._changed.notify_all()
            closed: str | None = await self._call("submit", batch, timeout_s=SUBMIT_S)
            if closed is not None:
                return closed

    async def _poll(self) -> str:
        """Answers, fetched when those before are read. Why this ended."""
        while True:
            answers, closed = await self._call("take", timeout_s=TAKE_S)
            if closed is not None:
                return str(closed)
            async with self._changed:
                self._answers.extend(answers)
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._answers)

    async def _until_over(self, work: Coroutine[Any, Any, str]) -> None:
        try:
            await self._end(await work)
        except ServerUnavailable as error:
            await self._end(error.message)

    async def _end(self, why: str) -> None:
        async with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    async def _call(self, method: str, *arguments: object, timeout_s: float) -> Any:
        doing = f"{method} of {self._server}"
        return await ray_runtime.called(
            getattr(self._actor, method), self._door_id, *arguments, timeout_s=timeout_s, doing=doing
        )


class CallsHeart:
    """Beats by calls, from a task of the running loop, over a connection of its own."""

    def __init__(self, connection: CallsConnection, session: bytes, interval_ns: int) -> None:
        self._acknowledged_ns = 0
        self._failed: str | None = None
        self._task = asyncio.create_task(self._beat(connection, SessionId(session), interval_ns / 1e9))
        self._task.add_done_callback(lambda _: connection.abandon())  # also one that never came to run

    def acknowledged_ns(self) -> int:
        return self._acknowledged_ns

    def failed(self) -> str | None:
        return self._failed

    def stop(self) -> None:
        """From the loop's own thread, as everything here."""
        self._failed = self._failed or "stopped"
        self._task.cancel()

    async def _beat(self, connection: CallsConnection, session: SessionId, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                sent_s = loop.time()
                async with asyncio.timeout(max(BEAT_PATIENCE * interval_s, BEAT_ACK_S)):
                    await connection.send(Call(1, Beat(session)))
                    answer = await connection.receive()
                if answer != Answer(1, Ok()):
                    self._failed = f"another reply than expected: {answer.reply}"
                    return
                self._acknowledged_ns = round(sent_s * 1e9)
                await asyncio.sleep(max(0.0, sent_s + interval_s - loop.time()))
        except ServerUnavailable as error:
            self._failed = self._failed or error.message
        except TimeoutError:
            self._failed = self._failed or "no reply in time"
        finally:
            await connection.close()
