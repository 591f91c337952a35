"""The reference server's Ray actor, counting where its CPU time goes. Nothing else differs from the real one."""

from __future__ import annotations

from bench.timed_server import Shares
from tensorhub.server.ray_actor import ReferenceServer


class CountingServer(ReferenceServer):
    """The actor, with one more method."""

    def __init__(self, name: str) -> None:
        self._shares = Shares()
        self._shares.install()
        super().__init__(name, None, None, "WARNING")

    async def counted(self) -> dict[str, float]:
        """As `Shares.found`."""
        return self._shares.found()
