"""What benchmark processes do with hubs: make tensors, open, publish, replicate, and say when on the shared clock.

Each function runs in a `Remote`, on its state. Times are `time.monotonic()`, one clock for all processes of a host.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import torch

import tensorhub
from bench.process import Footprint, footprint, reset_peak
from bench.remote import Missing, State
from tensorhub.errors import EngineUnavailable

#: Of one hub call.
TIMEOUT_SECONDS = 60.0
#: Tensors of a large model: few enough that their number costs nothing, enough to be no special case.
LARGE_TENSOR_BYTES = 64 << 20


def allocate(state: State, name: str, sizes: list[int], fill: int) -> list[tuple[int, int]]:
    """Tensors of these sizes with every page touched, known as `name`; (address, nbytes) of each."""
    tensors = {f"t{i:06}": torch.full((nbytes,), fill, dtype=torch.uint8) for i, nbytes in enumerate(sizes)}
    state.setdefault("tensors", {})[name] = tensors
    return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors.values()]


def allocate_tiny(state: State, name: str, count: int, nbytes: int, fill: int) -> None:
    """`count` tensors of `nbytes` each, every one an allocation of its own."""
    allocate(state, name, [nbytes] * count, fill)


def open_hub(state: State, name: str, model: str, replica: str, job: str, engine: str = "auto") -> None:
    """Open a hub for the tensors `name` and register them. `Missing` where the engine does not start."""
    try:
        hub = tensorhub.open(model, replica=replica, job=job, engine=engine, timeout=TIMEOUT_SECONDS)
    except EngineUnavailable as error:
        raise Missing(f"engine {engine!r}: {error}") from error
    state.setdefault("hubs", {})[name] = hub
    if name in state.get("tensors", {}):
        hub.register(state["tensors"][name])


def close_hub(state: State, name: str) -> None:
    """Close one hub."""
    state["hubs"].pop(name).close()


def train(state: State, name: str) -> None:
    """Change every byte of the tensors: what is published next is new."""
    for tensor in state["tensors"][name].values():
        tensor.add_(1)


def publish(state: State, name: str, version: int, digest: str) -> tuple[float, float]:
    """(when the publish was called, seconds it took)."""
    called = time.monotonic()
    state["hubs"][name].publish(version=version, digest=digest)
    return called, time.monotonic() - called


def unpublish(state: State, name: str) -> None:
    """Drain, so that the tensors may change."""
    state["hubs"][name].unpublish(timeout=TIMEOUT_SECONDS)


def replicate(state: State, name: str, version: int) -> dict[str, Any]:
    """When the replicate of exactly this version was called and returned, and what it said."""
    called = time.monotonic()
    got = state["hubs"][name].replicate(version, timeout=TIMEOUT_SECONDS)
    returned = time.monotonic()
    return {
        "called": called,
        "returned": returned,
        "nbytes": got.nbytes,
        "verified": got.verified,
        "engine": got.engine,
    }


def first_bytes(state: State, name: str) -> set[int]:
    """The first byte of each tensor: a benchmark that moved nothing shows here."""
    return {int(tensor[0]) for tensor in state["tensors"][name].values()}


def wait_sealed(state: State, name: str, version: int) -> float:
    """When this version's every chunk was readable and sealed, as the server says."""
    hub = state["hubs"][name]
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        for holding in hub.status().holdings:
            if holding.version.number == version and holding.state == "published":
                return time.monotonic()
        time.sleep(0.001)
    raise TimeoutError(f"version {version} was not sealed within {TIMEOUT_SECONDS:g} s")


def publishing(state: State, name: str) -> bool:
    """Whether digests of this hub's holding are outstanding."""
    return any(holding.state == "publishing" for holding in state["hubs"][name].status().holdings)


def hold_interpreter(state: State) -> None:
    """Start a thread of pure Python that never lets go of the interpreter by itself."""
    let_go = state["let_go"] = threading.Event()

    def spin() -> None:
        count = 0
        while not let_go.is_set():
            for step in range(1000):
                count += step

    state["spinning"] = threading.Thread(target=spin, daemon=True)
    state["spinning"].start()


def let_go_of_interpreter(state: State) -> None:
    """End that thread."""
    state.pop("let_go").set()
    state.pop("spinning").join(TIMEOUT_SECONDS)


def look(_: State) -> Footprint:
    """This process's footprint, garbage collected."""
    gc.collect()
    return footprint()


def look_and_reset(state: State) -> Footprint:
    """The same, and the peak begins anew."""
    gc.collect()
    reset_peak()
    return look(state)


def arrays(state: State, name: str) -> list[Any]:
    """The tensors as arrays of bytes, in place."""
    return [np.asarray(tensor.numpy()) for tensor in state["tensors"][name].values()]
