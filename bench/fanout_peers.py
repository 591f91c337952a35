"""What others do with the same bytes on the same emulated links: one distribution of a shard to many hosts each.

None of them verifies. Connecting, registering, meeting and a first contact that moves a little are outside their
clocks, in their favour; afterwards every byte must be at every reader, or there is no result. Each opens processes of
its own and ends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from bench.cluster import Cluster
from bench.cluster.network import INTERFACE
from bench.cluster.relay import RECEIVE_BYTES, Relays, chain
from bench.fanout_fleet import SHARD_BYTES
from bench.peers import gloo, mooncake
from bench.peers.pair import allocate, change, fills, load
from bench.remote import SETTLE_SECONDS, Remote, State

#: Several arrays, as a model has several tensors.
ARRAYS = 10
#: verl moves buckets of 2 GiB; of a model of 48 GB that is this many.
BUCKETS = 24


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Of one barrier and broadcast: seconds in each, of the reader that was slowest over all."""

    barrier: float
    broadcast: float

    @property
    def total(self) -> float:
        return self.barrier + self.broadcast


def relayed(cluster: Cluster, root: str, readers: Sequence[str], unit: int) -> float:
    """Seconds of a bare chain: of chunks it is the ideal; of whole shards, store and forward."""
    numbers = {name: cluster.numbers(name).ipv4 for name in (root, *readers)}
    with cluster.team([root, *readers]) as team:
        relays = Relays(team, numbers, chain(root, readers))
        relays.run(RECEIVE_BYTES, RECEIVE_BYTES)  # first contact
        seconds = relays.run(SHARD_BYTES, unit).slowest
        relays.close()
    return seconds


def chunk_chain(cluster: Cluster, root: str, readers: Sequence[str]) -> float:
    """The ideal: what arrives goes on at once."""
    return relayed(cluster, root, readers, unit=64 << 10)


def bucket_chain(cluster: Cluster, root: str, readers: Sequence[str]) -> float:
    """A chain of verl's buckets, to the scale of the shard."""
    return relayed(cluster, root, readers, unit=-(-SHARD_BYTES // BUCKETS))


def shard_chain(cluster: Cluster, root: str, readers: Sequence[str]) -> float:
    """A chain that stores the whole shard before it goes on."""
    return relayed(cluster, root, readers, unit=SHARD_BYTES)


def mooncake_reads(cluster: Cluster, sources: Sequence[str], readers: Sequence[str]) -> float:
    """Every reader reads everything from one of the sources, evenly shared; nobody relays."""
    with cluster.team([*sources, *readers]) as team:
        _fill(team, sources, readers)
        served = {name: team[name].call(mooncake.serve, cluster.numbers(name).ipv4) for name in sources}
        for at, name in enumerate(readers):
            team[name].call(mooncake.start, cluster.numbers(name).ipv4)
            team[name].call(mooncake.connect, *served[sources[at % len(sources)]])
            team[name].call(mooncake.touch)
        _change(team, sources)
        began = time.monotonic()
        for name in readers:
            team[name].start(mooncake.read_in_turn, "whole")
        for name in readers:
            team[name].result()
        seconds = time.monotonic() - began
        _check("mooncake", team, sources[0], readers)
    return seconds


def gloo_broadcast(cluster: Cluster, root: str, readers: Sequence[str]) -> Broadcast:
    """A barrier of all, then a collective broadcast from the root."""
    names = [root, *readers]
    with TemporaryDirectory() as folder, cluster.team(names) as team:
        _fill(team, [root], readers)
        for rank, name in enumerate(names):
            team[name].start(gloo.join, rank, f"{folder}/gloo", len(names), INTERFACE)
        _results(team, names)
        for name in names:
            team[name].start(meet)
        _results(team, names)
        for name in readers:
            team[name].start(barrier_and_broadcast)
        time.sleep(SETTLE_SECONDS)
        began, _, _ = team[root].call(barrier_and_broadcast)
        _, met, ended = max(_results(team, readers), key=lambda times: times[2])
        _check("gloo", team, root, readers)
    return Broadcast(met - began, ended - met)


def meet(_: State) -> None:
    """First contact."""
    load("torch.distributed", gloo.INSTALL).barrier()


def barrier_and_broadcast(state: State) -> tuple[float, float, float]:
    """When this end began, when all had met, and when its last tensor was done."""
    began = time.monotonic()
    load("torch.distributed", gloo.INSTALL).barrier()
    met, ended = gloo.broadcast(state)
    return began, met, ended


def _fill(team: dict[str, Remote], sources: Sequence[str], readers: Sequence[str]) -> None:
    sizes = [SHARD_BYTES // ARRAYS] * ARRAYS
    for name in readers:
        team[name].start(allocate, sizes, 0)
    for name in sources:
        team[name].start(allocate, sizes, 1)
    _results(team, [*readers, *sources])
    _change(team, sources)


def _change(team: dict[str, Remote], sources: Sequence[str]) -> None:
    for name in sources:
        team[name].call(change)


def _check(peer: str, team: dict[str, Remote], source: str, readers: Sequence[str]) -> None:
    there = team[source].call(fills)
    wrong = [name for name in readers if team[name].call(fills) != there]
    if wrong or None in there:
        raise RuntimeError(f"{peer} is no result: {', '.join(wrong)} do not hold what the source has")


def _results(team: dict[str, Remote], names: Sequence[str]) -> list[tuple[float, float, float]]:
    return [team[name].result() for name in names]


#: {name: (distribution, what it is)}, from one root.
CHAINS: dict[str, Callable[[Cluster, str, Sequence[str]], float]] = {
    "chunk_chain": chunk_chain,
    "bucket_chain": bucket_chain,
    "store_forward": shard_chain,
}
