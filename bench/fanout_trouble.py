"""Question: what does a fan-out to 16 lose when one host is slow, or when a reader that relays dies in the middle?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from bench.fanout import MBIT, READERS, REPEATS, among, opened
from bench.fanout_fleet import Fleet, Group, fleet, hosts_of, single
from bench.fanout_hubs import Held
from bench.measure import ratio, sample
from bench.remote import RemoteFailed
from bench.report import Report

#: One that neither begins nor ends the order in which seats were taken.
STRAGGLER = f"reader-{READERS // 2}"
STRAGGLER_SHARE = 0.25


def straggler(report: Report) -> None:
    """One of 16 at a quarter of the rate: the slowest of the others, with it over without."""
    trainer, readers = hosts_of(1, MBIT, "trainer"), hosts_of(READERS, MBIT)
    slowed, even = [], []
    with among(report, trainer, readers) as (cluster, ours):
        for pair in range(REPEATS):
            report.tell(f"pair {pair + 1} of {REPEATS}: all equal, then {STRAGGLER} slow")
            even.append(ours.round(READERS).slowest_without([STRAGGLER]))
            cluster.shape(STRAGGLER, MBIT * STRAGGLER_SHARE)
            slowed.append(ours.round(READERS).slowest_without([STRAGGLER]))
            cluster.shape(STRAGGLER, MBIT)
    report.add("fanout_others_without_straggler", "s", sample(even))
    report.add("fanout_others_with_straggler", "s", sample(slowed))
    report.ratios.append(ratio("fanout_straggler_ratio", slowed, even, at_most=1.25))


def killed_source(report: Report) -> None:
    """A reader that others read from is killed at half: the slowest survivor, over an undisturbed round."""
    trainer, readers = hosts_of(1, MBIT, "trainer"), hosts_of(READERS, MBIT)
    calm, hurt = [], []
    with opened(report, [*trainer, *readers]) as cluster:
        for trial in range(REPEATS):
            report.tell(f"trial {trial + 1} of {REPEATS}")
            with fleet(cluster, Group("trainer", (*trainer,)), single(readers)) as ours:
                calm.append(ours.round(READERS).slowest)
                hurt.append(_disturbed(ours, calm[-1] / 2))
    report.add("fanout_undisturbed", "s", sample(calm))
    report.add("fanout_killed_source", "s", sample(hurt))
    report.ratios.append(ratio("fanout_killed_source_ratio", hurt, calm, at_most=1.5))
    report.skipped["fanout_killed_source_chunks_read_again"] = (
        "a Replication does not tell bytes that were read in vain"
    )


def _disturbed(ours: Fleet, after_s: float) -> float:
    """Seconds of the slowest survivor."""
    victims: list[str] = []

    def kill(began: float) -> None:
        time.sleep(max(0.0, began + after_s - time.monotonic()))
        victims.append(middle_source(ours.graph()))
        ours.team[victims[0]].kill()

    found = ours.round(READERS, kill)
    if set(found.lost) != set(victims):
        raise RemoteFailed(f"{victims} were killed, but these did not get the version: {dict(found.lost)}")
    return found.slowest


def middle_source(held: Sequence[Held]) -> str:
    """The replica that is filling and read from, with most hops both above and below it."""
    above = {one.replica: one.upstream.partition("#")[0] for one in held if one.state == "filling"}
    readers = {name: [other for other, source in above.items() if source == name] for name in above}
    relays = [name for name in above if readers[name]]
    if not relays:
        raise RemoteFailed(f"nobody relays; holdings are {held}")
    return max(relays, key=lambda name: (min(_depth(name, above), _height(name, readers)), name))


def _depth(name: str, above: Mapping[str, str]) -> int:
    depth = 0
    while name in above:
        name, depth = above[name], depth + 1
    return depth


def _height(name: str, readers: Mapping[str, Sequence[str]]) -> int:
    return 1 + max((_height(reader, readers) for reader in readers[name]), default=-1)
