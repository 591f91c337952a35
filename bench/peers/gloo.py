"""Peer: a broadcast of the same bytes between two processes by torch.distributed over gloo, on loopback.

A collective: both ends take part, and both wait for the other. Its clock runs from the source's call, with the reader
waiting already, to the reader's return.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.pair import Pair, load
from bench.remote import Missing, State, both

INSTALL = "a torch that is built with torch.distributed"
#: Of rendezvous and of one broadcast.
TIMEOUT_SECONDS = 60.0
SOURCE, READER = 0, 1


@dataclass(slots=True)
class Broadcast:
    """Broadcasts of all bytes."""

    pair: Pair

    def __call__(self) -> float:
        """Seconds of one broadcast."""
        with self.pair.turn():
            began, ended = both(self.pair.reader, (broadcast,), self.pair.source, (broadcast,))
            return float(ended[1] - began[0])


@contextmanager
def opened(sizes: list[int]) -> Iterator[Broadcast]:
    """Connected and warm. `Missing` where torch has no gloo."""
    with tempfile.TemporaryDirectory() as folder, Pair("gloo", sizes) as pair:
        meeting = str(Path(folder) / "gloo")
        pair.reader.start(join, READER, meeting)
        try:
            pair.source.call(join, SOURCE, meeting)
        finally:
            pair.reader.result()
        peer = Broadcast(pair)
        peer()  # its first contact
        yield peer


def join(state: State, rank: int, meeting: str, world: int = 2, interface: str = "lo") -> None:
    """Meet the other ends, and look at the arrays as tensors."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch: Any = load("torch", INSTALL)
    if not torch.distributed.is_available():
        raise Missing(f"no torch.distributed; install: {INSTALL}")
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS),
    )
    state["tensors"] = [torch.from_numpy(array) for array in state["arrays"]]


def broadcast(state: State) -> tuple[float, float]:
    """When this end called, and when its last tensor was done."""
    distributed: Any = load("torch.distributed", INSTALL)
    called = time.monotonic()
    for tensor in state["tensors"]:
        distributed.broadcast(tensor, SOURCE)
    return called, time.monotonic()
