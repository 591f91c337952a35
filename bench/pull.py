"""Question: what does a verified pull within a host cost over the bare copy that it contains, in time and in memory?

One publisher, one reader, engine "local". Time runs from the call of `publish` to the return of `replicate`. Other
engines are held against their peers in `bench/pull_engines.py` and `bench/pull_ray.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from bench import hubs, raw
from bench.measure import PAIRS_MIN, figure, interleave, ratio, sample
from bench.process import MIB, Footprint
from bench.pulls import Puller, link, new_job
from bench.remote import Remote, State
from bench.report import Report

LARGE_BYTES = 1 << 30
LARGE = [hubs.LARGE_TENSOR_BYTES] * (LARGE_BYTES // hubs.LARGE_TENSOR_BYTES)
TINY_COUNT, TINY_BYTES = 100_000, 64
#: A small model, so that 200 versions of it are about versions and not about bytes.
SMALL = [1 << 20] * 8
VERSIONS = 200
#: Rounds before the first look: caches, pools and lazy imports are filled by then.
WARM_VERSIONS = 20


def large(report: Report) -> None:
    """1 GiB: verified over one raw thread, unverified over two, both over memcpy; extra memory of both ends."""
    with Remote("publisher") as publisher, Remote("reader") as reader:
        ranges = publisher.call(hubs.allocate, "large", LARGE, 1)
        reader.call(hubs.allocate, "large", LARGE, 0)
        before = publisher.call(hubs.look_and_reset), reader.call(hubs.look_and_reset)
        pid = publisher.call(process_id)
        link(publisher, reader, "large", new_job())
        pull = Puller(publisher, reader, "large")
        pull("background")  # first contact; the processes' own costs are in the footprints from here on
        extra = memory(publisher, reader, before)
        reader.call(prepare_raw)
        measured = interleave(
            {
                "pull": partial(pull, "background"),
                "raw_1_thread": lambda: float(reader.call(read_raw, pid, ranges, 1)),
                "pull_unverified": partial(pull, "off"),
                "raw_2_threads": lambda: float(reader.call(read_raw, pid, ranges, 2)),
                "memcpy": lambda: float(reader.call(copy_raw)),
            },
            PAIRS_MIN,
            report.tell,
        )
        for name, seconds in measured.items():
            report.add(name, "GB/s", sample([LARGE_BYTES / s / 1e9 for s in seconds]))
        # Rates over rates: seconds the other way round.
        report.ratios += [
            ratio("pull_local_over_raw", measured["raw_1_thread"], measured["pull"], at_least=0.95),
            ratio(
                "pull_local_unverified_over_raw", measured["raw_2_threads"], measured["pull_unverified"], at_least=0.9
            ),
            ratio("pull_local_over_memcpy", measured["memcpy"], measured["pull"]),
            figure("source_extra_rss_over_bytes", sample([extra[0] / LARGE_BYTES]), at_most=0.02),
            figure("reader_extra_rss_mib", sample([extra[1] / MIB]), at_most=64),
        ]


def tiny(report: Report) -> None:
    """100 000 tensors of 64 bytes over one tensor of the same bytes."""
    with Remote("publisher") as publisher, Remote("reader") as reader:
        job = new_job()
        pulls: dict[str, Callable[[], float]] = {}
        for name, sizes in (("tiny", [TINY_BYTES] * TINY_COUNT), ("one", [TINY_BYTES * TINY_COUNT])):
            publisher.call(hubs.allocate, name, sizes, 1)
            reader.call(hubs.allocate, name, sizes, 0)
            link(publisher, reader, name, job)
            pulls[name] = partial(Puller(publisher, reader, name), "background")
            pulls[name]()
        measured = interleave(pulls, PAIRS_MIN, report.tell)
        for name, seconds in measured.items():
            report.add(f"pull_{name}", "ms", sample([s * 1e3 for s in seconds]))
        report.ratios.append(ratio("pull_100k_over_one_tensor", measured["tiny"], measured["one"], at_most=5))


def many_versions(report: Report) -> None:
    """200 versions leave nothing behind: resident memory, descriptors and threads of both processes."""
    with Remote("publisher") as publisher, Remote("reader") as reader:
        publisher.call(hubs.allocate, "small", SMALL, 1)
        reader.call(hubs.allocate, "small", SMALL, 0)
        link(publisher, reader, "small", new_job())
        pull = Puller(publisher, reader, "small")
        for _ in range(WARM_VERSIONS):
            pull("background")
        before: list[Footprint] = [end.call(hubs.look) for end in (publisher, reader)]
        for _ in range(VERSIONS):
            pull("background")
        after: list[Footprint] = [end.call(hubs.look) for end in (publisher, reader)]
        grown = max(now.rss - then.rss for now, then in zip(after, before, strict=True))
        descriptors = max(now.descriptors - then.descriptors for now, then in zip(after, before, strict=True))
        threads = max(now.threads - then.threads for now, then in zip(after, before, strict=True))
        report.ratios += [
            figure("versions_200_rss_growth_mib", sample([grown / MIB]), at_most=8),
            figure("versions_200_descriptors_growth", sample([descriptors]), at_most=0),
            figure("versions_200_threads_growth", sample([threads]), at_most=0),
        ]


def memory(publisher: Remote, reader: Remote, before: tuple[Footprint, Footprint]) -> tuple[int, int]:
    """Bytes that hub and one pull added: resident at the source, at its peak at the reader."""
    return (
        publisher.call(hubs.look).peak_rss - before[0].rss,
        reader.call(hubs.look).peak_rss - before[1].rss,
    )


def process_id(_: State) -> int:
    """The pid that the raw loop reads from."""
    return os.getpid()


def prepare_raw(state: State) -> None:
    """Buffers of the raw peers, apart from registered tensors."""
    state["raw"] = raw.buffer(LARGE_BYTES)
    state["raw_source"] = raw.buffer(LARGE_BYTES)


def read_raw(state: State, pid: int, ranges: list[tuple[int, int]], threads: int) -> float:
    """Seconds of a bare `process_vm_readv` loop."""
    return raw.read_process(pid, ranges, state["raw"], threads)


def copy_raw(state: State) -> float:
    """Seconds of a bare memcpy."""
    return raw.copy(state["raw_source"], state["raw"])
