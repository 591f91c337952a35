"""Stands where an inference engine would: keeps the weights that verl hands it, and says what they are, bit for bit.

It decides nothing about transport. Every process of the harness loads it as a module of verl's, which registers it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import ray
import torch
import xxhash
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from bench.verl.server import Server

#: What `rollout.name` says.
NAME = "keeping"

#: {tensor: (dtype, shape, xxh3 of its bytes)}.
Sums = dict[str, tuple[str, tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Held:
    """What a rollout worker has been given: the step that came with it, and its bytes."""

    global_steps: int | None
    loads: int
    sums: Sums


def fingerprint(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    """Equal exactly when dtype, shape and every bit are."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return str(tensor.dtype), tuple(tensor.shape), xxhash.xxh3_128_hexdigest(raw.data)


class KeepingAdapter(BaseRollout):
    """Copies each tensor into memory of its own, in place, as an engine loads it. Can hold still in the middle."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any = None, replica_rank: int = 0, **_kwargs: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        self.is_leader_rank = True
        self.weights: dict[str, torch.Tensor] = {}
        self.global_steps: int | None = None
        #: Finished updates.
        self.loads = 0
        #: Before the tensor of this number the next update holds still, until `moving` is set.
        self.hold_before: int | None = None
        self.holding = asyncio.Event()
        self.moving = asyncio.Event()
        #: Set and replaced at the end of each update.
        self.loaded = asyncio.Event()

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: AsyncGenerator[tuple[str, torch.Tensor], None],
        global_steps: int | None = None,
        **_kwargs: Any,
    ) -> None:
        number = 0
        given = set()
        async for name, tensor in weights:
            if number == self.hold_before:
                self.hold_before = None
                self.holding.set()
                await self.moving.wait()
            mine = self.weights.get(name)
            if mine is None or mine.dtype != tensor.dtype or mine.shape != tensor.shape:
                mine = self.weights[name] = torch.empty_like(tensor)
            mine.copy_(tensor)
            given.add(name)
            number += 1
        if given != self.weights.keys():
            raise RuntimeError(f"an update without {sorted(self.weights.keys() - given)}, which an earlier one had")
        self.global_steps = global_steps
        self.loads += 1
        self.loaded.set()
        self.loaded = asyncio.Event()


class RolloutWorker(CheckpointEngineWorker):
    """verl's own, with questions that a test asks; it can change its back end, since starting a process is slow."""

    server_adapter: KeepingAdapter

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_backend(self, backend: str, module: str, options: dict[str, Any]) -> None:
        self.checkpoint_engine = engine(self.__dict__.setdefault("engines", {}), backend, module, options)

    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def held(self) -> Held:
        adapter = self.server_adapter
        return Held(adapter.global_steps, adapter.loads, {n: fingerprint(t) for n, t in adapter.weights.items()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def hold(self, before: int) -> None:
        """Let the next update stand still before the tensor of this number."""
        adapter = self.server_adapter
        adapter.holding.clear()
        adapter.moving.clear()
        adapter.hold_before = before

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_holding(self) -> None:
        await self.server_adapter.holding.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait_step(self, global_steps: int) -> None:
        """Return once an update with that step, or a later one, has ended."""
        adapter = self.server_adapter
        while adapter.global_steps is None or adapter.global_steps < global_steps:
            await adapter.loaded.wait()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def move(self) -> None:
        self.server_adapter.moving.set()


def engine(engines: dict[str, Any], backend: str, module: str, options: dict[str, Any], **role: Any) -> Any:
    """This process's engine of a back end with these options, made when first asked for."""
    import_external_libs(module)
    key = f"{backend} {sorted(options.items())}"
    if key not in engines:
        engines[key] = CheckpointEngineRegistry.new(backend, bucket_size=BUCKET_BYTES, **role, **options)
    return engines[key]


#: What verl's default of 2048 MB would be on a smaller model.
BUCKET_BYTES = 256 << 20


class Replica(RolloutReplica):
    """A rollout replica whose workers keep what they get, with one server."""

    async def launch_servers(self) -> None:
        self.servers = [ray.remote(Server).options(num_cpus=0).remote()]

    def get_ray_class_with_init_args(self) -> RayClassWithInitArgs:
        return RayClassWithInitArgs(
            cls=ray.remote(RolloutWorker),
            rollout_config=self.config,
            model_config=self.model_config,
            replica_rank=self.replica_rank,
        )


RolloutReplicaRegistry.register(NAME, lambda: Replica)
_ROLLOUT_REGISTRY[(NAME, "async")] = "bench.verl.rollout.KeepingAdapter"
