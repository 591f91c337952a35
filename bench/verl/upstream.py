"""Lets verl's own tests of a checkpoint engine run on CPU, with back end `tensorhub` where they say "nccl".

A pytest plug-in: `scripts/test-verl --upstream DIR`. It decides what those tests take for granted and a CPU has not:
accelerators, a large model, kernels. Their text stays as it is, in the user's checkout of verl.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.verl.environment import environment

#: Where the tests look for a model, below the home directory.
MODEL = Path("models/Qwen/Qwen3-8B-Base")
#: Trainer ranks and rollout workers together, where a test counts accelerators.
DEVICES = 4
LOGICAL_CPUS = 64


def pytest_configure(config: Any) -> None:
    """Before any test module is imported, and before anything imports verl, whose processes inherit the environment."""
    home = tempfile.mkdtemp(prefix="verl-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    modules = "examples.verl_cpu.cpu_platform,bench.verl.stand_in"
    # The search path stays: in it verl's folder `tests` comes before ours.
    changed = {"VERL_USE_EXTERNAL_MODULES": modules, "HOME": home, "PYTHONPATH": os.environ["PYTHONPATH"]}
    os.environ.update(environment() | changed)
    os.environ.pop("RAY_ADDRESS", None)

    import ray
    import torch
    import verl.workers.config as configs

    from bench.verl import models

    config.addinivalue_line("markers", "asyncio: a coroutine, which this plug-in runs")
    models.make(Path(home) / MODEL, models.TINY)
    torch.cuda.device_count = lambda: DEVICES
    sdpa = {"attn_implementation": "sdpa"}
    configs.FSDPEngineConfig = _with(configs.FSDPEngineConfig, strategy="fsdp2", use_torch_compile=False)
    configs.HFModelConfig = _with(configs.HFModelConfig, use_remove_padding=False, override_config=sdpa)
    ray.init = _with(
        ray.init, address="local", num_cpus=LOGICAL_CPUS, num_gpus=LOGICAL_CPUS, include_dashboard=False, _temp_dir=home
    )


def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run a coroutine to its end: the tests need no other plug-in for that."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}))
    return True


def _with(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The same with these arguments, whatever is given."""
    return lambda *args, **options: function(*args, **(options | fixed))
