"""Question: how long until N replicas hold a new version, over one, over the ideal, and over what others do?

Shards of 50 MB, links of 200 Mbit/s each way, on an emulated cluster. Ours is published, placed and verified inside its
clock, while readers wait; peers only move bytes, slow ones once. `bench/fanout_trouble.py` has what happens when a host
is slow or dies, `bench/fanout_ablation.py` which part of the system gives what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

from bench import fanout_peers, fanout_plot, model
from bench.cluster import Cluster, Host, rates
from bench.fanout_fleet import SERVER, SHARD_BYTES, Fleet, Group, Round, fleet, grouped, hosts_of, single
from bench.measure import figure, interleave, ratio, sample
from bench.remote import Missing
from bench.report import Report
from tensorhub.pipeline.manifest import chunk_size
from tensorhub.server.settings import DEPTH_MAX, READERS_PER_SOURCE_MAX

MBIT = 200.0
IDEAL_SECONDS = SHARD_BYTES * 8 / (MBIT * 1e6)
COUNTS = (1, 2, 4, 8, 16, 32)
#: What peers are held against, and what trouble is made among.
READERS = 16
TRAINERS = 4
GROUPS, SHARDS = (1, 2, 4), 4
#: The kernel's largest packet: shapers of an emulated link pay for each as a whole.
PACKET_BYTES = 64 << 10
#: What one thread digests of data that another core has just received; the fastest is in docs/digest.md.
DIGEST_BYTES_PER_S = 5e9
#: How many times as long as ours they take, at least; of the others nothing is demanded.
PEERS_AT_LEAST = {"single_source": 10.0, "gloo_broadcast": 1.5, "all_trainers": 1.5, "store_forward": 1.5}
#: Rounds of what takes seconds; what takes half a minute runs once.
REPEATS = 3
#: Rounds per N of the curve: with 33 processes on a few cores, which of them waits for which is chance.
CURVE_REPEATS = 7


def curve(report: Report) -> None:
    """T(N) for N = 1 to 32, beside the model's prediction."""
    trainer, readers = hosts_of(1, MBIT, "trainer"), hosts_of(max(COUNTS), MBIT)
    with (
        opened(report, [*trainer, *readers]) as cluster,
        fleet(cluster, Group("trainer", (*trainer,)), single(readers)) as ours,
    ):
        done: dict[int, list[Round]] = {n: [] for n in COUNTS}
        interleave({str(n): partial(_one, ours, n, done[n]) for n in COUNTS}, CURVE_REPEATS, report.tell)
    curve_figures(report, done)
    for name in ("graph.svg", "graph.png"):
        draw(report, name, partial(fanout_plot.graph, found=done[READERS][-1].graph))


def curve_figures(report: Report, done: Mapping[int, Sequence[Round]]) -> None:
    """What rounds of each N say, and what the model said."""
    seconds = {n: [one.slowest for one in rounds] for n, rounds in done.items()}
    for n, rounds in done.items():
        report.add(f"fanout_t{n}", "s", sample(seconds[n]))
        report.add(
            f"fanout_t{n}_reader_cpu", "CPU s", sample([one.cpu for each in rounds for one in each.said.values()])
        )
        report.add(f"fanout_t{n}_depth", "hops", sample([each.graph.summary.depth for each in rounds]))
    report.ratios += [
        ratio("fanout_t16_over_t1", seconds[16], seconds[1], at_most=1.1),
        ratio("fanout_t32_over_t1", seconds[32], seconds[1], at_most=1.25),
        figure("fanout_ideal_over_t16", sample([IDEAL_SECONDS / one for one in seconds[16]]), at_least=0.88),
    ]
    predicted = predictions(done[1], done)
    for n, expected in predicted.items():
        report.add(f"fanout_t{n}_predicted", "s", sample([expected]))
    errors = {n: model.error(expected, median(seconds[n])) for n, expected in predicted.items() if n > 1}
    report.ratios.append(figure("fanout_model_error", sample([max(errors.values())]), at_most=0.15))
    samples = {n: report.results[f"fanout_t{n}"] for n in seconds}
    draw(
        report,
        "curve.png",
        lambda path: fanout_plot.curve(path, samples, predicted, IDEAL_SECONDS, _peers_of(report), READERS),
    )


def peers(report: Report) -> None:
    """16 readers: ours and the ideal in turns; then everything slower, once."""
    trainers, readers = hosts_of(TRAINERS, MBIT, "trainer"), hosts_of(READERS, MBIT)
    names = [host.name for host in readers]
    roots = [host.name for host in trainers]
    with opened(report, [*trainers, *readers]) as cluster:
        with fleet(cluster, Group("trainer", (trainers[0],)), single(readers)) as ours:
            ideal = partial(fanout_peers.chunk_chain, cluster, roots[0], names)
            runs = {"tensorhub_16": partial(_one, ours, READERS, []), "chunk_chain_16": ideal}
            measured = interleave(runs, REPEATS, report.tell)
        slow: Mapping[str, Callable[[], float]] = {
            "single_source": partial(fanout_peers.mooncake_reads, cluster, roots[:1], names),
            "gloo_broadcast": lambda: fanout_peers.gloo_broadcast(cluster, roots[0], names).total,
            "all_trainers": partial(fanout_peers.mooncake_reads, cluster, roots, names),
            "store_forward": partial(fanout_peers.shard_chain, cluster, roots[0], names),
            "bucket_chain": partial(fanout_peers.bucket_chain, cluster, roots[0], names),
        }
        peer_figures(report, measured, {name: _unless_missing(report, name, run) for name, run in slow.items()})


def peer_figures(report: Report, in_turns: Mapping[str, Sequence[float]], slow: Mapping[str, float | None]) -> None:
    """Seconds of all, each over ours; what ran once over each of ours."""
    for name, found in in_turns.items():
        report.add(f"fanout_{name}", "s", sample(found))
    report.ratios.append(
        ratio("fanout_chunk_chain_over_tensorhub_16", in_turns["chunk_chain_16"], in_turns["tensorhub_16"])
    )
    for name, seconds in slow.items():
        if seconds is not None:
            report.add(f"fanout_{name}_16", "s", sample([seconds]))
            over = sample([seconds / one for one in in_turns["tensorhub_16"]])
            report.ratios.append(figure(f"fanout_{name}_over_tensorhub_16", over, at_least=PEERS_AT_LEAST.get(name)))


def groups(report: Report) -> None:
    """1, 2 and 4 replicas of 4 shards, every shard on a host of its own, over one such replica."""
    trainers, readers = hosts_of(SHARDS, MBIT, "trainer"), hosts_of(max(GROUPS) * SHARDS, MBIT)
    with opened(report, [*trainers, *readers]) as cluster:
        trainer = Group("trainer", tuple(trainers))
        with fleet(cluster, trainer, grouped(readers, SHARDS)) as ours:
            runs = {str(n): partial(_one, ours, n, []) for n in GROUPS}
            measured = interleave(runs, REPEATS, report.tell)
    for n, found in measured.items():
        report.add(f"fanout_groups_t{n}", "s", sample(found))
    report.ratios += [
        ratio(f"fanout_groups_t{n}_over_t1", found, measured["1"]) for n, found in measured.items() if n != "1"
    ]


@contextmanager
def opened(report: Report, hosts: Sequence[Host]) -> Iterator[Cluster]:
    """A cluster of these and a server's host, its links looked at. `Missing` where it cannot be emulated."""
    report.tell(f"building a cluster of {len(hosts) + 1} hosts")
    with Cluster([Host(SERVER, None), *hosts]) as cluster:
        with cluster.team([host.name for host in hosts]) as team:
            numbers = {host.name: cluster.numbers(host.name).ipv4 for host in hosts}
            shares = rates.confirm(team, hosts, numbers)
        report.add("fanout_link_share_of_declared", "", sample(list(shares.values())))
        yield cluster


@contextmanager
def among(report: Report, trainer: Sequence[Host], readers: Sequence[Host]) -> Iterator[tuple[Cluster, Fleet]]:
    """The same, and on it a trainer and replicas of one shard each, open."""
    group = Group("trainer", tuple(trainer))
    with opened(report, [*trainer, *readers]) as cluster, fleet(cluster, group, single(readers)) as ours:
        yield cluster, ours


def predictions(alone: Sequence[Round], counts: Iterable[int]) -> dict[int, float]:
    """T(N) by the model, from rounds of one reader."""
    pulls = []
    for one in alone:
        phases = next(iter(one.said.values())).phases
        set_up = phases["plan"] + phases["register"]
        pulls.append(model.Alone(one.slowest, phases["transfer"], set_up, phases["verify"]))
    fitted = model.Fitted.of(SHARD_BYTES, pulls)
    constants = model.Constants(
        chunk_size(SHARD_BYTES), PACKET_BYTES, DIGEST_BYTES_PER_S, DEPTH_MAX, READERS_PER_SOURCE_MAX
    )
    return {n: model.predict(constants, fitted, SHARD_BYTES, n) for n in counts}


def draw(report: Report, name: str, drawing: Callable[..., None]) -> None:
    """Have a picture drawn into a file of this name beside the report, where that can be."""
    try:
        fanout_plot.check_able(name)
    except Missing as error:
        report.skipped[f"picture {name}"] = str(error)
    else:
        report.drawings[name] = drawing


def _unless_missing(report: Report, name: str, run: Callable[[], float]) -> float | None:
    report.tell(name)
    try:
        return run()
    except Missing as error:
        report.skipped[f"fanout_{name}_over_tensorhub_16"] = str(error)
        return None


def _one(ours: Fleet, replicas: int, done: list[Round]) -> float:
    done.append(ours.round(replicas))
    return done[-1].slowest


def _peers_of(report: Report) -> dict[str, float]:
    """Peers that were measured by the time of drawing."""
    names = ("single_source", "gloo_broadcast", "all_trainers", "store_forward", "bucket_chain", "chunk_chain")
    found = {name: report.results.get(f"fanout_{name}_{READERS}") for name in names}
    return {name.replace("_", " "): one.median for name, one in found.items() if one is not None}
