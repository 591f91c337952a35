"""A Ray of our own on this host: no cluster that happens to run is joined or disturbed. Nothing is measured here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.pair import load
from bench.remote import Remote, State

#: Of every process of the cluster. Its tokens are for clusters that others can reach.
SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
INSTALL = "pip install 'ray[default]'"
#: Ray itself and the actors start within this, also on a busy machine.
START_SECONDS = 110.0
#: Where no object goes through the store; Ray's own minimum is about this.
SMALL_STORE_BYTES = 128 << 20


@contextmanager
def opened(store_bytes: int = SMALL_STORE_BYTES) -> Iterator[tuple[Remote, str]]:
    """A process that is Ray's driver, and the cluster's address. `Missing` without Ray."""
    with Remote("ray-driver") as driver:
        address = driver.call(start, store_bytes, timeout_s=START_SECONDS)
        try:
            yield driver, str(address)
        finally:
            driver.call(stop)


def start(_: State, store_bytes: int) -> str:
    """The new cluster's address."""
    root = str(Path(__file__).resolve().parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    os.environ.pop("RAY_ADDRESS", None)
    ray: Any = load("ray", INSTALL, **SETTINGS)
    ray.init(
        address="local",
        namespace="bench",
        num_cpus=os.cpu_count(),
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    return str(ray.get_runtime_context().gcs_address)


def stop(_: State) -> None:
    """End the cluster's processes."""
    ray: Any = load("ray", INSTALL)
    ray.shutdown()
