"""Question: what does a fan-out to 16 lose when one host is slow, or when a reader that relays dies or stops?

Who is disturbed is picked from the graph, in the middle of it: one that nobody reads from would prove nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.fanout import MBIT, READERS, REPEATS, among, opened
from bench.fanout_fleet import SHARD_BYTES, Fleet, Group, Round, fleet, hosts_of, single
from bench.measure import figure, ratio, sample
from bench.remote import Remote, RemoteFailed
from bench.report import Report
from tensorhub.cli.graph import Graph
from tensorhub.pipeline.manifest import chunk_size

STRAGGLER_SHARE = 0.25
STRAGGLER_IDEAL_SECONDS = SHARD_BYTES * 8 / (MBIT * STRAGGLER_SHARE * 1e6)
#: After which a silent source is given up, where one is stopped: beside the default of 10 s nothing else would be seen.
STALL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica stands in a graph: hops from the first source, and how many replicas get their bytes by it."""

    depth: int
    below: int


def straggler(report: Report) -> None:
    """One of 16 at a quarter of the rate, which relayed before: the slowest of the others, with it over without."""
    trainer, readers = hosts_of(1, MBIT, "trainer"), hosts_of(READERS, MBIT)
    even: list[Round] = []
    slowed: list[Round] = []
    stragglers: list[str] = []
    with among(report, trainer, readers) as (cluster, ours):
        for pair in range(REPEATS):
            report.tell(f"pair {pair + 1} of {REPEATS}: all equal")
            even.append(ours.round(READERS))
            stragglers.append(middle(even[-1].graph, "complete"))
            report.tell(f"pair {pair + 1} of {REPEATS}: {stragglers[-1]} slow")
            cluster.shape(stragglers[-1], MBIT * STRAGGLER_SHARE)
            slowed.append(ours.round(READERS))
            cluster.shape(stragglers[-1], MBIT)
    straggler_figures(report, even, slowed, stragglers)


def straggler_figures(report: Report, even: list[Round], slowed: list[Round], stragglers: list[str]) -> None:
    """What pairs of rounds say, each with the straggler of its second."""
    others = [
        [found.slowest_without([name]) for found, name in zip(rounds, stragglers, strict=True)]
        for rounds in (even, slowed)
    ]
    report.add("fanout_others_without_straggler", "s", sample(others[0]))
    report.add("fanout_others_with_straggler", "s", sample(others[1]))
    for when, rounds in (("before", even), ("after", slowed)):
        stood = [place(found.graph, name) for found, name in zip(rounds, stragglers, strict=True)]
        report.add(f"fanout_straggler_depth_{when}", "hops", sample([one.depth for one in stood]))
        report.add(f"fanout_straggler_below_{when}", "replicas", sample([one.below for one in stood]))
    own = [found.seconds[name] / STRAGGLER_IDEAL_SECONDS for found, name in zip(slowed, stragglers, strict=True)]
    report.ratios += [
        ratio("fanout_straggler_ratio", others[1], others[0], at_most=1.25),
        figure("fanout_straggler_own", sample(own)),
    ]


def killed_source(report: Report) -> None:
    """A reader that others read from is killed at half: the slowest survivor, over an undisturbed round."""
    calm, hurt = _trials(report, Remote.kill)
    report.add("fanout_undisturbed", "s", sample([found.slowest for found in calm]))
    report.add("fanout_killed_source", "s", sample([found.slowest for found in hurt]))
    slowest = [[found.slowest for found in rounds] for rounds in (hurt, calm)]
    report.ratios.append(ratio("fanout_killed_source_ratio", *slowest, at_most=1.5))
    again = [chunks for found in hurt if (chunks := chunks_read_again(found)) is not None]
    if again:
        report.ratios.append(figure("fanout_killed_source_chunks_read_again", sample(again), at_most=2.0))
    else:
        report.skipped["fanout_killed_source_chunks_read_again"] = "Replication.bytes_read counts nothing in this build"


def stopped_source(report: Report) -> None:
    """The same with one that is stopped, not dead: its sockets stay open, and silence is all there is to see."""
    calm, hurt = _trials(report, Remote.pause, {"TENSORHUB_STALL_S": str(STALL_SECONDS)})
    survivors = [found.slowest for found in hurt]
    report.add("fanout_stopped_source", "s", sample(survivors))
    report.ratios.append(ratio("fanout_stopped_source_ratio", survivors, [found.slowest for found in calm]))


def _trials(
    report: Report, disturb: Callable[[Remote], None], environment: Mapping[str, str] | None = None
) -> tuple[list[Round], list[Round]]:
    """Undisturbed rounds and disturbed ones, in turns, each pair with processes of its own."""
    trainer, readers = hosts_of(1, MBIT, "trainer"), hosts_of(READERS, MBIT)
    calm, hurt = [], []
    with opened(report, [*trainer, *readers]) as cluster:
        for trial in range(REPEATS):
            report.tell(f"trial {trial + 1} of {REPEATS}")
            group = Group("trainer", (*trainer,))
            with fleet(cluster, group, single(readers), environment=environment) as ours:
                calm.append(ours.round(READERS))
                hurt.append(_disturbed(ours, calm[-1].slowest / 2, disturb))
    return calm, hurt


def _disturbed(ours: Fleet, after_s: float, disturb: Callable[[Remote], None]) -> Round:
    """A round in whose middle someone is disturbed that fills and is read from."""

    def during(began: float) -> list[str]:
        time.sleep(max(0.0, began + after_s - time.monotonic()))
        victim = middle(ours.graph(), "filling")
        disturb(ours.team[victim])
        return [victim]

    return ours.round(READERS, during)


def chunks_read_again(found: Round) -> float | None:
    """The most chunks that one survivor read in vain; None where it is not counted."""
    said = [one for name, one in found.said.items() if name not in found.disturbed]
    if any(one.bytes_read < one.nbytes for one in said):
        return None
    return max(one.bytes_read - one.nbytes for one in said) / chunk_size(SHARD_BYTES)


def middle(graph: Graph, state: str) -> str:
    """The replica in this state that relays, with most hops both above and below it."""
    below = graph.children()
    relays = [node for node in graph.nodes if node.state == state and node.depth > 0 and below[node.name]]
    if not relays:
        raise RemoteFailed(f"nobody relays in state {state!r}: {graph.summary}")
    return max(relays, key=lambda node: (min(node.depth, _height(node.name, below)), node.name)).name


def place(graph: Graph, name: str) -> Place:
    """Where it stands."""
    below = graph.children()
    depth = next(node.depth for node in graph.nodes if node.name == name)
    return Place(depth, _count(name, below) - 1)


def _height(name: str, below: Mapping[str, list[str]]) -> int:
    return 1 + max((_height(reader, below) for reader in below[name]), default=-1)


def _count(name: str, below: Mapping[str, list[str]]) -> int:
    return 1 + sum(_count(reader, below) for reader in below[name])
