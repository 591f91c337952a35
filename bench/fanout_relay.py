"""Question: what does relaying cost the reader that does it, in CPU time per byte, where no link hides it?

Engine "local", full speed: a reader pulls alone, then pulls while another follows it. Whoever reads does the copying,
so all that a relay pays is what its own progress costs, and the cores' shared memory.
"""

from __future__ import annotations

import time

from bench import hubs
from bench.measure import PAIRS_MIN, interleave, ratio, sample
from bench.pull import LARGE, LARGE_BYTES
from bench.pulls import link, new_job
from bench.remote import Missing, Remote, State
from bench.report import Report

NAME = "relayed"
#: Rounds in which the follower was given another source, before the question is given up.
ELSEWHERE_MAX = 7
#: Between two looks at who pulls: little beside a pull of 1 GiB.
LOOK_SECONDS = 0.005


class Trio:
    """A publisher, a reader, and one that follows the reader."""

    def __init__(self, publisher: Remote, reader: Remote, follower: Remote) -> None:
        self.publisher, self.reader, self.follower = publisher, reader, follower
        self.version = 0
        self._elsewhere = 0

    def plain(self) -> float:
        """CPU seconds of the reader alone."""
        self._publish()
        cpu, _ = self.reader.call(pull, self.version)
        return self._done(float(cpu), [self.reader])

    def relaying(self) -> float:
        """CPU seconds of the reader while the follower reads from it."""
        while True:
            self._publish()
            self.reader.start(pull, self.version)
            self.publisher.call(wait_filling, self.version)  # before, there is nothing to follow
            self.follower.start(pull, self.version)
            cpu, _ = self.reader.result()
            _, sources = self.follower.result()
            self._done(float(cpu), [self.reader, self.follower])
            if sources == ("reader",):
                return float(cpu)
            self._elsewhere += 1
            if self._elsewhere > ELSEWHERE_MAX:
                raise Missing(f"the server lets the follower read from {', '.join(sources)}, not from the reader alone")

    def _publish(self) -> None:
        self.version += 1
        self.publisher.call(hubs.train, NAME)
        self.publisher.call(hubs.publish, NAME, self.version, "background")

    def _done(self, cpu: float, readers: list[Remote]) -> float:
        there = self.publisher.call(hubs.first_bytes, NAME)
        if any(process.call(hubs.first_bytes, NAME) != there for process in readers):
            raise RuntimeError(f"version {self.version} is no result: a reader does not hold it")
        self.publisher.call(hubs.unpublish, NAME)
        return cpu


def relay_cpu(report: Report) -> None:
    """1 GiB, in turns."""
    with Remote("publisher") as publisher, Remote("reader") as reader, Remote("follower") as follower:
        job = new_job()
        for process, fill in ((publisher, 1), (reader, 0), (follower, 0)):
            process.call(hubs.allocate, NAME, LARGE, fill)
        link(publisher, reader, NAME, job, "local")
        follower.call(hubs.open_hub, NAME, NAME, "follower", job, "local")
        trio = Trio(publisher, reader, follower)
        trio.relaying()  # first contact
        measured = interleave({"plain": trio.plain, "relaying": trio.relaying}, PAIRS_MIN, report.tell)
    for name, seconds in measured.items():
        report.add(f"fanout_cpu_{name}", "CPU s per GB", sample([one / LARGE_BYTES * 1e9 for one in seconds]))
    report.ratios.append(ratio("relay_cpu_over_pull", measured["relaying"], measured["plain"], at_most=1.25))


def pull(state: State, version: int) -> tuple[float, tuple[str, ...]]:
    """CPU seconds this process took for it, and the replicas it read from."""
    before = time.process_time()
    got = state["hubs"][NAME].replicate(version, timeout=hubs.TIMEOUT_SECONDS)
    return time.process_time() - before, tuple(use.replica for use in got.sources)


def wait_filling(state: State, version: int) -> None:
    """Return as soon as a reader of this version serves what it has, or has all of it."""
    deadline = time.monotonic() + hubs.TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        holdings = state["hubs"][NAME].status().holdings
        if any(one.version.number == version and one.state in ("filling", "complete") for one in holdings):
            return
        time.sleep(LOOK_SECONDS)
    raise TimeoutError(f"nobody pulls version {version} within {hubs.TIMEOUT_SECONDS:g} s")
