"""What processes on the emulated cluster do with hubs: open a seat, publish, replicate, and say what it took.

Each function runs in a process of the cluster, on its state; times are the monotonic clock, one for all hosts here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import tensorhub
from bench.remote import Missing, State
from tensorhub.errors import BadRequest, EngineUnavailable, ServerUnavailable
from tensorhub.views import StatusView

#: Of one replicate: the slowest that is asked for is 17 shards over one link.
REPLICATE_SECONDS = 100.0
OTHER_SECONDS = 60.0
#: A shard is several tensors, as a model is.
TENSORS = 10
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Seat:
    """Which shard of which replica a process holds, where, and over what it reads."""

    replica: str
    shard: int
    shards: int
    location: str
    server: str
    job: str
    engine: str


@dataclass(frozen=True, slots=True)
class Said:
    """One replicate: when it was called and returned, its phases, from whom how much, CPU seconds meanwhile.

    `nbytes` were verified, `bytes_read` landed; 0 where that is not counted.
    """

    called: float
    returned: float
    phases: dict[str, float]
    sources: tuple[tuple[str, int, str], ...]
    nbytes: int
    bytes_read: int
    cpu: float


def open_seat(state: State, seat: Seat, nbytes: int, fill: int) -> None:
    """Allocate a shard with every page touched, open and register. `Missing` where engine or server do not start."""
    each = nbytes // TENSORS
    sizes = [each] * (TENSORS - 1) + [nbytes - each * (TENSORS - 1)]
    state["tensors"] = {f"layer.{at}": torch.full((size,), fill, dtype=torch.uint8) for at, size in enumerate(sizes)}
    try:
        hub = tensorhub.open(
            MODEL,
            replica=seat.replica,
            shard=seat.shard,
            shards=seat.shards,
            server=seat.server,
            job=seat.job,
            engine=seat.engine,
            location=seat.location,
            timeout=OTHER_SECONDS,
        )
    except (EngineUnavailable, BadRequest, ServerUnavailable) as error:
        raise Missing(f"engine {seat.engine!r}, server {seat.server!r}: {error}") from error
    state["hubs"] = {MODEL: hub}
    hub.register(state["tensors"])


def train(state: State) -> None:
    """Change every byte."""
    for tensor in state["tensors"].values():
        tensor.add_(1)


def publish(state: State, version: int) -> float:
    """When it was called."""
    called = time.monotonic()
    state["hubs"][MODEL].publish(version=version)
    return called


def unpublish(state: State) -> None:
    """Drain, so that the tensors may change."""
    state["hubs"][MODEL].unpublish(timeout=OTHER_SECONDS)


def replicate(state: State, version: int, serves: bool) -> Said:
    """Pull exactly this version; a reader that names all it wants gets the same bytes and serves nobody."""
    before, called = time.process_time(), time.monotonic()
    only = None if serves else list(state["tensors"])
    got = state["hubs"][MODEL].replicate(version, timeout=REPLICATE_SECONDS, only=only)
    returned = time.monotonic()
    uses = tuple((use.replica, use.nbytes, use.reason) for use in got.sources)
    if not got.verified:
        raise RuntimeError(f"version {version} is no result: it was not verified")
    cpu = time.process_time() - before
    return Said(called, returned, dict(got.phases), uses, got.nbytes, got.bytes_read, cpu)


def holds(state: State, like: int) -> bool:
    """Whether every byte of every tensor is this."""
    return all(bool((tensor == like).all()) for tensor in state["tensors"].values())


def first_byte(state: State) -> int:
    """What a shard is full of."""
    return int(next(iter(state["tensors"].values()))[0])


def view(state: State) -> StatusView:
    """What the server knows of the model now."""
    found: StatusView = state["hubs"][MODEL].status()
    return found
