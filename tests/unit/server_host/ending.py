"""A host for tests of server commands that ends as soon as it runs, as if its process had been told to."""

from __future__ import annotations

import os
import signal

from tensorhub.errors import Broken
from tensorhub.server.host import Host
from tests.support.fake_machine import FakeMachine


class Ending(Host):
    """By a signal to its process, or broken."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(FakeMachine())
        self._broken = broken

    async def run(self) -> None:
        if self._broken:
            raise Broken("an invariant does not hold")
        os.kill(os.getpid(), signal.SIGTERM)
        await super().run()
