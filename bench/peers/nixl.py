"""Raw peer: a NIXL READ over UCX on host memory, posted and polled until it is done. No verification.

Its processes may crash while they exit: they are of their own, and how they end is nobody's result. Preparing a
transfer, which a real user does per transfer or once, is outside the clock, in NIXL's favour.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.peers.pair import Pair, load, places
from bench.remote import State

INSTALL = "pip install --no-deps nixl nixl-cu12 (no GPU needed)"
READ_SECONDS = 60.0
#: Memory kind and device as NIXL's descriptors want them: host memory has no device.
KIND, DEVICE = "DRAM", 0


@dataclass(slots=True)
class Raw:
    """Reads of all bytes."""

    pair: Pair

    def __call__(self) -> float:
        """Seconds of one read."""
        with self.pair.turn():
            return float(self.pair.reader.call(read))


@contextmanager
def opened(sizes: list[int], transports: str = "") -> Iterator[Raw]:
    """Connected and warm, over these UCX transports or UCX's own choice. `Missing` without NIXL."""
    with Pair("nixl", sizes) as pair:
        pair.reader.call(start, "reader", transports)
        metadata, remote = pair.source.call(serve, transports)
        pair.reader.call(connect, metadata, remote)
        raw = Raw(pair)
        raw()  # its first contact
        yield raw


def start(state: State, name: str, transports: str) -> None:
    """An agent in this process, its arrays registered."""
    settings = {"UCX_TLS": transports} if transports else {}
    module = load("nixl._api", INSTALL, **settings, NIXL_LOG_LEVEL="ERROR", UCX_LOG_LEVEL="error")
    agent = state["agent"] = module.nixl_agent(name, module.nixl_agent_config(backends=["UCX"]))
    state["registered"] = agent.register_memory([(*place, DEVICE, "") for place in places(state)], KIND)


def serve(state: State, transports: str) -> tuple[bytes, list[tuple[int, int]]]:
    """The agent's metadata, and where its arrays are."""
    start(state, "source", transports)
    return state["agent"].get_agent_metadata(), places(state)


def connect(state: State, metadata: bytes, remote: list[tuple[int, int]]) -> None:
    """Know the source and prepare the transfer."""
    agent = state["agent"]
    source = agent.add_remote_agent(metadata)
    mine, theirs = (
        agent.get_xfer_descs([(*place, DEVICE) for place in some], KIND) for some in (places(state), remote)
    )
    state["transfer"] = agent.initialize_xfer("READ", mine, theirs, source)


def read(state: State) -> float:
    """Seconds of one READ of everything."""
    agent, transfer = state["agent"], state["transfer"]
    began = time.perf_counter()
    outcome = agent.transfer(transfer)
    while outcome == "PROC" and time.perf_counter() - began < READ_SECONDS:
        outcome = agent.check_xfer_state(transfer)
    seconds = time.perf_counter() - began
    if outcome != "DONE":
        raise RuntimeError(f"the READ is {outcome} after {seconds:.1f} s")
    return seconds
