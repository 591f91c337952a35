"""The tensors a user registers, as columns: read fast, refused by name.

Decides which tensors have bytes that may move. It never copies or converts, and keeps no tensor alive beyond the
registration it is part of; nothing is remembered from one registration to the next.

A module contributes what its `state_dict` does: every parameter and persistent buffer under each of its names, the very
tensors (`keep_vars`), so that storages, ties and version counters are the module's own. Non-persistent buffers are
derived state and stay out, as they do in a checkpoint.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import UninitializedTensorMixin

from tensorhub.errors import UnsupportedTensor, UsageError, Where
from tensorhub.pipeline.columns import is_rising, numel_of
from tensorhub.ports import U64

#: Tensors read at a time, column by column: what they touch stays in the core's cache between two columns.
BLOCK = 512


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """Registered tensors in order of name; row i of every column belongs to `tensors[i]`."""

    names: list[str]
    tensors: list[torch.Tensor]
    addresses: U64
    nbytes: U64
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    is_contiguous: NDArray[np.bool_]
    #: Where each tensor lies. Host memory only: what lies elsewhere is refused until an engine reads it.
    devices: list[str]


def read(named: Mapping[Any, Any] | torch.nn.Module, where: Where) -> Tensors:
    """The columns of these tensors; `UnsupportedTensor` names every one that cannot be registered, and why."""
    if isinstance(named, torch.nn.Module):
        named = named.state_dict(keep_vars=True)
    if not isinstance(named, Mapping):
        raise UsageError(f"register a mapping of names to tensors or a module, not {type(named).__name__}", where)
    names, tensors = list(map(str, named)), list(named.values())
    if not is_rising(names):
        order = sorted(range(len(names)), key=names.__getitem__)
        names, tensors = [names[i] for i in order], [tensors[i] for i in order]
        twice = [a for a, b in itertools.pairwise(names) if a == b]
        if twice:
            raise UnsupportedTensor(f"names that are equal as text: {twice}", _at(where, twice[0]))
    if any(_kind_problem(kind) for kind in set(map(type, tensors))):
        raise _refusal(names, tensors, where)
    try:
        return _columns(names, tensors)
    except (RuntimeError, _SuspectError):
        # Layouts without one block of memory raise on access; only now is every tensor asked what it is.
        raise _refusal(names, tensors, where) from None


class _SuspectError(Exception):
    """A block holds a tensor that must be refused."""


def _columns(names: list[str], tensors: list[torch.Tensor]) -> Tensors:
    pointers: list[int] = []
    shape_of: list[int] = []
    dtype_of: list[int] = []
    contiguous: list[bool] = []
    shapes: defaultdict[torch.Size, int] = defaultdict(itertools.count().__next__)
    dtypes: defaultdict[torch.dtype, int] = defaultdict(itertools.count().__next__)
    for at in range(0, len(tensors), BLOCK):
        block = tensors[at : at + BLOCK]
        pointers += [t.data_ptr() for t in block]
        shape_of += map(shapes.__getitem__, [t.shape for t in block])
        dtype_of += map(dtypes.__getitem__, [t.dtype for t in block])
        contiguous += [t.is_contiguous() for t in block]
        if not all([t.is_cpu for t in block]) or any([t.is_neg() for t in block]):  # noqa: C419 - a list is faster
            raise _SuspectError
    if any(kind.is_complex for kind in dtypes) and any(t.is_conj() for t in tensors):
        raise _SuspectError
    if any(str(kind).startswith("torch.q") for kind in dtypes):
        raise _SuspectError
    count = len(tensors)
    numels = np.array([numel_of(shape) for shape in shapes], dtype=np.int64)
    items = np.array([kind.itemsize for kind in dtypes], dtype=np.int64)
    nbytes = (numels[shape_of] * items[dtype_of] if count else np.zeros(0)).astype(np.uint64)
    addresses = np.array(pointers, dtype=np.uint64)
    if (nbytes[addresses == 0] > 0).any():
        raise _SuspectError
    forms = [tuple(shape) for shape in shapes]
    kinds = [str(kind).removeprefix("torch.") for kind in dtypes]
    return Tensors(
        names,
        tensors,
        addresses,
        nbytes,
        [kinds[i] for i in dtype_of],
        [forms[i] for i in shape_of],
        np.array(contiguous, dtype=np.bool_),
        ["cpu"] * count,
    )


def _refusal(names: list[str], tensors: list[Any], where: Where) -> UnsupportedTensor:
    problems = [(name, _kind_problem(type(t)) or _value_problem(t)) for name, t in zip(names, tensors, strict=True)]
    found = [(name, problem) for name, problem in problems if problem]
    listed = "; ".join(f"{name!r}: {problem}" for name, problem in found)
    return UnsupportedTensor(f"tensors that cannot be registered: {listed}", _at(where, found[0][0] if found else None))


def _kind_problem(kind: type) -> str | None:
    """Why no value of this type can be registered."""
    if not issubclass(kind, torch.Tensor):
        return f"a {kind.__name__}, not a tensor"
    if issubclass(kind, UninitializedTensorMixin):
        return "not initialized yet; run the module once"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        hint = "; register its `.to_local()`" if hasattr(kind, "to_local") else ""
        return f"a {kind.__name__}, which wraps other tensors and has no bytes of its own{hint}"
    return None


def _value_problem(tensor: torch.Tensor) -> str | None:
    """Why this tensor has no bytes here that could move as they are."""
    facts = (
        (tensor.is_nested, "nested, which is no one block of bytes"),
        (tensor.layout is not torch.strided, f"of layout {tensor.layout}, which is no one block of bytes"),
        (tensor.is_quantized, "quantized, with scales that are no bytes of it; register `.int_repr()` and the scales"),
        (tensor.is_meta, "on the meta device: it has no bytes"),
        (
            tensor.device.type != "cpu",
            f"on {tensor.device}: device memory needs an engine that reads it, and there is none yet",
        ),
        (tensor.is_conj(), "a lazy conjugate, whose bytes are not its values; register `.resolve_conj()`"),
        (tensor.is_neg(), "a lazy negation, whose bytes are not its values; register `.resolve_neg()`"),
    )
    for is_so, problem in facts:
        if is_so:
            return problem
    return "without memory: its storage was freed" if tensor.numel() and not tensor.data_ptr() else None


def _at(where: Where, tensor: str | None) -> Where:
    return Where(tensor=tensor).over(where)
