"""One life of the server: a machine, checked as it goes, and the host that drives it, until it is killed.

It decides nothing: who talks to which life, the world says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tensorhub.messages import Beat, Request
from tensorhub.server.host import Host
from tensorhub.server.machine import Machine
from tensorhub.server.settings import SECOND_NS, Settings
from tensorhub.server.turn import Outgoing
from tensorhub.types import Epoch, SessionId

SETTINGS = Settings(lease_ns=6 * SECOND_NS, beat_ns=2 * SECOND_NS, quarantine_ns=6 * SECOND_NS)
LEASE_S = SETTINGS.lease_ns / 1e9


class Life:
    """A server from its birth, empty, to its end. `gap` says after how many steps its machine is checked next."""

    def __init__(self, epoch: bytes, gap: Callable[[], int]) -> None:
        loop = asyncio.get_running_loop()
        self.machine = Machine(Epoch(epoch), SETTINGS)
        self.host = Host(CheckedMachine(self.machine, gap), lambda: round(loop.time() * 1e9))
        self._running = loop.create_task(self.host.run())

    async def end(self, why: str) -> None:
        """Stop serving; what is queued is lost."""
        self.host.stop(why)
        await asyncio.wait([self._running])

    def crashed(self) -> Exception | None:
        """What ended it, if that was a mistake."""
        if not self._running.done() or self._running.cancelled():
            return None
        error = self._running.exception()
        return error if isinstance(error, Exception) else None


class CheckedMachine:
    """The machine, whose invariants are checked after some of its steps: a check looks at everything.

    What breaks a promise leaves it broken for a while: a look at one step of a few finds it almost as soon, for much
    less. `gap` says after how many steps the next look comes.
    """

    def __init__(self, inner: Machine, gap: Callable[[], int]) -> None:
        self.inner = inner
        self._gap, self._steps_left = gap, gap()

    def receive(self, now_ns: int, sender: SessionId, call: int, request: Request) -> list[Outgoing]:
        out = self.inner.receive(now_ns, sender, call, request)
        if not isinstance(request, Beat):
            self._check()
        return out

    def disconnected(self, now_ns: int, sender: SessionId) -> list[Outgoing]:
        out = self.inner.disconnected(now_ns, sender)
        self._check()
        return out

    def tick(self, now_ns: int) -> list[Outgoing]:
        out = self.inner.tick(now_ns)
        self._check()
        return out

    def _check(self) -> None:
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._steps_left = self._gap()
            self.inner.check()

    def next_deadline_ns(self) -> int | None:
        return self.inner.next_deadline_ns()
