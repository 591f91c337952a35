"""The one background thread of a process, and what all hubs of the process share: sessions, engines, worker threads.

Hubs are synchronous; everything below them is asynchronous and runs on this thread's event loop. The runtime starts
with the first hub and ends with the last: threads and descriptors return to where they were. A forked child must
open hubs of its own: the parent's are unusable there and say so.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tensorhub import native
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.errors import Broken, Closed
from tensorhub.ports import Engine
from tensorhub.transport.router import open_engines
from tensorhub.types import ID_BYTES, SessionId
from tensorhub.wire.token import read_token

T = TypeVar("T")

#: Verification of a pull: as many threads as an engine reads with; more only compete for memory bandwidth.
WORKERS = 2
#: A coroutine enforces its own deadline; this is how much later the caller's thread gives up on it, as a last resort.
STUCK_S = 30.0
JOIN_S = 10.0


class ThreadOffload:
    """Blocking work on a small pool of threads."""

    def __init__(self, threads: int, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=prepare)

    async def run(self, work: Callable[[], T]) -> T:
        try:
            future = self._pool.submit(work)
        except RuntimeError as error:  # the pool, or the interpreter, is shutting down
            raise Closed("this process is ending") from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The work touches memory of the caller's: it must be over before the caller goes on.
            while not future.cancelled() and not future.done():
                await asyncio.wait([asyncio.wrap_future(future)])
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Call(Generic[T]):
    """A coroutine that one thread runs on another's loop, and when it is really over."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended = threading.Event()
        self._work = work
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(lambda _: self.ended.set())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        if self._task is None or self._task.cancelled():
            raise Closed("the hub was closed during this call")
        return self._task.result()


@dataclass(slots=True)
class _Shared:
    """A session or a set of engines, and how many hubs use it."""

    value: Any
    users: int = 0


class Runtime:
    """Use `acquire()` and `release()`; the lock guards the process-wide instance and its count of hubs."""

    _lock = threading.Lock()
    _instance: Runtime | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.hubs = 0
        self.loop = asyncio.new_event_loop()
        self.foreground = ThreadOffload(WORKERS, "tensorhub-verify")
        self.background = ThreadOffload(1, "tensorhub-digest", native.lower_priority)
        #: {(server address, may start it): session}, {preference: engines}; touched on the loop's thread only.
        self._sessions: dict[tuple[str, bool], _Shared] = {}
        self._engines: dict[tuple[tuple[str, ...], str], _Shared] = {}
        self._opening = asyncio.Lock()
        self._thread = threading.Thread(target=self._main, name="tensorhub", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> Runtime:
        """The process's runtime, counted up by one hub."""
        with cls._lock:
            if cls._instance is None or cls._instance.pid != os.getpid():
                cls._instance = cls()
            cls._instance.hubs += 1
            return cls._instance

    def release(self) -> None:
        """One hub less; the last one ends the thread."""
        with self._lock:
            self.hubs -= 1
            if self.hubs > 0 or self.pid != os.getpid():
                return
            if type(self)._instance is self:
                type(self)._instance = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            raise Broken(f"the background thread did not end within {JOIN_S:g} s")
        self.foreground.close()
        self.background.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for it; it has its own deadline of `timeout_s`."""
        if self.pid != os.getpid():
            work.close()
            raise Closed("this hub belongs to the parent process; open a new hub after fork()")
        if threading.current_thread() is self._thread:
            work.close()
            raise Broken("a hub was called from its own background thread")
        call = _Call(work)
        try:
            self.loop.call_soon_threadsafe(call.start)
        except RuntimeError as error:
            work.close()
            raise Closed("the last hub of this process is being closed") from error
        try:
            if not call.ended.wait(timeout_s + STUCK_S):
                raise Broken(f"a call did not honour its deadline of {timeout_s:g} s")
        except BaseException:
            # Whoever interrupts a call may use the tensors as soon as it has returned: it must be over by then.
            self.loop.call_soon_threadsafe(call.cancel)
            call.ended.wait(STUCK_S)
            raise
        return call.result()

    # ------------------------------------------------------------ shared by hubs; on the loop's thread

    async def session(self, address: str, timeout_s: float, *, may_start: bool = True) -> Session:
        """The process's session with that server, opened by whoever comes first.

        Who only looks must not start a server, but uses the session of those who may; never the other way round.
        """
        async with self._opening:
            shared = self._sessions.get((address, True)) or self._sessions.get((address, may_start))
            if shared is None:
                link = parse_server(address, may_start=may_start)
                session = Session(
                    link,
                    SessionId(secrets.token_bytes(ID_BYTES)),
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    token=read_token(),
                )
                await session.open(timeout_s)
                shared = self._sessions[address, may_start] = _Shared(session)
            shared.users += 1
            value: Session = shared.value
            return value

    async def leave_session(self, session: Session, timeout_s: float) -> None:
        """Give back what `session` returned."""
        async with self._opening:
            key, shared = next((key, shared) for key, shared in self._sessions.items() if shared.value is session)
            shared.users -= 1
            if shared.users == 0:
                del self._sessions[key]
                await shared.value.close(timeout_s)

    def engines(self, preference: tuple[str, ...], host: str) -> list[Engine]:
        """The process's engines of that preference whose locators name `host`."""
        shared = self._engines.get((preference, host))
        if shared is None:
            shared = self._engines[preference, host] = _Shared(open_engines(preference, host))
        shared.users += 1
        value: list[Engine] = shared.value
        return value

    async def leave_engines(self, engines: list[Engine]) -> None:
        """Give back what `engines` returned."""
        key, shared = next((key, shared) for key, shared in self._engines.items() if shared.value is engines)
        shared.users -= 1
        if shared.users == 0:
            del self._engines[key]
            ended = await asyncio.gather(*(engine.close() for engine in shared.value), return_exceptions=True)
            if failures := [outcome for outcome in ended if outcome is not None]:
                raise failures[0]

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            if pending:
                self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.close()


_open_hubs: list[Callable[[], None]] = []


def close_at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Have `close` called before the interpreter ends; returns what forgets it again."""
    _open_hubs.append(close)
    return lambda: _open_hubs.remove(close) if close in _open_hubs else None


@atexit.register
def shutdown() -> None:
    """Close every hub of this process, also those of the one-call forms; runs by itself when the interpreter ends."""
    for close in tuple(_open_hubs):  # each removes itself
        close()
