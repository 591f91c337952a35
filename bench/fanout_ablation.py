"""Question: which part of the system gives how much of a fan-out to 16? One mode per part that is taken away.

Every mode says where the time of its slowest reader went. `wait` is all that no other phase claims: for the version,
the decision and the commit; with a barrier, for everybody to be there. One round per mode, after one that warms it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from bench import fanout_peers, fanout_plot
from bench.cluster import Cluster
from bench.fanout import MBIT, READERS, draw, opened
from bench.fanout_fleet import Group, Round, fleet, hosts_of, single
from bench.measure import sample
from bench.remote import Missing
from bench.report import Report
from tensorhub.client.results import PHASES

TRAINER = "trainer-0"
Phases = Mapping[str, float]


def ablation(report: Report) -> None:
    """Barrier and broadcast; all from one source; from complete sources only; all of it."""
    trainer, readers = hosts_of(1, MBIT, "trainer"), hosts_of(READERS, MBIT)
    names = [host.name for host in readers]
    phases: dict[str, Phases] = {}
    with opened(report, [*trainer, *readers]) as cluster:
        ours = partial(_ours, cluster, Group(TRAINER, (*trainer,)), single(readers))
        modes: Mapping[str, Callable[[], Phases]] = {
            "barrier_broadcast": partial(_broadcast, cluster, names),
            "one_source": partial(ours, {}, readers_serve=False),
            "complete_sources": partial(ours, {"sources": "complete"}, readers_serve=True),
            "pipeline": partial(ours, {}, readers_serve=True),
        }
        for mode, run in modes.items():
            report.tell(mode)
            try:
                phases[mode] = run()
            except Missing as error:
                report.skipped[f"fanout_ablation_{mode}"] = str(error)
                continue
            for phase, seconds in phases[mode].items():
                report.add(f"fanout_ablation_{mode}_{phase}", "s", sample([seconds]))
            report.add(f"fanout_ablation_{mode}", "s", sample([sum(phases[mode].values())]))
    rows = table(phases)
    report.tables["ablation, seconds of the slowest reader"] = rows
    bars = {mode.replace("_", " "): {phase: row[phase] for phase in PHASES} for mode, row in rows.items()}
    draw(report, "ablation.png", lambda path: fanout_plot.ablation(path, bars))


def _broadcast(cluster: Cluster, readers: list[str]) -> Phases:
    found = fanout_peers.gloo_broadcast(cluster, TRAINER, readers)
    return {"wait": found.barrier, "transfer": found.broadcast}


def _ours(
    cluster: Cluster,
    trainer: Group,
    readers: list[Group],
    settings: Mapping[str, object],
    readers_serve: bool,
) -> Phases:
    """With these settings of the server."""
    with fleet(cluster, trainer, readers, settings) as ours:
        return slowest_phases(ours.round(len(readers), readers_serve=readers_serve))


def table(phases: Mapping[str, Phases]) -> dict[str, dict[str, float]]:
    """A row per mode: the whole, then every phase of a replicate in its order; 0 where a mode has no such phase."""
    return {
        mode: {"all": sum(each.values()), **{phase: each.get(phase, 0.0) for phase in PHASES}}
        for mode, each in phases.items()
    }


def slowest_phases(found: Round) -> Phases:
    """Of the reader that was last."""
    last = max(found.seconds, key=lambda name: found.seconds[name])
    phases = {name: seconds for name, seconds in found.said[last].phases.items() if name != "wait"}
    return {"wait": max(found.seconds[last] - sum(phases.values()), 0.0), **phases}
