"""Which questions there are, of which sections each is made, and how sections run: one after the other, each alone.

It measures nothing. Tables name modules and functions instead of importing them: `--help` needs neither torch nor ray.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.remote import Missing, RemoteFailed
from bench.report import Report


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a question that can be asked alone: a function `measure(report)` of a module."""

    module: str
    function: str
    says: str

    def measure(self, report: Report) -> None:
        function: Callable[[Report], None] = getattr(importlib.import_module(self.module), self.function)
        function(report)


QUESTIONS: Mapping[str, Mapping[str, Section]] = {
    "pull": {
        "local": Section("bench.pull", "large", "1 GiB within a host, over bare copies; extra memory"),
        "tiny": Section("bench.pull", "tiny", "100 000 tensors over one"),
        "versions": Section("bench.pull", "many_versions", "what 200 versions leave behind"),
        "mooncake": Section("bench.pull_engines", "mooncake", "engine mooncake over Mooncake's own batch read"),
        "tcp": Section("bench.pull_engines", "tcp", "engine tcp over Mooncake's TCP"),
        "gil": Section("bench.pull_engines", "gil", "a source that holds the interpreter, over an idle one"),
        "nixl": Section("bench.pull_engines", "nixl", "engines local and tcp over NIXL"),
        "gloo": Section("bench.pull_engines", "gloo", "engines local and tcp over a gloo broadcast"),
        "ray": Section("bench.pull_ray", "ray_object_store", "publish to installed, over Ray's object store"),
    },
    "publish": {"publish": Section("bench.publish", "measure", "what publishing costs the trainer")},
    "digest": {"digest": Section("bench.digest", "measure", "which digest can be taken of every byte")},
    "fanout": {
        "curve": Section("bench.fanout", "curve", "T(N) for 1 to 32 replicas, beside the model"),
        "peers": Section("bench.fanout", "peers", "16 replicas, over the ideal and what others do"),
        "groups": Section("bench.fanout", "groups", "1, 2 and 4 replicas of 4 shards"),
        "straggler": Section("bench.fanout_trouble", "straggler", "one of 16 hosts at a quarter of the rate"),
        "killed": Section("bench.fanout_trouble", "killed_source", "a relaying reader killed at half"),
        "stopped": Section("bench.fanout_trouble", "stopped_source", "a relaying reader stopped at half"),
        "relay": Section("bench.fanout_relay", "relay_cpu", "CPU time of relaying, engine local, full speed"),
        "chain": Section("bench.fanout_relay", "local_chain", "a chain of three, engine local, full speed"),
        "ablation": Section("bench.fanout_ablation", "ablation", "which part gives what, by phase"),
    },
    "recovery": {
        "killed": Section("bench.recovery", "killed", "the source killed at half: what is read again"),
        "stopped": Section("bench.recovery", "stopped", "the source stopped at half: when it is noticed"),
        "restart": Section("bench.recovery", "restart", "the server restarted, then the source killed"),
        "sim": Section("bench.recovery", "simulation", "events a second of the simulation of the whole"),
    },
    "verl": {
        "sync": Section("bench.verl.sections", "sync", "a weight sync in verl, over plain TCP from rank 0"),
        "stall": Section("bench.verl.sections", "stall", "how long the trainer stands still, over verl's manager"),
        "lines": Section("bench.verl.lines", "measure", "how many lines that takes"),
        "reward": Section("bench.verl.sections", "reward", "whether a policy learns by it, and not without"),
    },
    "server": {
        "local": Section("bench.server", "local", "grants of the local server"),
        "grpc": Section("bench.server", "grpc", "grants over gRPC"),
        "ray": Section("bench.server", "ray", "grants of the Ray actor, by its address and by actor calls"),
        "echo": Section("bench.server", "echoes", "bare echoes: frames, gRPC stream, Ray actor"),
    },
}


def choose(question: str, only: Sequence[str]) -> dict[str, Section]:
    """The sections that `only` names, in the question's order; all for none. `ValueError` for an unknown one."""
    sections = QUESTIONS[question]
    unknown = [name for name in only if name not in sections]
    if unknown:
        raise ValueError(f"{question} has no section {', '.join(unknown)}; it has {', '.join(sections)}")
    return {name: section for name, section in sections.items() if not only or name in only}


def ask(question: str, only: Sequence[str] = (), tell: Callable[[str], None] = lambda _: None) -> Report:
    """Measure the chosen sections. One that lacks what it needs, or breaks, says so in the report; the others go on."""
    sections = choose(question, only)
    report = Report(question)
    for number, (name, section) in enumerate(sections.items(), 1):
        heading = f"{question} {number}/{len(sections)} {name}"
        began = time.monotonic()
        report.tell = _under(heading, tell)
        report.tell("starting")
        try:
            section.measure(report)
        except Missing as error:
            report.skipped[name] = str(error)
        except (RemoteFailed, OSError, TimeoutError) as error:
            report.failed[name] = f"{type(error).__name__}: {error}"
        report.tell(f"took {time.monotonic() - began:.0f} s")
    return report


def _under(heading: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: tell(f"{heading}: {text}")
