"""Peer: Ray's object store, as weights are handed on with it: `put` a fresh object, `get` it elsewhere, install it.

The store is one of its own, started for this and ended after it. Arrays are NumPy's: Ray shares their memory without
another copy, which it does not do for tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.peers import ray_cluster
from bench.peers.pair import load
from bench.peers.ray_cluster import INSTALL
from bench.remote import Remote, State

#: Room for two objects of all bytes and some: what is put next needs not wait until what was put last is gone.
STORE_OVER_BYTES = 2.5
GET_SECONDS = 60.0


@dataclass(slots=True)
class Store:
    """Hands all bytes from one actor to another."""

    driver: Remote

    def __call__(self) -> float:
        """Seconds from the call of `put` until the last byte is in place."""
        return float(self.driver.call(hand_on))


@contextmanager
def opened(sizes: list[int]) -> Iterator[Store]:
    """A fresh, cold store with two actors that hold arrays of these sizes. `Missing` without Ray."""
    store_bytes = max(ray_cluster.SMALL_STORE_BYTES, round(STORE_OVER_BYTES * sum(sizes)))
    with ray_cluster.opened(store_bytes) as (driver, _):
        driver.call(start, sizes)
        yield Store(driver)


def start(state: State, sizes: list[int]) -> None:
    """The two actors."""
    ray: Any = load("ray", INSTALL)
    actor = ray.remote(num_cpus=0)(Holder)
    state["trainer"], state["rollout"] = actor.remote(sizes, 1), actor.remote(sizes, 0)
    ray.get([state[end].first_bytes.remote() for end in ("trainer", "rollout")], timeout=ray_cluster.START_SECONDS)


def hand_on(state: State) -> float:
    """New bytes in the trainer, then from its `put` to the copy's end in the rollout, then they must be there."""
    ray: Any = load("ray", INSTALL)
    trainer, rollout = state["trainer"], state["rollout"]
    ray.get(trainer.change.remote(), timeout=GET_SECONDS)
    seconds = ray.get(rollout.install.remote(trainer.put.remote()), timeout=GET_SECONDS)
    there, here = ray.get([end.first_bytes.remote() for end in (trainer, rollout)], timeout=GET_SECONDS)
    if there != here:
        raise RuntimeError(f"Ray's object store is no result: the rollout holds {here}, the trainer {there}")
    return float(seconds)


class Holder:
    """An actor with arrays: the trainer changes and puts them, the rollout gets and installs them."""

    def __init__(self, sizes: list[int], fill: int) -> None:
        self.arrays = [np.full(nbytes, fill, np.uint8) for nbytes in sizes]

    def change(self) -> None:
        for array in self.arrays:
            np.add(array, 1, out=array)

    def put(self) -> tuple[float, list[Any]]:
        """When `put` was called, and a reference to a fresh object in a list, so that nobody fetches it on the way."""
        ray: Any = load("ray", INSTALL)
        called = time.monotonic()
        return called, [ray.put(self.arrays)]

    def install(self, put: tuple[float, list[Any]]) -> float:
        """Seconds from the call of `put` until every array is in place here."""
        ray: Any = load("ray", INSTALL)
        called, (reference,) = put
        for mine, shared in zip(self.arrays, ray.get(reference, timeout=GET_SECONDS), strict=True):
            np.copyto(mine, shared)
        return time.monotonic() - called

    def first_bytes(self) -> list[int]:
        return [int(array[at]) for array in self.arrays for at in (0, -1)]
