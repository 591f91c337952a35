"""verl's actor worker, with the few questions and orders that a test or a benchmark has for it.

It decides how weights change between steps: by a real step of the optimizer, on gradients that a seed gives.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from bench.verl.rollout import Sums, engine, fingerprint

#: Longer than any test waits for anything.
STILL_SECONDS = 300.0


class TrainerWorker(ActorRolloutRefWorker):
    """One rank of the trainer; everything that verl calls is verl's own."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_backend(self, backend: str, module: str, options: dict[str, Any]) -> None:
        master = torch.distributed.get_rank() == 0
        engines = self.__dict__.setdefault("engines", {})
        self.checkpoint_engine = engine(engines, backend, module, options, is_master=master)

    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> float:
        """One step of the optimizer: every weight changes. The norm of the gradient."""
        source = torch.Generator().manual_seed(seed)
        for parameter in self.actor.engine.module.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            gradient = torch.randn(local.shape, generator=source, dtype=local.dtype)
            parameter.grad = (
                DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                if isinstance(parameter, DTensor)
                else gradient
            )
        norm = float(self.actor.engine.optimizer_step())
        self.actor.engine.optimizer_zero_grad()
        return norm

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def compute(self, seconds: float) -> None:
        """A step that takes a fixed time, as on an accelerator, and changes every weight at its end."""
        deadline = time.monotonic() + seconds
        with torch.no_grad():
            for parameter in self.actor.engine.module.parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.mul_(1.001)
        time.sleep(max(0.0, deadline - time.monotonic()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def drain(self) -> None:
        """Gather every weight and use none: what any back end waits for."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        await asyncio.to_thread(deque, weights, 0)

    def hold(self, before: int) -> None:
        """Let this rank, the next time it hands over weights, stand still before the tensor of this number for good."""
        engine_of = self.actor.engine
        hand_over = engine_of.get_per_tensor_param
        self.holding = threading.Event()

        def held_back(**options: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
            weights, other = hand_over(**options)

            def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
                for number, item in enumerate(weights):
                    if number == before:
                        self.holding.set()
                        threading.Event().wait(STILL_SECONDS)
                    yield item

            return one_by_one(), other

        engine_of.get_per_tensor_param = held_back

    async def wait_holding(self) -> bool:
        return await asyncio.to_thread(self.holding.wait, STILL_SECONDS)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sums(self, dtype: str | None = None) -> Sums:
        """Of what this rank hands over now, in that dtype where it is given. Collective."""
        weights, _ = self.actor.engine.get_per_tensor_param()
        wire = getattr(torch, dtype) if dtype else None
        return {name: fingerprint(tensor.to(wire) if wire else tensor) for name, tensor in weights}
