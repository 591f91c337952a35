"""Question: what does a verified pull cost over what other libraries take to move the same bytes, engine by engine?

Ours is always verified and always through a server; peers only move. Unless said otherwise the version is sealed before
the clock of our pull starts: a peer's bytes are ready, too. What is missing is skipped by name; the rest is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from bench import hubs, pulls
from bench.measure import PAIRS_MIN, interleave, ratio, sample
from bench.peers import gloo as gloo_peer
from bench.peers import mooncake as mooncake_peer
from bench.peers import nixl as nixl_peer
from bench.pull import LARGE, LARGE_BYTES
from bench.remote import Missing
from bench.report import Report

T = TypeVar("T")

#: The bound is near what is reached, and Mooncake's own rate varies by a third from read to read.
MOONCAKE_PAIRS = 15


@dataclass(frozen=True, slots=True)
class Rate:
    """A ratio to report: the rate of `ours` over that of `peer`."""

    name: str
    ours: str
    peer: str
    at_least: float | None = None


@dataclass(slots=True)
class Pulled:
    """Pulls of a kind, one per call; remembers what else is worth reporting of them."""

    pull: Callable[[], pulls.Pull]
    done: list[pulls.Pull] = field(default_factory=list)

    def __call__(self) -> float:
        """Seconds of one replicate call."""
        self.done.append(self.pull())
        return self.done[-1].seconds


def mooncake(report: Report) -> None:
    """Engine "mooncake" over Mooncake's own batch read, and the cores that each uses."""
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        raw = offered(report, stack, "raw_mooncake", mooncake_peer.opened(LARGE))
        puller = offered(report, stack, "pull_mooncake", pulls.opened(LARGE, "mooncake"))
        pull = Pulled(puller.sealed) if puller is not None else None
        if raw is not None:
            runs["raw_mooncake"] = raw
        if pull is not None:
            runs["pull_mooncake"] = pull
        compare(report, runs, MOONCAKE_PAIRS, [Rate("pull_mooncake_over_raw", "pull_mooncake", "raw_mooncake", 0.8)])
        if raw is not None:
            add_tried(report, "raw_mooncake", raw.tried)
            report.add("raw_mooncake_cores", "cores", sample(raw.cores))
        if pull is not None:
            report.add("pull_mooncake_cores", "cores", sample([pull.cores for pull in pull.done]))


def tcp(report: Report) -> None:
    """Engine "tcp" on loopback over raw Mooncake TCP."""
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        raw = offered(report, stack, "raw_mooncake", mooncake_peer.opened(LARGE))
        puller = offered(report, stack, "pull_tcp", pulls.opened(LARGE, "tcp"))
        pull = Pulled(puller.sealed) if puller is not None else None
        if raw is not None:
            runs["raw_mooncake_beside_tcp"] = raw
        if pull is not None:
            runs["pull_tcp"] = pull
        bound = Rate("pull_tcp_over_mooncake_tcp", "pull_tcp", "raw_mooncake_beside_tcp", 1.2)
        compare(report, runs, PAIRS_MIN, [bound])
        if pull is not None:
            report.add("pull_tcp_cores", "cores", sample([pull.cores for pull in pull.done]))


def gil(report: Report) -> None:
    """A source whose process runs a loop of pure Python over the same one idle; pulled as soon as publish returns."""
    for engine in ("local", "tcp"):
        with ExitStack() as stack:
            puller = offered(report, stack, f"pull_{engine}_gil_bound", pulls.opened(LARGE, engine))
            if puller is None:
                continue
            idle, bound = Pulled(puller.fresh), Pulled(partial(gil_bound, puller))
            names = {f"pull_{engine}_idle": idle, f"pull_{engine}_gil_bound": bound}
            rate = Rate(f"pull_{engine}_gil_bound_over_idle", f"pull_{engine}_gil_bound", f"pull_{engine}_idle", 0.6)
            compare(report, names, PAIRS_MIN, [rate])
            for name, pulled in names.items():
                installed = [pull.installed_seconds for pull in pulled.done]
                report.add(f"{name}_publish_to_installed", "GB/s", sample(rates(installed)))


def gil_bound(puller: pulls.Puller) -> pulls.Pull:
    """One such pull."""
    puller.publisher.call(hubs.hold_interpreter)
    try:
        return puller.fresh()
    finally:
        puller.publisher.call(hubs.let_go_of_interpreter)


def nixl(report: Report) -> None:
    """Engine "local" over NIXL's choice of transports within a host, engine "tcp" over NIXL restricted to TCP."""
    for engine, transports, name, at_least in (("local", "", "nixl", 1.1), ("tcp", "tcp", "nixl_tcp", 1.5)):
        with ExitStack() as stack:
            runs: dict[str, Callable[[], float]] = {}
            raw = offered(report, stack, name, nixl_peer.opened(LARGE, transports))
            puller = offered(report, stack, f"pull_{engine}_beside_{name}", pulls.opened(LARGE, engine))
            if raw is not None:
                runs[name] = raw
            if puller is not None:
                runs[f"pull_{engine}_beside_{name}"] = Pulled(puller.sealed)
            rate = Rate(f"pull_{engine}_over_{name}", f"pull_{engine}_beside_{name}", name, at_least)
            compare(report, runs, PAIRS_MIN, [rate])
            if raw is not None:
                add_tried(report, name, raw.tried)


def gloo(report: Report) -> None:
    """Both engines over a gloo broadcast."""
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        peer = offered(report, stack, "gloo_broadcast", gloo_peer.opened(LARGE))
        if peer is not None:
            runs["gloo_broadcast"] = peer
        for engine in ("local", "tcp"):
            puller = offered(report, stack, f"pull_{engine}_beside_gloo", pulls.opened(LARGE, engine))
            if puller is not None:
                runs[f"pull_{engine}_beside_gloo"] = Pulled(puller.sealed)
        wanted = [
            Rate(f"pull_{engine}_over_gloo", f"pull_{engine}_beside_gloo", "gloo_broadcast")
            for engine in ("local", "tcp")
        ]
        compare(report, runs, PAIRS_MIN, wanted)


def offered(report: Report, stack: ExitStack, name: str, opening: AbstractContextManager[T]) -> T | None:
    """What opens here, closed with the stack; None, and a line in the report, for what is missing."""
    report.tell(f"opening {name}")
    try:
        return stack.enter_context(opening)
    except Missing as error:
        report.skipped[name] = str(error)
        return None


def compare(report: Report, runs: Mapping[str, Callable[[], float]], pairs: int, wanted: Sequence[Rate]) -> None:
    """Run everything in pairs; rates of 1 GiB, and the ratios whose two sides were both there."""
    measured = interleave(runs, pairs, report.tell)
    for name, seconds in measured.items():
        report.add(name, "GB/s", sample(rates(seconds)))
    for rate in wanted:
        if rate.ours in measured and rate.peer in measured:
            # Rates over rates: seconds the other way round.
            found = ratio(rate.name, measured[rate.peer], measured[rate.ours], at_least=rate.at_least)
            report.ratios.append(found)
        else:
            report.skipped[rate.name] = "one of its sides is missing"


def add_tried(report: Report, name: str, tried: Mapping[str, Sequence[float]]) -> None:
    """The forms of a peer among which the fastest was chosen."""
    for form, seconds in tried.items():
        report.add(f"{name}_tried_{form}", "GB/s", sample(rates(seconds)))


def rates(seconds: Sequence[float]) -> list[float]:
    """GB/s of 1 GiB."""
    return [LARGE_BYTES / one / 1e9 for one in seconds]
