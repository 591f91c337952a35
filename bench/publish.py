"""Question: what does publishing cost the trainer, and how soon is everything readable?

The publish call must not depend on size; the digests in the background must neither lag far behind a bare loop nor take
the trainer's cores; registering many tensors must stay near the cost of looking at each.
"""

from __future__ import annotations

import os
import secrets
import time

import torch

from bench import hubs, raw
from bench.measure import PAIRS_MIN, figure, interleave, ratio, sample
from bench.remote import Remote, State
from bench.report import Report

BIG_BYTES = 4 << 30
SMALL_BYTES = 64 << 20
SIZES = {
    "4gib": [hubs.LARGE_TENSOR_BYTES] * (BIG_BYTES // hubs.LARGE_TENSOR_BYTES),
    "64mib": [SMALL_BYTES],
}
#: Chunk of a 4 GiB shard: 1/1024 of it.
CHUNK_BYTES = 4 << 20
TINY_COUNT, TINY_BYTES = 100_000, 64
#: A train step of this many multiplications takes some tenths of a second on two cores: shorter than the digests of
#: 4 GiB beside it, long enough for the scheduler to even out.
MATRIX = 768
MULTIPLICATIONS = 12


def measure(report: Report) -> None:
    """Everything; about two minutes on two cores."""
    job = f"bench-{secrets.token_hex(8)}"
    with Remote("trainer") as trainer, Remote("observer") as observer:
        for name, sizes in SIZES.items():
            trainer.call(hubs.allocate, name, sizes, 1)
            trainer.call(hubs.open_hub, name, name, "trainer", job)
        observer.call(hubs.open_hub, "4gib", "4gib", "observer", job)
        publish_call(report, trainer)
        readable(report, trainer, observer)
        slowdown(report, trainer)
    with Remote("trainer") as trainer:
        register(report, trainer, job)


class Publisher:
    """Publishes rising versions of one set of tensors and takes them back."""

    #: All versions of a run rise, whoever publishes them.
    version = 0

    def __init__(self, trainer: Remote, name: str) -> None:
        self.trainer = trainer
        self.name = name

    def publish(self) -> tuple[float, float]:
        """(when it was called, seconds of the call)."""
        Publisher.version += 1
        called, seconds = self.trainer.call(hubs.publish, self.name, Publisher.version, "background")
        return float(called), float(seconds)

    def unpublish(self) -> None:
        self.trainer.call(hubs.unpublish, self.name)

    def call_seconds(self) -> float:
        """Seconds of one publish call; it is taken back at once."""
        seconds = self.publish()[1]
        self.unpublish()
        return seconds


def publish_call(report: Report, trainer: Remote) -> None:
    """The publish call of 4 GiB over that of 64 MiB."""
    publishers = {name: Publisher(trainer, name) for name in SIZES}
    for publisher in publishers.values():
        publisher.call_seconds()  # the first fills caches
    measured = interleave(
        {name: publisher.call_seconds for name, publisher in publishers.items()}, 2 * PAIRS_MIN, report.tell
    )
    for name, seconds in measured.items():
        report.add(f"publish_call_{name}", "ms", sample([s * 1e3 for s in seconds]))
    report.ratios.append(ratio("publish_4gib_over_64mib", measured["4gib"], measured["64mib"], at_most=1.5))


def readable(report: Report, trainer: Remote, observer: Remote) -> None:
    """From the publish call to the last chunk readable, over a bare one-thread digest of the same bytes."""
    publisher = Publisher(trainer, "4gib")

    def publish_to_readable() -> float:
        observer.start(hubs.wait_sealed, "4gib", Publisher.version + 1)
        called, _ = publisher.publish()
        sealed = float(observer.result())
        publisher.unpublish()
        return sealed - called

    measured = interleave(
        {"publish_to_readable": publish_to_readable, "digest": lambda: float(trainer.call(digest_raw, "4gib"))},
        PAIRS_MIN,
        report.tell,
    )
    for name, seconds in measured.items():
        report.add(name, "GB/s", sample([BIG_BYTES / s / 1e9 for s in seconds]))
    report.ratios.append(
        ratio("publish_to_readable_over_digest", measured["publish_to_readable"], measured["digest"], at_most=1.2)
    )


def slowdown(report: Report, trainer: Remote) -> None:
    """A train loop that keeps every core busy, while digests run in the background, over the same loop alone."""
    publisher = Publisher(trainer, "4gib")
    outlived: list[float] = []

    def beside_digests() -> float:
        publisher.publish()
        seconds = float(trainer.call(train_loop))
        # Digests that end before the loop would flatter the ratio: how often they lasted is reported with it.
        outlived.append(float(trainer.call(hubs.publishing, "4gib")))
        publisher.unpublish()
        return seconds

    trainer.call(train_loop)
    measured = interleave(
        {"train_beside_digests": beside_digests, "train_alone": lambda: float(trainer.call(train_loop))},
        2 * PAIRS_MIN,
        report.tell,
    )
    for name, seconds in measured.items():
        report.add(name, "ms", sample([s * 1e3 for s in seconds]))
    report.add("digests_outlived_loop", "of 1", sample([sum(outlived) / len(outlived)]))
    report.ratios.append(
        ratio("train_step_slowdown", measured["train_beside_digests"], measured["train_alone"], at_most=1.15)
    )


def register(report: Report, trainer: Remote, job: str) -> None:
    """Registering 100 000 tiny tensors over a plain loop that looks at each."""
    trainer.call(hubs.allocate_tiny, "tiny", TINY_COUNT, TINY_BYTES, 1)
    trainer.call(register_once, job)
    measured = interleave(
        {
            "register_100k": lambda: float(trainer.call(register_once, job)),
            "loop_100k": lambda: float(trainer.call(look_at_each)),
        },
        PAIRS_MIN,
        report.tell,
    )
    for name, seconds in measured.items():
        report.add(name, "ms", sample([s * 1e3 for s in seconds]))
    report.ratios.append(ratio("register_100k_over_loop", measured["register_100k"], measured["loop_100k"], at_most=4))
    report.ratios.append(figure("register_100k_us_per_tensor", sample([s * 10 for s in measured["register_100k"]])))


def digest_raw(state: State, name: str) -> float:
    """Seconds of a bare digest loop over the tensors."""
    return raw.digest(hubs.arrays(state, name), CHUNK_BYTES)


def train_loop(state: State) -> float:
    """Seconds of a fixed amount of arithmetic on every core, on tensors of its own."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    left = state.setdefault("left", torch.ones(MATRIX, MATRIX))
    right = state.setdefault("right", torch.ones(MATRIX, MATRIX))
    out = state.setdefault("out", torch.empty(MATRIX, MATRIX))
    started = time.perf_counter()
    for _ in range(MULTIPLICATIONS):
        torch.mm(left, right, out=out)
    return time.perf_counter() - started


def register_once(state: State, job: str) -> float:
    """Seconds of one `register` with a fresh hub, which is closed again."""
    hubs.open_hub(state, "fresh", "tiny", "trainer", job)
    hub, tensors = state["hubs"]["fresh"], state["tensors"]["tiny"]
    started = time.perf_counter()
    hub.register(tensors)
    seconds = time.perf_counter() - started
    hubs.close_hub(state, "fresh")
    return seconds


def look_at_each(state: State) -> float:
    """Seconds of a plain loop that reads `data_ptr()`, `numel()` and `dtype` of each tensor."""
    tensors = state["tensors"]["tiny"]
    started = time.perf_counter()
    for tensor in tensors.values():
        tensor.data_ptr()
        tensor.numel()
        _ = tensor.dtype
    return time.perf_counter() - started
