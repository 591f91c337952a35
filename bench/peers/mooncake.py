"""Raw peer: Mooncake's Transfer Engine over TCP, as its own users call it. No protocol, no verification.

A batch of 1 MiB slices or one large read per tensor, whichever is faster here; success is what it returns, and what
the pair sees of the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.peers.pair import Pair, check, load, places, silence
from bench.remote import State

INSTALL = "pip install mooncake-transfer-engine-non-cuda; Debian: libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2"
SLICE_BYTES = 1 << 20
HOST = "127.0.0.1"
FORMS = ("slices", "whole")
#: Reads of each form before one is chosen.
TRIES = 2


@dataclass(slots=True)
class Raw:
    """Reads of all bytes, in the chosen form; `seconds` by form of the tries, `cores` of both ends by read."""

    pair: Pair
    form: str = ""
    tried: dict[str, list[float]] = field(default_factory=dict)
    cores: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        """Seconds of one read."""
        with self.pair.turn():
            before = self.pair.cpu_seconds()
            seconds = float(self.pair.reader.call(read, self.form))
            self.cores.append((self.pair.cpu_seconds() - before) / seconds)
        return seconds

    def choose(self) -> None:
        """Try each form, then stay with the faster one."""
        for self.form in FORMS:
            self()  # its first contact
            self.tried[self.form] = [self() for _ in range(TRIES)]
        self.form = min(FORMS, key=lambda form: min(self.tried[form]))
        self.cores.clear()


@contextmanager
def opened(sizes: list[int]) -> Iterator[Raw]:
    """Connected, warm, in the faster form. `Missing` without Mooncake."""
    with Pair("mooncake", sizes) as pair:
        pair.reader.call(start)
        peer, ranges = pair.source.call(serve)
        pair.reader.call(connect, peer, ranges)
        raw = Raw(pair)
        raw.choose()
        yield raw


def start(state: State, host: str = HOST) -> None:
    """An engine in this process, reached at `host`; its arrays registered."""
    module = load("mooncake.engine", INSTALL)
    silence()
    engine = state["engine"] = module.TransferEngine()
    check(engine.initialize(host, "P2PHANDSHAKE", "tcp", ""), "initialize")
    for address, nbytes in places(state):
        check(engine.register_memory(address, nbytes), f"register_memory of {nbytes} bytes")


def serve(state: State, host: str = HOST) -> tuple[str, list[tuple[int, int]]]:
    """How to reach this process, and where its arrays are."""
    start(state, host)
    return f"{host}:{state['engine'].get_rpc_port()}", places(state)


def connect(state: State, peer: str, ranges: list[tuple[int, int]]) -> None:
    """Plan reads of all ranges, array by array, in each form."""
    pairs = [(here, there, nbytes) for (here, nbytes), (there, _) in zip(places(state), ranges, strict=True)]
    slices = [
        (here + at, there + at, min(SLICE_BYTES, nbytes - at))
        for here, there, nbytes in pairs
        for at in range(0, nbytes, SLICE_BYTES)
    ]
    state["peer"] = peer
    state["plans"] = {
        form: [list(column) for column in zip(*plan, strict=True)]
        for form, plan in (("slices", slices), ("whole", pairs))
    }


def touch(state: State) -> None:
    """First contact: read the first slice."""
    here, there, nbytes = state["plans"]["slices"]
    code = state["engine"].batch_transfer_sync_read(state["peer"], here[:1], there[:1], nbytes[:1])
    check(code, "batch_transfer_sync_read of the first slice")


def read_in_turn(state: State, form: str) -> None:
    """Everything, one read after the other: where many share one link, what is queued behind them runs into the
    engine's own limit of half a minute, and the whole batch fails."""
    for here, there, nbytes in zip(*state["plans"][form], strict=True):
        code = state["engine"].batch_transfer_sync_read(state["peer"], [here], [there], [nbytes])
        check(code, f"batch_transfer_sync_read of {nbytes} bytes")


def read(state: State, form: str) -> float:
    """Seconds of one `batch_transfer_sync_read` of everything."""
    here, there, nbytes = state["plans"][form]
    began = time.perf_counter()
    code = state["engine"].batch_transfer_sync_read(state["peer"], here, there, nbytes)
    seconds = time.perf_counter() - began
    check(code, f"batch_transfer_sync_read of {len(nbytes)} {form}")
    return seconds
