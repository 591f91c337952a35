"""Question: what does relaying cost where no link hides it: the reader that does it, and those at a chain's end?

Engine "local", full speed: a reader pulls alone, then pulls while another follows it. Whoever reads does the copying,
so all that a relay pays is what its own progress costs, and the cores' shared memory. Then three readers in a chain.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench import hubs
from bench.measure import PAIRS_MIN, interleave, ratio, sample
from bench.pull import LARGE, LARGE_BYTES
from bench.pulls import link, new_job
from bench.remote import SETTLE_SECONDS, Missing, Remote, State
from bench.report import Report

NAME = "relayed"
READERS = ("reader-0", "reader-1", "reader-2")
#: Rounds in which a reader was given another source, before the question is given up.
ELSEWHERE_MAX = 7
#: Between two looks at who pulls: little beside a pull of 1 GiB.
LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Pulled:
    """One replicate: CPU seconds this process took, when it returned, replicas it read from."""

    cpu: float
    returned: float
    sources: tuple[str, ...]


class Trio:
    """A publisher, a reader, and one that follows the reader."""

    def __init__(self, publisher: Remote, reader: Remote, follower: Remote) -> None:
        self.publisher, self.reader, self.follower = publisher, reader, follower
        self.version = 0
        self._elsewhere = 0

    def plain(self) -> float:
        """CPU seconds of the reader alone."""
        self._publish()
        pulled: Pulled = self.reader.call(pull, self.version)
        return self._done(pulled.cpu, [self.reader])

    def relaying(self) -> float:
        """CPU seconds of the reader while the follower reads from it."""
        while True:
            self._publish()
            self.reader.start(pull, self.version)
            self.publisher.call(wait_filling, self.version)  # before, there is nothing to follow
            self.follower.start(pull, self.version)
            pulled: Pulled = self.reader.result()
            sources = self.follower.result().sources
            self._done(pulled.cpu, [self.reader, self.follower])
            if sources == ("reader",):
                return pulled.cpu
            self._elsewhere += 1
            if self._elsewhere > ELSEWHERE_MAX:
                raise Missing(f"the server lets the follower read from {', '.join(sources)}, not from the reader alone")

    def _publish(self) -> None:
        self.version += 1
        self.publisher.call(hubs.train, NAME)
        self.publisher.call(hubs.publish, NAME, self.version, "background")

    def _done(self, cpu: float, readers: list[Remote]) -> float:
        finish(self.publisher, readers, self.version)
        return cpu


class Crowd:
    """A publisher, and readers that all wait for what it publishes."""

    def __init__(self, publisher: Remote, readers: Sequence[Remote]) -> None:
        self.publisher, self.readers = publisher, readers
        self.version = 0

    def round(self) -> list[float]:
        """Seconds from the call of publish to each return, down the chain. `Missing` if the readers form none."""
        for _ in range(1 + ELSEWHERE_MAX):
            self.version += 1
            self.publisher.call(hubs.train, NAME)
            for reader in self.readers:
                reader.start(pull, self.version)
            time.sleep(SETTLE_SECONDS)
            began, _ = self.publisher.call(hubs.publish, NAME, self.version, "background")
            pulled: dict[str, Pulled] = {reader.name: reader.result() for reader in self.readers}
            finish(self.publisher, self.readers, self.version)
            order = chain_of({name: one.sources for name, one in pulled.items()}, self.publisher.name)
            if order is not None:
                return [pulled[name].returned - began for name in order]
        raise Missing(f"the readers form no chain: {', '.join(f'{n} of {one.sources}' for n, one in pulled.items())}")


def chain_of(sources: Mapping[str, Sequence[str]], root: str) -> list[str] | None:
    """Readers in the order of the one chain that begins at `root`; None if someone read from more, or they fork."""
    below = {found[0]: name for name, found in sources.items() if len(found) == 1}
    order: list[str] = []
    while len(order) < len(sources) and (name := below.get(order[-1] if order else root)) is not None:
        order.append(name)
    return order if len(order) == len(sources) else None


def local_chain(report: Report) -> None:
    """1 GiB down a chain of three processes at full speed: the last over the first, who has the cores for less."""
    with ExitStack() as stack:
        publisher, *readers = (stack.enter_context(Remote(name)) for name in ("publisher", *READERS))
        job = new_job()
        for process in (publisher, *readers):
            process.call(hubs.allocate, NAME, LARGE, 1 if process is publisher else 0)
            process.call(hubs.open_hub, NAME, NAME, process.name, job, "local")
        crowd = Crowd(publisher, readers)
        crowd.round()  # first contact
        rounds = []
        for at in range(PAIRS_MIN):
            report.tell(f"pair {at + 1} of {PAIRS_MIN}")
            rounds.append(crowd.round())
    for hop in range(len(READERS)):
        report.add(f"fanout_local_chain_hop_{hop + 1}", "s", sample([one[hop] for one in rounds]))
    report.ratios.append(
        ratio("fanout_local_chain_last_over_first", [one[-1] for one in rounds], [one[0] for one in rounds])
    )


def finish(publisher: Remote, readers: Sequence[Remote], version: int) -> None:
    """Every reader must hold what the publisher does; then the version ends."""
    there = publisher.call(hubs.first_bytes, NAME)
    if any(process.call(hubs.first_bytes, NAME) != there for process in readers):
        raise RuntimeError(f"version {version} is no result: a reader does not hold it")
    publisher.call(hubs.unpublish, NAME)


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


def pull(state: State, version: int) -> Pulled:
    """Replicate exactly this version, waiting for it if need be."""
    before = time.process_time()
    got = state["hubs"][NAME].replicate(version, timeout=hubs.TIMEOUT_SECONDS)
    returned = time.monotonic()
    return Pulled(time.process_time() - before, returned, tuple(use.replica for use in got.sources))


def wait_filling(state: State, version: int) -> None:
    """Return as soon as a reader of this version serves what it has, or has all of it."""
    deadline = time.monotonic() + hubs.TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        holdings = state["hubs"][NAME].status().holdings
        if any(one.version.number == version and one.state in ("filling", "complete") for one in holdings):
            return
        time.sleep(LOOK_SECONDS)
    raise TimeoutError(f"nobody pulls version {version} within {hubs.TIMEOUT_SECONDS:g} s")
