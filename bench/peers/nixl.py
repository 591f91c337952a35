"""Raw peer: a NIXL READ over UCX on host memory, posted and polled until it is done. No verification.

With a progress thread at the reader, NIXL's default, or without, the poll then making the progress: whichever is faster
here. The source always has one: over TCP it must answer.
Its processes may crash while they exit: they are of their own, and how they end is nobody's result. Preparing a
transfer, which a real user does per transfer or once, is outside the clock, in NIXL's favour.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.peers.pair import Pair, load, places, silence
from bench.remote import State

INSTALL = "pip install nixl-cu12, which needs no GPU"
READ_SECONDS = 60.0
FORMS = ("progress_thread", "polled")
#: Reads in each form before one is chosen.
TRIES = 2
#: Memory kind and device as NIXL's descriptors want them: host memory has no device.
KIND, DEVICE = "DRAM", 0


@dataclass(slots=True)
class Raw:
    """Reads of all bytes; `tried` says how many seconds reads took in each form."""

    pair: Pair
    tried: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self) -> float:
        """Seconds of one read."""
        with self.pair.turn():
            return float(self.pair.reader.call(read))


@contextmanager
def opened(sizes: list[int], transports: str = "") -> Iterator[Raw]:
    """Connected, warm, in the faster form, over these UCX transports or UCX's own choice. `Missing` without NIXL."""
    tried: dict[str, list[float]] = {}
    for form in FORMS:
        with _connected(sizes, transports, form) as raw:
            tried[form] = [raw() for _ in range(TRIES)]
    with _connected(sizes, transports, min(FORMS, key=lambda form: min(tried[form]))) as raw:
        raw.tried = tried
        yield raw


@contextmanager
def _connected(sizes: list[int], transports: str, form: str) -> Iterator[Raw]:
    with Pair("nixl", sizes) as pair:
        pair.reader.call(start, "reader", transports, form == "progress_thread")
        metadata, remote = pair.source.call(serve, transports)
        pair.reader.call(connect, metadata, remote)
        raw = Raw(pair)
        raw()  # its first contact
        yield raw


def start(state: State, name: str, transports: str, progress_thread: bool) -> None:
    """An agent in this process, its arrays registered."""
    settings = {"UCX_TLS": transports} if transports else {}
    module = load("nixl_cu12._api", INSTALL, **settings)
    silence()
    config = module.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
    agent = state["agent"] = module.nixl_agent(name, config)
    state["registered"] = agent.register_memory([(*place, DEVICE, "") for place in places(state)], KIND)


def serve(state: State, transports: str) -> tuple[bytes, list[tuple[int, int]]]:
    """The agent's metadata, and where its arrays are."""
    start(state, "source", transports, True)
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
