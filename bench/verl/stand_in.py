"""What `upstream.py` needs in every process of verl's own tests: back end `tensorhub` under the name "nccl".

Loaded as a module of verl's. Besides, a CPU cannot pin memory, which the tests' kind of trainer asks for.
"""

from __future__ import annotations

import torch.distributed.fsdp
from verl.checkpoint_engine import CheckpointEngineRegistry

from tensorhub.integrations.verl import TensorHubCheckpointEngine


class Unpinned(torch.distributed.fsdp.CPUOffloadPolicy):
    """Offloads, but into plain memory, whatever is asked for."""

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=False)


torch.distributed.fsdp.CPUOffloadPolicy = Unpinned  # type: ignore[misc]


@CheckpointEngineRegistry.register("nccl")
class StandIn(TensorHubCheckpointEngine):
    """Takes the option that the tests give NCCL. bfloat16 is what they compare with."""

    def __init__(self, bucket_size: int, is_master: bool = False, rebuild_group: bool = False) -> None:
        super().__init__(bucket_size, is_master, dtype="bfloat16")
