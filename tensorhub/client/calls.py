"""The one-call forms: `publish(tensors, ...)` and `replicate(tensors, ...)`, with hubs kept per process.

A call opens a hub for its (server, job, model, replica, shard) once and registers tensors once; the next call with
the same tensor objects reuses both. Tensors that were replaced are registered afresh.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorhub.client.hub import Digests, Hub, default_job, default_server, open
from tensorhub.client.results import Replication
from tensorhub.errors import Where

if TYPE_CHECKING:
    import torch

    from tensorhub.client.hub import Tensors

_Key = tuple[str, str, str, str, int, int]

#: Guards the two tables below; held over opening, so that two threads do not open one seat twice.
_lock = threading.Lock()
_hubs: dict[_Key, Hub] = {}
#: {key: the tensors registered last}: strong references, compared by identity, so that an id is never reused.
_tensors: dict[_Key, dict[str, torch.Tensor]] = {}


def publish(
    tensors: Tensors,
    *,
    model: str,
    version: int,
    replica: str,
    shard: int = 0,
    shards: int = 1,
    server: str | None = None,
    job: str | None = None,
    engine: str | Sequence[str] = "auto",
    location: str | None = None,
    lineage: str | None = None,
    digest: Digests = "background",
    timeout: float = 30.0,
) -> Hub:
    """Open, register and publish in one call; returns the hub, whose `unpublish()` comes before the next write."""
    hub = _hub(
        tensors,
        model=model,
        replica=replica,
        shard=shard,
        shards=shards,
        server=server,
        job=job,
        engine=engine,
        spot=False,
        location=location,
        lineage=lineage,
        timeout=timeout,
    )
    hub.publish(version=version, digest=digest, timeout=timeout)
    return hub


def replicate(
    tensors: Tensors,
    *,
    model: str,
    version: object = "latest",
    replica: str,
    shard: int = 0,
    shards: int = 1,
    server: str | None = None,
    job: str | None = None,
    engine: str | Sequence[str] = "auto",
    spot: bool = False,
    location: str | None = None,
    only: Iterable[str] | None = None,
    timeout: float = 60.0,
) -> Replication:
    """Open, register and replicate in one call; the hub stays open and serves on until the process ends."""
    hub = _hub(
        tensors,
        model=model,
        replica=replica,
        shard=shard,
        shards=shards,
        server=server,
        job=job,
        engine=engine,
        spot=spot,
        location=location,
        lineage=None,
        timeout=timeout,
    )
    return hub.replicate(version, only=only, timeout=timeout)


def _hub(
    tensors: Tensors,
    *,
    model: str,
    replica: str,
    shard: int,
    shards: int,
    server: str | None,
    job: str | None,
    engine: str | Sequence[str],
    spot: bool,
    location: str | None,
    lineage: str | None,
    timeout: float,
) -> Hub:
    from tensorhub.client.tensors import by_name

    key = (default_server(server), job or default_job(), model, replica, shard, shards)
    fresh = dict(by_name(tensors, Where(model=model, replica=replica, shard=shard, shards=shards)))
    with _lock:
        hub = _hubs.get(key)
        if hub is None or hub.closed:
            hub = _hubs[key] = open(
                model,
                replica=replica,
                shard=shard,
                shards=shards,
                server=server,
                job=job,
                engine=engine,
                spot=spot,
                location=location,
                lineage=lineage,
                timeout=timeout,
            )
            _tensors.pop(key, None)
        if not _same(_tensors.get(key), fresh):
            hub.register(fresh)
            _tensors[key] = fresh
        return hub


def _same(known: Mapping[str, torch.Tensor] | None, fresh: Mapping[str, torch.Tensor]) -> bool:
    return known is not None and known.keys() == fresh.keys() and all(known[name] is fresh[name] for name in fresh)
