"""A back end for verl that writes down what passes through another one: a digest per tensor, of what trainers send.

It decides nothing and changes no byte: it puts itself in the place of the back end that VERL_CPU_BACK_END names, after
importing VERL_CPU_BACK_END_MODULE. Rollout servers write down what their parameters hold after each load, in the same
words, so that `exactness` can say whether every rollout held what was published. Lines are appended to files in the
folder VERL_CPU_RECORD, one file per writer.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "VERL_CPU_RECORD"
BACK_END = "VERL_CPU_BACK_END"
BACK_END_MODULE = "VERL_CPU_BACK_END_MODULE"
#: Who writes: the trainer's first rank; with their number, the server of a replica and the worker that feeds it.
TRAINER = "trainer"
REPLICA = "replica-"
WORKER = "worker-"


@dataclass(frozen=True, slots=True)
class Exactness:
    """How many loads of rollouts were compared, and what differed: (who, version, tensor), empty when all is exact."""

    loads: int
    replicas: int
    differing: tuple[tuple[str, int, str], ...]

    @property
    def is_exact(self) -> bool:
        """Every rollout that was there loaded something, and nothing else than what was published."""
        return self.loads > 0 and not self.differing


def digest(tensor: Any) -> str:
    """XXH3-128 of the tensor's elements as bfloat16, which is what the rollouts of this example compute in."""
    import torch
    import xxhash

    flat = tensor.detach().to(device="cpu", dtype=torch.bfloat16).contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(flat.view(torch.uint8).numpy())


def whole(tensor: Any) -> Any:
    """All of a distributed tensor; collective, so every rank must ask."""
    if not hasattr(tensor, "device_mesh"):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim).to_local()


def write_down(writer: str, version: int | None, facts: dict[str, Any]) -> None:
    """Appends one line to the writer's file. Does nothing where nobody asked for a record."""
    if folder := os.environ.get(RECORD):
        with (Path(folder) / f"{writer}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"version": version, **facts}) + "\n")


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """What a writer has written down, without a line that it was still writing; nothing if it never did."""
    if file.exists():
        text = file.read_text(encoding="utf-8")
        yield from map(json.loads, text[: text.rfind("\n") + 1].splitlines())


def exactness(folder: Path) -> Exactness:
    """Compares every load of every rollout with what the trainer sent under that version."""
    sent = {line["version"]: line["digests"] for line in lines(folder / f"{TRAINER}.jsonl")}
    loads, differing, writers = 0, [], sorted(folder.glob(f"{REPLICA}*.jsonl"))
    for writer in writers:
        for line in lines(writer):
            loads += 1
            published, held = sent.get(line["version"], {}), line["digests"]
            differing += [
                (writer.stem, line["version"], name)
                for name in sorted(published.keys() | held.keys())
                if published.get(name) != held.get(name)
            ]
    return Exactness(loads, len(writers), tuple(differing))


def _seen(weights: Iterable[tuple[str, Any]], version: int | None, *, writes: bool) -> Iterator[tuple[str, Any]]:
    """Passes the weights on. What was seen is written down when the last one has been taken."""
    digests = {}
    for name, tensor in weights:
        seen = whole(tensor)
        if writes:
            digests[name] = digest(seen)
        yield name, tensor
    if writes:
        write_down(TRAINER, version, {"digests": digests})


def install() -> type:
    """Puts a witness in the place of the back end, and returns the class that is registered now."""
    import torch.distributed
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    if module := os.environ.get(BACK_END_MODULE):
        importlib.import_module(module)
    name = os.environ[BACK_END]

    @CheckpointEngineRegistry.register(name)
    class Witness(CheckpointEngineRegistry.get(name)):
        """The back end, with the trainer's first rank writing down what is sent: each rank has all tensors, or its
        part of each."""

        async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> Any:
            seen = _seen(weights, global_steps, writes=torch.distributed.get_rank() == 0)
            return await super().send_weights(seen, global_steps=global_steps)

    return Witness
