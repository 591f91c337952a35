"""What the environment of a process has to say before it imports verl, so that verl runs on CPU. Imports no verl.

It decides nothing else; `examples/verl_cpu/cpu_platform.py` says why each platform variable is there.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Beside what is set already. Ray's workers inherit it from whoever starts Ray."""
    search = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(search)),
        "VERL_USE_EXTERNAL_MODULES": "examples.verl_cpu.cpu_platform,bench.verl.rollout",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_LOGGING_LEVEL": "WARN",
        "OMP_NUM_THREADS": "1",  # as many processes as cores and more
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns that it will leave GPU variables alone
    }
