"""Models for tests on devices: every form a tensor may have there. Content follows from a seed alone."""

from __future__ import annotations

import torch

from tests.strategies import DTYPES, raw

MIB = 1 << 20


def everything(place: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Large and tiny tensors of every dtype, strided ones, ties, views, empty and scalar ones, on one device."""
    made = {f"large.{name}": _noise((3000, 3), dtype, seed, place) for name, dtype in DTYPES.items()}
    made |= {f"tiny.{name}": _noise((5,), dtype, seed + 1, place) for name, dtype in DTYPES.items()}
    wide = _noise((64, 1030), torch.float32, seed + 2, place)
    made |= {"strided.columns": wide[:, 3:1000], "strided.rows": _noise((64, 4096), torch.bfloat16, seed, place)[::2]}
    made |= {"strided.turned": _noise((300, 70), torch.int16, seed + 3, place).t(), "strided.tiny": wide.t()[7, ::9]}
    made["embed"] = made["head"] = _noise((1000, 64), torch.float32, seed + 4, place)
    made |= {"empty": torch.zeros(0, 4, device=place), "scalar": torch.tensor(float(seed), device=place)}
    made.pop("strided.tiny")  # it overlaps `strided.columns`: a fine source, but no destination
    made["strided.tiny"] = _noise((90,), torch.float32, seed + 5, place)[::9]
    return made


def plain(place: torch.device, nbytes: int, seed: int) -> dict[str, torch.Tensor]:
    """A model of so many bytes in eight tensors, and one tiny one."""
    part = nbytes // 8
    made = {f"layer.{i}": _noise((part,), torch.uint8, seed + i, place) for i in range(8)}
    return made | {"step": torch.tensor(seed, device=place)}


def to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous copies in host memory, as bytes are compared."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def contents(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Every tensor's bytes, row-major."""
    return {name: raw(tensor) for name, tensor in to_host(tensors).items()}


def blank(like: dict[str, torch.Tensor], place: torch.device) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes, dtypes and ties full of something else, contiguous."""
    made: dict[int, torch.Tensor] = {}
    return {
        name: made.setdefault(
            tensor.data_ptr() or id(tensor),
            torch.full((tensor.numel() * tensor.itemsize,), 7, dtype=torch.uint8, device=place)
            .view(tensor.dtype)
            .view(tensor.shape),
        )
        for name, tensor in like.items()
    }


def _noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int, place: torch.device) -> torch.Tensor:
    numel = int(torch.Size(shape).numel())
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data &= 1
    return data.to(place).view(dtype).view(shape)
