"""The server's actor over a machine that breaks when it is told to. In a module of its own: Ray's workers import it."""

from __future__ import annotations

from typing import Any

from tensorhub.server.ray_actor import ReferenceServer
from tests.support.fake_machine import FakeMachine


class BreakableServer(ReferenceServer):
    """`Abort` with reason "break" breaks it."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._host._machine = FakeMachine()
