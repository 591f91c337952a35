"""Question: what does a transfer lose when its source is killed or stopped, or when the server dies and comes back?

It acts with the rig of `tensorhub chaos`: real processes, paced by the kernel, so that a transfer takes seconds and is
met in its middle. A run whose bytes are not the published ones is no result.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench.measure import PAIRS_MIN, figure, interleave, ratio, sample
from bench.remote import Missing, RemoteFailed
from bench.report import Report
from tensorhub.cli.chaos import cases, of_peers, rig, servers
from tensorhub.cli.chaos.record import Record
from tensorhub.cli.chaos.rig import CaseFailed, Place, Rig, Scene, WorkerFailed

MIB = 64
SERVER = "frames"
#: A single reader of a paced source: what a transfer takes where the server dies in it.
RESTART_TRANSFER_SECONDS = 6.0
#: How many times as long as the restart the transfer must take.
RESTARTS_IN_A_TRANSFER = 3.0
#: When the server dies, and when the source does, as parts of the transfer.
SERVER_DIES, SOURCE_DIES = 1 / 3, 2 / 3
STOP_SLACK_SECONDS = 0.5
#: Beside a transfer of which a half is read from another source, what may be read again.
CHUNKS_AGAIN_MAX = 2.0
#: The beginning of the fixed sweep is as good as any other seeds.
SEEDS = 20


@dataclass(frozen=True, slots=True)
class Recovered:
    """The survivor's replicate: what it took, what it read again, and for how long nobody served."""

    seconds: float
    bytes_again: int
    chunks_again: float
    away_s: float


def killed(report: Report) -> None:
    """The source is killed in the middle: chunks that the survivor reads again."""
    again = []
    with place() as where:
        for trial in range(PAIRS_MIN):
            report.tell(f"trial {trial + 1} of {PAIRS_MIN}")
            again.append(_survivor(_run(of_peers.source_killed_midchunk, where)).chunks_again)
    killed_figures(report, again)


def killed_figures(report: Report, again: Sequence[float]) -> None:
    """The bound is for each run, so it is held against the worst."""
    report.add("recovery_extra_bytes", "chunks", sample(again))
    report.ratios += [figure("recovery_extra_bytes_chunks", sample([max(again)]), at_most=CHUNKS_AGAIN_MAX)]


def stopped(report: Report) -> None:
    """The source is stopped in the middle: seconds until the survivor reads elsewhere."""
    noticed = []
    with place() as where:
        for trial in range(PAIRS_MIN):
            report.tell(f"trial {trial + 1} of {PAIRS_MIN}")
            noticed.append(_run(of_peers.source_stopped, where).figures["stop_noticed_s"])
    stopped_figures(report, noticed, rig.STALL_SECONDS)


def stopped_figures(report: Report, noticed: Sequence[float], setting_s: float) -> None:
    """What was noticed, as it is and beyond the watchdog's setting."""
    report.add("recovery_stop_detect", "s", sample(noticed))
    report.add("recovery_stop_detect_setting", "s", sample([setting_s]))
    report.ratios += [
        figure("recovery_stop_detect_s", sample(noticed), at_most=setting_s + STOP_SLACK_SECONDS),
        figure("recovery_stop_detect_excess_s", sample([one - setting_s for one in noticed])),
    ]


def restart(report: Report) -> None:
    """The server dies and comes back empty, then the source dies: over the same without the server's death."""
    done: dict[str, list[Recovered]] = {"restart": [], "calm": [], "restart_alone": []}
    with place(RESTART_TRANSFER_SECONDS) as where:

        def act(name: str, server_dies: bool, source_dies: bool) -> float:
            done[name].append(_survivor(_run(_restarted(server_dies, source_dies), where)))
            return done[name][-1].seconds

        runs: dict[str, Callable[[], float]] = {
            "restart": lambda: act("restart", True, True),
            "calm": lambda: act("calm", False, True),
            "restart_alone": lambda: act("restart_alone", True, False),
        }
        interleave(runs, PAIRS_MIN, report.tell)
    restart_figures(report, done["restart"], done["calm"], done["restart_alone"])


def restart_figures(
    report: Report, restarted: Sequence[Recovered], calm: Sequence[Recovered], alone: Sequence[Recovered]
) -> None:
    """`RemoteFailed` where a restart took so long that the transfer was not three times as long: it shows nothing."""
    away = [one.away_s for one in restarted]
    slow = min(one.seconds for one in calm) / max(away)
    if slow < RESTARTS_IN_A_TRANSFER:
        raise RemoteFailed(
            f"a restart took {max(away):.2f} s, a transfer {slow:.1f} times as long, not {RESTARTS_IN_A_TRANSFER:g}: "
            "the machine is too busy"
        )
    seconds = [[one.seconds for one in runs] for runs in (restarted, calm)]
    report.add("recovery_with_server_restart", "s", sample(seconds[0]))
    report.add("recovery_without_server_restart", "s", sample(seconds[1]))
    report.add("recovery_server_away", "s", sample(away))
    report.ratios += [
        ratio("recovery_server_restart_ratio", *seconds, at_most=1.1),
        figure("recovery_server_restart_bytes_again", sample([max(one.bytes_again for one in alone)]), at_most=0.0),
        figure(
            "recovery_server_restart_chunks_again",
            sample([max(one.chunks_again for one in restarted)]),
            at_most=CHUNKS_AGAIN_MAX,
        ),
    ]


def simulation(report: Report) -> None:
    """The simulation of the whole: events a second, over how many seeds. `Missing` outside a checkout."""
    try:
        simulate: Callable[[int], Any] = importlib.import_module("tests.sim.run").simulate
    except ModuleNotFoundError as error:
        raise Missing(f"the simulation is in a checkout's tests ({error}); run from its root") from error
    rates, clean = [], 0
    for seed in range(SEEDS):
        report.tell(f"seed {seed + 1} of {SEEDS}")
        began = time.perf_counter()
        found = simulate(seed)
        took = time.perf_counter() - began
        if not hasattr(found, "events"):
            raise Missing("this checkout's simulation does not count its events")
        rates.append(found.events / took)
        clean += not found.violations
    report.add("sim_events_per_second", "events/s", sample(rates))
    report.add("sim_seeds", "seeds", sample([SEEDS]))
    report.add("sim_seeds_clean", "seeds", sample([clean]))


# ---------------------------------------------------------------- how a run is made


@contextmanager
def place(transfer_s: float = rig.TRANSFER_SECONDS) -> Iterator[Place]:
    """Where cases run; processes inherit its settings, so it comes before the first of them."""
    with tempfile.TemporaryDirectory(prefix="tensorhub-recovery-") as folder:
        settings = servers.settings(Path(folder), rig.LEASE_SECONDS, rig.BEAT_SECONDS, rig.STALL_SECONDS)
        with mock.patch.dict(os.environ, settings):
            drawn = cases.place_of(cases.CASES["source_killed_midchunk"], SERVER, Path(folder), MIB, 0)
            yield replace(drawn, part=0.5, transfer_s=transfer_s)


def _run(act: Callable[[Rig], None], where: Place) -> Record:
    """One case's record; `RemoteFailed` when anything of it was not as it had to be."""
    ours = Rig(Scene(), where, "recovery")
    try:
        with ours:
            act(ours)
    except (CaseFailed, WorkerFailed) as failure:
        raise RemoteFailed(str(failure)) from failure
    if ours.record.complaints:
        raise RemoteFailed("; ".join(ours.record.complaints))
    return ours.record


def _restarted(server_dies: bool, source_dies: bool) -> Callable[[Rig], None]:
    """The course of a transfer in which the server, the source, or both die, in this order."""

    def act(ours: Rig) -> None:
        ours.publish()
        ours.standby()
        ours.pace()
        reading = ours.read(ours.rollout)
        source = reading.source(SERVER_DIES)
        ours.record.figures["away_s"] = ours.restart_server() if server_dies else 0.0
        if source_dies:
            reading.middle(SOURCE_DIES)
            ours.kill(source)
        # What is read again is a figure here: it has bounds of its own.
        seen = reading.seen()
        ours.record.whole(seen, ours.version)
        ours.record.expect(
            (len(seen.sources) > 1) == source_dies, f"it was read from {', '.join(seen.sources)}: not what is measured"
        )

    return act


def _survivor(record: Record) -> Recovered:
    seen = record.seen[-1]
    return Recovered(
        seen.seconds, seen.bytes_again, seen.bytes_again / record.chunk_bytes, record.figures.get("away_s", 0.0)
    )
