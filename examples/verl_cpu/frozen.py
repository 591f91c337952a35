"""The negative control, to be named as `custom_backend_module`: rollouts keep the first version under new step numbers.

All else happens as in the real run, the transfer too; its result is thrown away. A reward that rises all the same
would not have come from the weights that were moved.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import witness
from verl.checkpoint_engine.base import CheckpointEngineRegistry


@CheckpointEngineRegistry.register(os.environ[witness.BACK_END])
class Frozen(witness.install()):  # type: ignore[misc]
    """The back end, whose every version holds the bytes of the first."""

    _first: list[tuple[str, Any]] | None = None

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        received = [(name, tensor.clone()) async for name, tensor in super().receive_weights(global_steps=global_steps)]
        if self._first is None:
            self._first = received
        for name, tensor in self._first:
            yield name, tensor
