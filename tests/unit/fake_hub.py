"""A hub for tests of what is built on hubs: it moves tensors through files of one folder, named in `server=`.

It keeps the public signatures and none of the guarantees. `lie` flips one byte of every replicated tensor whose name
contains it; `die` kills the process that replicates; both are `server=` suffixes, so that real processes get them.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tensorhub.cli import demo_worker

POLLS_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class SourceUse:
    replica: str
    shard: int
    nbytes: int
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Replication:
    version: int
    lineage: str
    nbytes: int
    seconds: float
    sources: tuple[SourceUse, ...]
    phases: dict[str, float]
    already_held: bool
    verified: bool
    engine: str
    engine_reason: str
    bytes_read: int


class FakeHub:
    def __init__(self, shard: int, folder: Path, fault: str) -> None:
        self.shard = shard
        self.folder = folder
        self.fault = fault
        self.tensors: dict[str, torch.Tensor] = {}

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def publish(self, version: int) -> None:
        draft = self.folder / f"draft-{self.shard}"
        torch.save((version, self.tensors), draft)
        draft.rename(self.folder / f"shard-{self.shard}")

    def unpublish(self, timeout: float) -> None:
        (self.folder / f"shard-{self.shard}").unlink()

    def replicate(self, selector: str, timeout: float) -> Replication:
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        path = self.folder / f"shard-{self.shard}"
        deadline = time.monotonic() + timeout
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(POLLS_SECONDS)
        version, source = torch.load(path)
        for name, tensor in self.tensors.items():
            tensor.copy_(source[name])
            if self.fault and self.fault in name:
                tensor.view(-1).view(torch.uint8)[-1] ^= 1
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        use = SourceUse("trainer", self.shard, nbytes, "fake", "the only one")
        return Replication(version, "main", nbytes, 0.01, (use,), {"transfer": 0.01}, False, True, "fake", "", nbytes)

    def progress(self) -> dict[str, Any]:
        return {"bytes_done": 0, "bytes_total": 1, "source": "trainer", "tensor": ""}

    def close(self) -> None:
        self.tensors = {}


def open_fake(model: str, *, shard: int, server: str, **_: Any) -> FakeHub:
    folder, _, fault = server.partition("?")
    return FakeHub(shard, Path(folder), fault)


def main(connection: Connection, setup: demo_worker.Setup) -> None:
    """A demo worker over the fake hub."""
    torch.set_num_threads(1)
    demo_worker.serve(connection, setup, open_fake)
