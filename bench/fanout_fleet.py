"""Our side of every fan-out: a trainer, readers and a server on an emulated cluster, and rounds that are checked.

A round publishes one version while readers wait for it. Its clock runs from the call of publish to the last return of
replicate; a round counts only if every byte is right at every reader, and nobody is missing who was not disturbed on
purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from bench import fanout_hubs
from bench.cluster import Cluster, Host
from bench.cluster.server import serving
from bench.fanout_hubs import Said, Seat
from bench.pulls import new_job
from bench.remote import SETTLE_SECONDS, Remote, RemoteFailed
from tensorhub.cli import graph as graphs

ENGINE = "tcp"
SERVER = "server"
SHARD_BYTES = 50_000_000
#: Readers that have asked for the version must have been heard by the server before it is published.
ASKED_SECONDS = 5 * SETTLE_SECONDS


@dataclass(frozen=True, slots=True)
class Group:
    """A replica: the hosts of its shards, in order."""

    replica: str
    hosts: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """{reader's host: seconds from the call of publish}, what each said, who pulled from whom when all were done."""

    seconds: Mapping[str, float]
    said: Mapping[str, Said]
    graph: graphs.Graph
    #: Readers that were killed or stopped on purpose: what they said, if anything, is nobody's figure.
    disturbed: tuple[str, ...] = ()

    @property
    def slowest(self) -> float:
        """Of those that were not disturbed."""
        return self.slowest_without(self.disturbed)

    def slowest_without(self, hosts: Sequence[str]) -> float:
        return max(seconds for host, seconds in self.seconds.items() if host not in hosts)


class Fleet:
    """A trainer's group and readers' groups, open."""

    def __init__(self, team: Mapping[str, Remote], trainer: Group, readers: Sequence[Group], server: str) -> None:
        self.team = team
        self.trainer = trainer
        self.readers = list(readers)
        self.version = 0
        job = new_job()
        groups = [trainer, *readers]
        seats = {
            host.name: Seat(group.replica, shard, len(group.hosts), host.location, server, job, ENGINE)
            for group in groups
            for shard, host in enumerate(group.hosts)
        }
        for name, seat in seats.items():
            team[name].start(fanout_hubs.open_seat, seat, SHARD_BYTES, 1 if seat.replica == trainer.replica else 0)
        for name in seats:
            team[name].result()

    def round(
        self, groups: int, during: Callable[[float], Sequence[str]] = lambda _: (), *, readers_serve: bool = True
    ) -> Round:
        """One version into the first `groups` of the readers; `during(began)` runs meanwhile.

        It returns the hosts it killed or stopped: these are waited for last, the stopped ones resumed by then, and
        may fail. `RemoteFailed` if another reader does.
        """
        self.version += 1
        readers = [host.name for group in self.readers[:groups] for host in group.hosts]
        trainers = [host.name for host in self.trainer.hosts]
        self._all(trainers, fanout_hubs.train)
        for name in readers:
            self.team[name].start(fanout_hubs.replicate, self.version, readers_serve)
        time.sleep(ASKED_SECONDS)
        began = min(self._all(trainers, fanout_hubs.publish, self.version))
        disturbed = tuple(during(began))
        said = {name: self.team[name].result() for name in readers if name not in disturbed}
        graph = self.graph()
        for name in disturbed:
            self.team[name].resume()
            with suppress(RemoteFailed):
                said[name] = self.team[name].result()
        self._check(said)
        self._all(trainers, fanout_hubs.unpublish)
        return Round({name: one.returned - began for name, one in said.items()}, said, graph, disturbed)

    def graph(self) -> graphs.Graph:
        """Who pulls this round's version from whom, as the server says now."""
        view = self.team[self.trainer.hosts[0].name].call(fanout_hubs.view)
        return graphs.only_one(graphs.from_status(view, version=str(self.version)))

    def _check(self, said: Mapping[str, Said]) -> None:
        fills = {self.team[host.name].call(fanout_hubs.first_byte) for host in self.trainer.hosts}
        fill = fills.pop()
        wrong = [name for name in said if not self.team[name].call(fanout_hubs.holds, fill)]
        if wrong or fills:
            raise RuntimeError(f"version {self.version} is no result: {wrong} do not hold it")

    def _all(self, names: Sequence[str], function: Callable[..., object], *arguments: object) -> list[float]:
        for name in names:
            self.team[name].start(function, *arguments)
        return [self.team[name].result() for name in names]


@contextmanager
def fleet(
    cluster: Cluster,
    trainer: Group,
    readers: Sequence[Group],
    settings: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """A server on its host, processes on theirs, seats taken; warm: everybody has pulled once.

    `settings` are the server's, `environment` is the processes'.
    """
    hosts = [host.name for group in (trainer, *readers) for host in group.hosts]
    place = cluster.namespace(SERVER), cluster.numbers(SERVER).ipv4
    with serving(*place, settings) as server, cluster.team(hosts, environment) as team:
        opened = Fleet(team, trainer, readers, server)
        opened.round(len(readers))
        yield opened


def hosts_of(count: int, mbit: float, kind: str = "reader") -> list[Host]:
    """Equal hosts in one rack."""
    return [Host(f"{kind}-{at}", mbit) for at in range(count)]


def single(hosts: Sequence[Host]) -> list[Group]:
    """Replicas of one shard each."""
    return [Group(host.name, (host,)) for host in hosts]


def grouped(hosts: Sequence[Host], shards: int) -> list[Group]:
    """Replicas of several shards, each on a host of its own."""
    return [Group(f"replica-{at}", tuple(hosts[at * shards : (at + 1) * shards])) for at in range(len(hosts) // shards)]
