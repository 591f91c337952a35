"""Lets an unmodified verl 0.9.1 train on CPU: a platform plug-in, which verl finds by two environment variables.

It decides what verl gets where it asks for an accelerator: the CPU, with gloo between ranks. It knows nothing of
weights, back ends or rollouts. The process's environment has to say, with this file's folder on `PYTHONPATH`:

    VERL_USE_EXTERNAL_MODULES=cpu_platform   VERL_PLATFORM=cpu   # loads and selects it
    VERL_ENGINE_DEVICE=cuda                  # under which name verl registers the FSDP engine that runs here, too

A `strategy` of `fsdp2` without forward_only and offload, sdpa attention, no padding removal and no compilation are the
caller's to configure: the other paths of verl need an accelerator.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

#: What `mem_get_info` says is free and there: enough that no check of verl takes the machine for full.
CLAIMED_BYTES = 1 << 34


def _nothing(*_args: object, **_kwargs: object) -> None:
    """What an accelerator would have to do, and a CPU has not."""


def _zero(*_args: object, **_kwargs: object) -> int:
    """How much memory of an accelerator is in use; also the index of the only device."""
    return 0


#: Stands where verl expects `torch.cuda`: what `torch.cpu` has, and what verl calls besides.
DEVICE_MODULE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")},
)
DEVICE_MODULE.__dict__.update(
    {
        "current_device": _zero,
        "device_count": lambda: 1,
        "empty_cache": _nothing,
        "get_device_name": lambda *_: "CPU",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "ipc_collect": _nothing,
        "is_available": lambda: True,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "max_memory_allocated": _zero,
        "max_memory_reserved": _zero,
        "mem_get_info": lambda *_: (CLAIMED_BYTES, CLAIMED_BYTES),
        "memory_allocated": _zero,
        "memory_reserved": _zero,
        "reset_peak_memory_stats": _nothing,
        "set_device": _nothing,
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "synchronize": _nothing,
    }
)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One device named "cpu"; gloo; Ray's CPUs are what a worker reserves."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"  # verl hands it to `Tensor.to`, for which an index would name an accelerator

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # verl reads it; nobody sets it here

    def nvtx_range(self, msg: str) -> nullcontext[None]:
        return nullcontext()

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None: ...


_init_process_group = torch.distributed.init_process_group


def _init_process_group_once_per_device(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """verl asks for "cpu:gloo,DEVICE:BACKEND"; torch refuses a device that is named twice."""
    _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _init_process_group_once_per_device
