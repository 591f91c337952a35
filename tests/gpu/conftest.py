"""A real device for each test, or the reason why there is none; and the figures of a run, for `scripts/test-gpu`."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import hub, model, server  # noqa: F401 - fixtures

#: A kernel that is still running when everything that waits for nothing has returned: about a second.
LONG_CYCLES = 2_000_000_000
LONG_PRODUCTS = 400


@dataclass(frozen=True)
class Accelerator:
    """One device of this machine, by the module of torch that drives it."""

    kind: str
    module: Any

    @property
    def place(self) -> torch.device:
        return torch.device(self.kind, 0)

    def busy(self) -> None:
        """Keep the current stream busy for about a second; returns at once."""
        if self.kind == "cuda":
            torch.cuda._sleep(LONG_CYCLES)
            return
        square = torch.ones(4096, 4096, device=self.place)
        for _ in range(LONG_PRODUCTS):
            square = square @ square * 0

    def mark(self) -> Any:
        """An event behind all that was enqueued in the current stream."""
        event = self.module.Event()
        event.record(self.module.current_stream())
        return event

    def timed(self, work: Callable[[], object], rounds: int = 5) -> float:
        """Median seconds that `work` keeps the device busy."""
        seconds = []
        for _ in range(rounds):
            begin, end = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return sorted(seconds)[rounds // 2]

    def beside(self) -> AbstractContextManager[Any]:
        """Another stream than the default one."""
        context: AbstractContextManager[Any] = self.module.stream(self.module.Stream())
        return context


def missing(kind: str) -> str | None:
    """Why this machine has no such device."""
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        import torch_npu

        return None if torch_npu.npu.is_available() else "torch_npu finds no Ascend device"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("npu", marks=pytest.mark.npu)])
def device(request: pytest.FixtureRequest) -> Accelerator:
    """Each test runs once for each kind of device; where there is none, it is skipped and says why."""
    if (why := missing(request.param)) is not None:
        pytest.skip(why)
    return Accelerator(request.param, getattr(torch, request.param))


@pytest.fixture
def cuda() -> Accelerator:
    """For what only CUDA has."""
    if (why := missing("cuda")) is not None:
        pytest.skip(why)
    return Accelerator("cuda", torch.cuda)


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, float]]:
    """What was measured: printed, and written to $OUT/gpu-figures.json where that is set."""
    found: dict[str, float] = {}
    yield found
    for name, value in sorted(found.items()):
        print(f"\nfigure {name} = {value:.4g}", end="")
    if found and (out := os.environ.get("OUT")):
        (Path(out) / "gpu-figures.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
