"""An emulated cluster: many hosts on one machine, real processes on them, real packets between them at set rates.

    with Cluster([Host("trainer"), Host("reader", mbit=50)]) as cluster, cluster.team() as team:
        team["trainer"].call(function, ...)

It needs root and says so. Leaving it takes everything down; so does the next run, if this one is killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

from bench.cluster.commands import check_able
from bench.cluster.hosts import Host, Numbers, Plan
from bench.cluster.network import Network
from bench.cluster.workers import enter
from bench.remote import Remote, preload

__all__ = ["Cluster", "Host"]

#: Imported once, before processes are forked: 33 of them share its memory.
PRELOADED = ["bench.fanout_hubs", "tensorhub.client.hub", "tensorhub.client.frame_link"]


class Cluster:
    """Hosts on bridges. A context manager; processes come in teams that live within it."""

    def __init__(self, hosts: Sequence[Host], trunk_mbit: Mapping[str, float] | None = None) -> None:
        self.plan = Plan.of(hosts, trunk_mbit)
        self._network = Network(self.plan)

    def __enter__(self) -> Cluster:
        check_able()
        try:
            self._network.build()
        except BaseException:
            self._network.remove()
            raise
        preload(PRELOADED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.remove()

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.plan.hosts]

    def numbers(self, host: str) -> Numbers:
        return self.plan.numbers[host]

    def namespace(self, host: str) -> str:
        """What `ip netns exec` takes."""
        return self._network.namespace(host)

    def shape(self, host: str, mbit: float | None) -> None:
        """Change the rate of a host's link while things run over it."""
        self._network.shape(host, mbit)

    @contextmanager
    def team(
        self, hosts: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
    ) -> Iterator[dict[str, Remote]]:
        """{host: a process on it}, on these hosts or on all; they end together."""
        names = list(self.names if hosts is None else hosts)
        with ExitStack() as stack:
            team: dict[str, Remote] = {}
            for name in names:
                team[name] = stack.enter_context(Remote(name, method="forkserver"))
                mine = {"TENSORHUB_ADVERTISE": self.numbers(name).ipv4, **(environment or {})}
                team[name].start(enter, self._network.path(name), mine)
            for process in team.values():
                process.result()
            try:
                yield team
            finally:
                # They end one after the other: let all hear of it now.
                for process in team.values():
                    process.leave()
