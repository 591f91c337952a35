"""What an emulated cluster is made of, as far as it is pure: who gets which number, which bridge, whose remains go."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from bench.cluster import Cluster, Host, commands, network, rates
from bench.cluster.hosts import HOSTS_MAX, Plan
from bench.cluster.relay import Relays, chain, star
from bench.cluster.server import serving
from bench.remote import Missing, Remote, State


def test_every_host_has_numbers_of_its_own() -> None:
    """Numbers of both kinds differ from host to host, past the end of one byte, and stay in the reserved ranges."""
    hosts = [Host(f"h{at}") for at in range(HOSTS_MAX)]
    numbers = Plan.of(hosts).numbers.values()
    assert len({one.ipv4 for one in numbers}) == len({one.ipv6 for one in numbers}) == HOSTS_MAX
    assert all(one.ipv4.startswith("198.18.") and one.ipv6.startswith("2001:2::") for one in numbers)


def test_one_rack_is_one_bridge() -> None:
    """Where there is nothing to join, there is no bridge above and no trunk to be narrow."""
    plan = Plan.of([Host("a"), Host("b")])
    assert (plan.bridges, plan.trunks) == (("br0",), ())
    assert set(plan.bridge_of.values()) == {"br0"}


def test_racks_and_data_centres_are_joined_by_trunks() -> None:
    """Each rack is a bridge; racks meet in their data centre, data centres over all; trunks have their rates."""
    hosts = [Host("a", rack="r0"), Host("b", rack="r1"), Host("c", dc="dc1"), Host("d", dc="dc1")]
    plan = Plan.of(hosts, {"dc0/r1": 400.0, "dc1": 100.0})
    assert plan.bridge_of["c"] == plan.bridge_of["d"]
    assert len(set(plan.bridge_of.values())) == 3
    assert sorted(trunk.mbit or 0.0 for trunk in plan.trunks) == [0.0, 0.0, 100.0, 400.0]
    # Every bridge but the topmost has one way up, and following it ends there.
    up = {trunk.bridge: trunk.above for trunk in plan.trunks}
    assert len(up) == len(plan.trunks) == len(plan.bridges) - 1


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ([], "1 to 256 hosts"),
        ([Host("a"), Host("a")], "must differ: a"),
        ([Host("A")], "'A' is no name"),
        ([Host("_fabric")], "'_fabric' is no name"),
        ([Host("a", rack="../r")], "is no name"),
        ([Host("a", mbit=0)], "link of 0 Mbit/s"),
    ],
)
def test_what_cannot_be_built_is_refused(hosts: list[Host], says: str) -> None:
    """A declaration that no kernel could build is refused by what is wrong with it, before anything is made."""
    with pytest.raises(ValueError, match=says):
        Cluster(hosts)


def test_a_rate_for_no_trunk_is_refused() -> None:
    """A misspelt trunk would leave the real one unshaped."""
    with pytest.raises(ValueError, match="no trunk for dc7"):
        Plan.of([Host("a"), Host("b", rack="r1")], {"dc7": 10.0})


def test_without_root_a_cluster_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may not make namespaces is told so, and what to install, before anything is made."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Missing, match=r"needs root.*lacking:.*root"), Cluster([Host("a")]):
        pytest.fail("a cluster was built without root")


def test_remains_of_ended_processes_are_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process that has ended left goes, also when its pid has another owner now; what the living have stays."""
    alive = f"{network.PREFIX}-{os.getpid()}-{network.started(os.getpid())}-h0"
    recycled = f"{network.PREFIX}-{os.getpid()}-1-h0"
    ended = f"{network.PREFIX}-4194305-77-h0"  # above the kernel's largest pid
    left = [alive, recycled, ended]

    def run(command: list[str], lines: list[str] | None = None) -> str:
        assert command[:3] == ["ip", "netns", "delete"]
        left.remove(command[3])
        return ""

    monkeypatch.setattr(network, "namespaces", lambda: list(left))
    monkeypatch.setattr(network, "run", run)
    network.remove_stale()
    assert left == [alive]


def test_removal_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace that the kernel keeps does not save the others, and is complained of in the end."""
    left = ["thbench-1-1-a", "thbench-1-1-b", "thbench-1-10-other"]

    def run(command: list[str], lines: list[str] | None = None) -> str:
        if command[3].endswith("-a"):
            raise commands.NetworkFailed("busy")
        left.remove(command[3])
        return ""

    monkeypatch.setattr(network, "namespaces", lambda: list(left))
    monkeypatch.setattr(network, "run", run)
    with pytest.raises(commands.NetworkFailed, match="busy"):
        network.remove_all("thbench-1-1")
    assert left == ["thbench-1-1-a", "thbench-1-10-other"]


def test_a_setting_the_server_lacks_is_missing() -> None:
    """A mode of the ablation that this build has not is skipped by name, not run as if it were there."""
    with (
        pytest.raises(Missing, match="no setting mode, sauces"),
        serving("nowhere", "198.18.0.1", {"sauces": 1, "mode": 2}),
    ):
        pytest.fail("a server was started with settings it does not have")


def test_a_command_that_fails_says_which_and_why() -> None:
    """The return code of a command is looked at, and its own words are in the error."""
    with pytest.raises(commands.NetworkFailed, match=r"ls /no/such/place returned 2: .*No such file"):
        commands.run(["ls", "/no/such/place"])


def test_links_are_tried_a_few_at_a_time() -> None:
    """No host is in two transfers at once, no batch is larger than the machine carries, every pair has its turn."""
    hosts = [Host(f"h{at}") for at in range(11)]
    pairs = [*zip(hosts[::2], hosts[1::2], strict=False), (hosts[10], hosts[0])]
    found = rates.batches(pairs)
    assert [pair for some in found for pair in some] == pairs
    for some in found:
        names = [host.name for pair in some for host in pair]
        assert len(set(names)) == len(names) <= 2 * rates.PAIRS_AT_ONCE


def test_a_rate_is_held_against_what_a_link_can_carry() -> None:
    """Headers are no fault of a link's: full frames at the declared rate are all of it."""
    rate = rates.Rate("a", "b", 200 * rates.PAYLOAD_SHARE, 200.0)
    assert rate.of_declared == pytest.approx(1.0)
    assert rates.Rate("a", "b", 1.0, None).of_declared is None
    assert rates.slower(Host("a", mbit=None), Host("b", mbit=50.0)) == 50.0
    assert rates.slower(Host("a", mbit=None), Host("b", mbit=None)) is None


def test_chains_and_stars() -> None:
    """In a chain each has one child, in a star the root has all."""
    assert chain("t", ["a", "b", "c"]) == {"a": "t", "b": "a", "c": "b"}
    assert star("t", ["a", "b"]) == {"a": "t", "b": "t"}


class Inline:
    """A process of a team that is a thread of this one."""

    def __init__(self, name: str, pool: ThreadPoolExecutor) -> None:
        self.name, self.state, self._pool = name, cast(State, {}), pool
        self._begun: Future[Any] | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.start(function, *arguments)
        return self.result()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._begun = self._pool.submit(function, self.state, *arguments)

    def result(self) -> Any:
        assert self._begun is not None
        return self._begun.result(10)


@pytest.mark.parametrize("unit", [1 << 10, 3000, 1 << 20])
def test_relays_move_every_byte(unit: int) -> None:
    """A tree of relays hands on all bytes, in units that divide the shard, that do not, and that hold all of it."""
    parents = {"a": "t", "b": "a", "c": "a", "d": "c"}
    with ThreadPoolExecutor() as pool:
        team = cast("dict[str, Remote]", {name: Inline(name, pool) for name in ("t", *parents)})
        relays = Relays(team, dict.fromkeys(team, "127.0.0.1"), parents)
        for _ in range(2):  # what one run leaves behind must not reach the next
            found = relays.run(100_000, unit)
            assert set(found.seconds) == set(parents)
            assert found.slowest == max(found.seconds.values())
        relays.close()


def test_a_forest_is_no_tree() -> None:
    """Two roots would be two distributions."""
    with pytest.raises(ValueError, match="one root"):
        Relays({}, {}, {"a": "t", "b": "u"})
