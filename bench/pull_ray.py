"""Question: is a pull sooner installed than what Ray's object store hands on?

Both clocks run from the call that gives weights away (`publish`, `put`) until every byte is in place elsewhere; ours
digests, verifies and serves within that, the store copies in and out.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench import pulls
from bench.measure import PAIRS_MIN, interleave, ratio, sample
from bench.peers import ray_store
from bench.pull import LARGE
from bench.pull_engines import offered, rates
from bench.report import Report

#: Each store is cold once: so many are started.
COLD_STARTS = 3
#: Objects put before a store counts as warm: all its memory has been touched by then.
WARM_ROUNDS = 4


def ray_object_store(report: Report) -> None:
    """Engine auto, publish to installed, over `put` + `get` + copy with a warm store; with a cold one, reported."""
    with ExitStack() as stack:
        puller = stack.enter_context(pulls.opened(LARGE, "auto"))
        cold: list[tuple[float, float]] = []
        for start in range(1, COLD_STARTS + 1):
            report.tell(f"cold store {start} of {COLD_STARTS}")
            with ExitStack() as lifetime:
                store = offered(report, lifetime, "ray_object_store", ray_store.opened(LARGE))
                if store is None:
                    return
                cold.append((store(), puller()))
                if start == COLD_STARTS:
                    warm(report, puller, store)
        stores, ours = zip(*cold, strict=True)
        report.add("ray_object_store_cold", "GB/s", sample(rates(stores)))
        report.ratios.append(ratio("pull_over_ray_object_store_cold", stores, ours))


def warm(report: Report, puller: pulls.Puller, store: ray_store.Store) -> None:
    """The store's memory is all touched, ours too."""
    for _ in range(WARM_ROUNDS):
        store()
    measured = interleave({"ray_object_store": store, "pull_beside_ray": puller}, PAIRS_MIN, report.tell)
    for name, seconds in measured.items():
        report.add(name, "GB/s", sample(rates(seconds)))
    found = ratio("pull_over_ray_object_store", measured["ray_object_store"], measured["pull_beside_ray"], at_least=1.0)
    report.ratios.append(found)
