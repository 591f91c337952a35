"""The emulated cluster on this machine's own kernel: shaped both ways, real packets, nothing left behind."""

from __future__ import annotations

import pytest

from bench.cluster import Cluster, Host, network, rates
from bench.cluster.commands import check_able, run
from bench.cluster.relay import Relays, chain
from bench.remote import Missing


@pytest.mark.slow
def test_a_cluster_shapes_carries_and_vanishes() -> None:
    """No link is faster than declared, in either direction and after a change; bytes go along a chain of hosts; an
    interrupt takes everything down; what a killed run left goes with the next."""
    try:
        check_able()
    except Missing as missing:
        pytest.skip(str(missing))
    stale = f"{network.PREFIX}-4194305-1-h0"  # above the kernel's largest pid: nobody's
    run(["ip", "netns", "add", stale])
    hosts = [Host("a", 40.0), Host("b", 40.0), Host("c", 40.0, rack="r1"), Host("d", None, dc="dc1")]

    def look() -> None:
        with Cluster(hosts, {"dc0/r1": 40.0}) as cluster, cluster.team() as team:
            assert stale not in network.namespaces()
            numbers = {name: cluster.numbers(name).ipv4 for name in cluster.names}
            assert all(0 < share < rates.SHARE_MAX for share in rates.confirm(team, hosts, numbers).values())
            cluster.shape("a", 10.0)
            slowed = [Host("a", 10.0), hosts[1]]
            assert all((one.of_declared or 2.0) < rates.SHARE_MAX for one in rates.measure(team, slowed, numbers, 2))
            relays = Relays(team, numbers, chain("d", ["c", "b"]))
            assert set(relays.run(1 << 20, 64 << 10).seconds) == {"b", "c"}
            relays.close()
            over_ipv6 = {name: cluster.numbers(name).ipv6 for name in cluster.names}
            assert set(Relays(team, over_ipv6, {"a": "d"}).run(1 << 20, 64 << 10).seconds) == {"a"}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look()
    assert not [name for name in network.namespaces() if name.startswith(f"{network.Network(Cluster(hosts).plan).id}-")]
