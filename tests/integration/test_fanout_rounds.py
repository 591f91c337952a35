"""Rounds of the fan-out benchmark on a small emulated cluster: what counts, and what becomes of who is disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench import fanout_fleet
from bench.cluster import Cluster
from bench.cluster.commands import check_able
from bench.fanout_fleet import SERVER, Group, Host, fleet, hosts_of, single
from bench.remote import Missing, Remote, RemoteFailed

pytestmark = pytest.mark.slow
SHARD_BYTES = 400_000
ENVIRONMENT = {"TENSORHUB_STALL_S": "1"}


def test_rounds_count_who_has_every_byte_and_who_was_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody pulls, and the graph shows it; a reader that is stopped is waited for last and finishes; one that is
    killed is in no figure; one that dies without anybody's asking is no result."""
    try:
        check_able()
    except Missing as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(fanout_fleet, "SHARD_BYTES", SHARD_BYTES)
    trainers, readers = hosts_of(1, 20.0, "trainer"), hosts_of(3, 20.0)
    names = [host.name for host in readers]
    with (
        Cluster([Host(SERVER, None), *trainers, *readers]) as cluster,
        # Behind a stopped reader nobody waits so long that its lease ends.
        fleet(cluster, Group("trainer", (*trainers,)), single(readers), environment=ENVIRONMENT) as ours,
    ):

        def disturb(name: str, how: Callable[[Remote], None], *, told: bool = True) -> Callable[[float], list[str]]:
            def during(_: float) -> list[str]:
                how(ours.team[name])
                return [name] if told else []

            return during

        calm = ours.round(3)
        assert sorted(calm.seconds) == sorted(calm.said) == names
        assert calm.graph.summary.readers == 3
        assert all(one.nbytes == SHARD_BYTES for one in calm.said.values())
        stopped = ours.round(3, disturb(names[1], Remote.pause))
        assert (sorted(stopped.seconds), stopped.disturbed) == (names, (names[1],))
        assert stopped.slowest == max(stopped.seconds[names[0]], stopped.seconds[names[2]])
        killed = ours.round(3, disturb(names[2], Remote.kill))
        assert sorted(killed.seconds) == names[:2]
        with pytest.raises(RemoteFailed, match=f"{names[1]}: ended"):
            ours.round(2, disturb(names[1], Remote.kill, told=False))
