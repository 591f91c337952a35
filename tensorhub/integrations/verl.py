"""verl's weight synchronisation: the checkpoint engine "tensorhub", and a manager with which no trainer waits.

Loaded by `rollout.checkpoint_engine.custom_backend_module=tensorhub.integrations.verl` (verl 0.8 or newer). It
translates verl's calls and decides nothing: a rank's part and its memory are `tensorhub.Staging`, a rollout's copy is
`tensorhub.Mirror`, the schedule is `followers.py`. docs/integrations/verl.md says how to set it up.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import ChainMap
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.device import get_torch_device
from verl.utils.ray_utils import auto_await

from tensorhub import Mirror, Replication, Staged, Staging
from tensorhub.errors import VersionUnavailable
from tensorhub.integrations.followers import Followers
from tensorhub.integrations.ungathered import ungathered

Weights = Iterable[tuple[str, torch.Tensor]]
#: What verl hands to a method, by name: one for each process.
Arguments = dict[str, list[Any]]

#: How often a replica that generates on is asked whether its copy is complete.
POLL_S = 0.02
#: Rollouts begin with dummy weights: nothing may be generated before the first version is loaded everywhere.
FIRST_S = 600.0


@CheckpointEngineRegistry.register("tensorhub")
class TensorHubCheckpointEngine(CheckpointEngine):
    """Trainer ranks publish copies of disjoint parts; each rollout worker keeps a copy of all, and serves it on.

    Options come from `checkpoint_engine.engine_kwargs.tensorhub`. `sharded` publishes the rows that each rank has,
    where parameters are distributed by rows (FSDP2); without it every rank gathers all. `dtype` is what floating-point
    tensors are cast to, as "bfloat16"; null: what verl has, fp32 by default. Nothing here runs on verl's event loops.
    """

    def __init__(
        self,
        bucket_size: int,  # noqa: ARG002 - nothing is sent, so there is no bucket to fill
        is_master: bool = False,  # noqa: ARG002 - and no rank that sends
        *,
        model: str = "policy",
        dtype: str | None = None,
        keep_dtype: str | Sequence[str] = (),
        sets: int = 2,
        sharded: bool = True,
        drain_s: float = 30.0,
        timeout_s: float = 600.0,
        server: str | None = None,
        engine: str | Sequence[str] = "auto",
    ) -> None:
        #: This process: the trainer that its first rank names, with a lineage of its own; or a rollout's worker.
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        server = server or os.environ.get("TENSORHUB_SERVER") or "ray://tensorhub"
        # Workers of one node are near each other: bytes cross to it once.
        place = os.environ.get("TENSORHUB_LOCATION") or f"dc/rack/{get_node_ip_address()}"
        at: dict[str, Any] = {"server": server, "engine": engine, "location": place}
        self._stage = partial(Staging, model, sets=sets, dtype=dtype, keep_dtype=keep_dtype, drain_s=drain_s, **at)
        self._mirror = Mirror(model, replica=self._name, **at)
        self._timeout_s, self._sharded = timeout_s, sharded
        self._staging: Staging | None = None
        self._seat: dict[str, Any] = {}
        self._last = -1
        #: A version on its way, or here but not loaded.
        self._ahead: tuple[int, Future[Replication]] | None = None
        self._thread = ThreadPoolExecutor(1, "tensorhub-verl")

    def prepare(self) -> dict[str, Any]:
        return {"life": self._name, "last": self._last}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[Arguments, Arguments]:
        """The first rank names the trainer, and says which version was its last."""
        first = metadata[0]
        seats = {"rank": list(range(actors)), "ranks": [actors] * actors, "life": [first["life"]] * actors}
        return {**seats, "last": [first["last"]] * actors}, {"last": [first["last"]] * rollouts}

    def init_process_group(self, last: int, rank: int = 0, ranks: int = 0, life: str = "") -> None:
        self._last = last
        self._seat = {"replica": f"trainer-{life}", "lineage": life, "shard": rank, "shards": ranks}

    def finalize(self) -> None:
        """A version stays readable until the turn of its memory comes again."""

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, Any]:
        version, device = self._version(global_steps), get_torch_device().current_device()
        return await asyncio.wrap_future(self._thread.submit(self._send, weights, version, device))

    def _send(self, weights: Weights, version: int, device: Any) -> dict[str, Any]:
        get_torch_device().set_device(device)  # gathering is collective, and a thread has a device of its own
        self._staging = self._staging or self._stage(**self._seat)
        with ungathered(self._sharded):
            done = self._staging.publish(version, weights, timeout=self._timeout_s)
        self._last = version
        return {"tensorhub/version": version, **_metrics(f"rank{self._seat['shard']}", done)}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        ahead, self._ahead = self._ahead or self._pull(self._version(global_steps)), None
        await asyncio.wrap_future(ahead[1])
        for item in self._mirror.tensors.items():
            yield item

    def prefetch(self, version: int) -> dict[str, Any] | None:
        """Bring the copy to a version while the engine generates on: None until it is there, then metrics."""
        if self._ahead is None or self._ahead[0] != version:
            self._ahead = self._pull(version)
        pull = self._ahead[1]
        if pull.done() and pull.exception() is not None:
            self._ahead = None  # the next one tries again
        return _metrics(self._name, pull.result()) if pull.done() else None

    def _pull(self, version: int) -> tuple[int, Future[Replication]]:
        return version, self._thread.submit(self._mirror.pull, version, timeout=self._timeout_s)

    def _version(self, step: int | None) -> int:
        """verl's step, unless there is such a version already: what is published is immutable."""
        return max(self._last + 1, step or 0)


class TensorHubCheckpointManager(CheckpointEngineManager):
    """The trainer goes on as soon as it has published; each replica then pulls while it generates, and stops to load.

    A replica that is added comes to the newest version at once; one that dies, or fails again and again, is left out.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        #: The newest of each key: of the ranks that published, and of the workers that pulled.
        self._metrics: dict[str, Any] = {}
        self._followers = Followers(self._load, lambda replica: self.remove_replicas([replica]), RayActorError)
        self._followers.add(replicas)

    def add_replicas(self, replicas: list[Any]) -> None:
        super().add_replicas(replicas)
        self._followers.add(replicas)

    def remove_replicas(self, replicas: list[Any]) -> None:
        self._followers.remove(replicas)
        super().remove_replicas(replicas)

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Publish; wait for rollouts only before the first version, while they hold dummy weights."""
        actors, count, is_first = self.actor_wg, self.actor_wg.world_size, not self._metrics
        if is_first:
            ranks = ray.get(actors.execute_checkpoint_engine(["prepare"] * count))
            seats, _ = self.backend_cls.build_topology(count, 0, ranks)
            ray.get(actors.execute_checkpoint_engine(["init_process_group"] * count, **seats))
        self._metrics |= ChainMap(*ray.get(actors.update_weights(global_steps=global_steps, mode=self.backend)))
        self._followers.announce((self._metrics["tensorhub/version"], global_steps))
        if is_first:
            self._followers.wait(FIRST_S)
        if not self.replicas:
            raise VersionUnavailable("no rollout replica is left to use it; the log says why each was given up")
        return dict(self._metrics)

    async def _load(self, replica: Any, news: tuple[int, int | None], is_first: bool) -> None:
        version, step = news
        if is_first:
            await replica.abort_all_requests()  # nothing shall be generated from dummy weights
        while None in (pulled := await _all(replica, "execute_checkpoint_engine", "prefetch", version)):
            await asyncio.sleep(POLL_S)
        await replica.abort_all_requests()
        await replica.release_kv_cache()
        await _all(replica, "update_weights", step)
        await replica.resume_kv_cache()
        await replica.resume_generation()
        self._metrics |= ChainMap(*pulled)


async def _all(replica: Any, method: str, *arguments: object) -> list[Any]:
    """What the method of each of a replica's workers returns."""
    return await asyncio.gather(*(getattr(worker, method).remote(*arguments) for worker in replica.workers))


def _metrics(who: str, done: Staged | Replication) -> dict[str, Any]:
    """Keys of this process's own, as verl merges all into one dictionary."""
    seconds = {f"tensorhub/{who}/{phase}_s": seconds for phase, seconds in done.phases.items()}
    return {f"tensorhub/{who}/bytes": done.nbytes, **seconds}
