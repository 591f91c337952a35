"""Questions to a server without taking a seat: what is there, and what a version is like.

Decides nothing; each question uses the process's session with that server, or one of its own that ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tensorhub.client.hub import CLOSE_S, default_server, expect, model_key
from tensorhub.client.margins import NS, REPLY_MARGIN_S
from tensorhub.client.runtime import Runtime
from tensorhub.client.session import Session
from tensorhub.messages import Found, List, Listing, Status, StatusView, VersionView, Wait
from tensorhub.types import Location, ModelKey, Selector, check_timeout

T = TypeVar("T")


def server_status(
    *, server: str | None = None, model: str | None = None, job: str | None = None, timeout: float = 10.0
) -> StatusView:
    """What a server knows, of one model or of all, without taking a seat. `NoServer` where there is none: looking does
    not start one."""
    return expect(_ask(server, model, job, Status, timeout), StatusView)


def server_versions(
    *, server: str | None = None, model: str | None = None, job: str | None = None, timeout: float = 10.0
) -> tuple[VersionView, ...]:
    """The versions a server knows, of one model or of all, without taking a seat; else as `server_status`."""
    return expect(_ask(server, model, job, List, timeout), Listing).versions


def wait_for_version(
    model: ModelKey, selector: Selector, *, server: str | None, location: Location, timeout_s: float
) -> VersionView:
    """The row of the version that the selector names, as soon as there is one to read; `WaitTimeout` when there is not.

    Starts a "local" server where there is none, as `open` does.
    """

    async def ask(session: Session) -> VersionView:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            left_s = max(0.0, deadline - loop.time())
            wait = Wait(model, selector, location, int(left_s * NS))
            version = expect(await session.call(wait, left_s + REPLY_MARGIN_S), Found).version
            rows = expect(await session.call(List(model), left_s + REPLY_MARGIN_S), Listing).versions
            for row in rows:
                if row.version == version:
                    return row
            # Gone between the two questions: what the selector names now is another.

    return _with_session(default_server(server), ask, timeout_s, may_start=True)


def _ask(server: str | None, model: str | None, job: str | None, kind: type[Status | List], timeout: float) -> object:
    request, timeout_s = kind(None if model is None else model_key(model, job)), check_timeout(timeout)
    return _with_session(default_server(server), lambda session: session.call(request, timeout_s), timeout_s)


def _with_session(
    address: str, ask: Callable[[Session], Coroutine[Any, Any, T]], timeout_s: float, *, may_start: bool = False
) -> T:
    runtime = Runtime.acquire()

    async def run() -> T:
        session = await runtime.session(address, timeout_s, may_start=may_start)
        try:
            return await ask(session)
        finally:
            await runtime.leave_session(session, CLOSE_S)

    try:
        return runtime.run(run(), timeout_s + REPLY_MARGIN_S)
    finally:
        runtime.release()
