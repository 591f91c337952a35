"""The tensors a user registers, as columns: read fast, refused by name.

Decides which tensors have bytes that may move. It never copies or converts, and keeps no tensor alive beyond the
registration it is part of; nothing is remembered from one registration to the next.

A module contributes what its `state_dict` does: every parameter and persistent buffer under each of its names, the very
tensors (`keep_vars`), so that storages, ties and version counters are the module's own. Non-persistent buffers are
derived state and stay out, as they do in a checkpoint.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tensorhub.client.devices import Device, Unreachable, device_of
from tensorhub.errors import UnsupportedTensor, UsageError, Where
from tensorhub.pipeline.columns import NAME_SHOWN_MAX, is_rising, listed, numel_of, short
from tensorhub.ports import U64


@dataclass(frozen=True, slots=True, eq=False)
class Tensors:
    """Registered tensors in order of name; row i of every column belongs to `tensors[i]`."""

    names: list[str]
    tensors: list[torch.Tensor]
    addresses: U64
    nbytes: U64
    #: Distinct dtypes, and which one each tensor has; the same for shapes.
    dtypes: list[str]
    dtype_of: NDArray[np.int64]
    shapes: list[tuple[int, ...]]
    shape_of: NDArray[np.int64]
    is_contiguous: NDArray[np.bool_]
    #: {row: strides}, in elements, of the tensors that are not contiguous.
    strides: dict[int, tuple[int, ...]]
    #: Distinct devices, and which one each tensor lies on; -1 for host memory.
    devices: list[Device]
    device_of: NDArray[np.int64]

    def shape(self, row: int) -> tuple[int, ...]:
        return self.shapes[int(self.shape_of[row])]

    def device(self, row: int) -> Device | None:
        """Where a tensor lies; None for host memory."""
        device = int(self.device_of[row])
        return self.devices[device] if device >= 0 else None


def read(named: Mapping[Any, Any] | torch.nn.Module, where: Where) -> Tensors:
    """The columns of these tensors; `UnsupportedTensor` names every one that cannot be registered, and why."""
    named = by_name(named, where)
    names, tensors = list(named), list(named.values())
    if set(map(type, names)) - {str}:
        names = list(map(str, names))
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise UnsupportedTensor(f"names that are equal as text: {listed(twice)}", _at(where, twice[0]))
    try:
        return _columns(names, tensors)
    except (RuntimeError, _SuspectError, Unreachable):
        # Layouts without one block of memory raise on access; only now is every tensor asked what it is.
        raise _refusal(names, tensors, where) from None


def by_name(named: Mapping[Any, Any] | torch.nn.Module, where: Where) -> Mapping[Any, Any]:
    """What is to be registered, as the mapping it is or, for a module, as its state dict."""
    if isinstance(named, torch.nn.Module):
        return named.state_dict(keep_vars=True)
    if not isinstance(named, Mapping):
        raise UsageError(f"register a mapping of names to tensors or a module, not {type(named).__name__}", where)
    return named


class _SuspectError(Exception):
    """A block holds a tensor that must be refused."""


def _columns(names: list[str], tensors: list[torch.Tensor]) -> Tensors:
    if any(map(_kind_problem, set(map(type, tensors)))):
        raise _SuspectError
    pointers, shape_of, dtype_of = array("Q"), array("q"), array("q")
    strided: list[int] = []
    elsewhere: list[int] = []
    shapes: defaultdict[torch.Size, int] = defaultdict(itertools.count().__next__)
    dtypes: defaultdict[torch.dtype, int] = defaultdict(itertools.count().__next__)
    # One pass that asks each tensor everything while it is in the core's cache: twice as fast as a pass per column.
    add_pointer, add_shape, add_dtype = pointers.append, shape_of.append, dtype_of.append
    for tensor in tensors:
        add_pointer(tensor.data_ptr())
        add_shape(shapes[tensor.shape])
        add_dtype(dtypes[tensor.dtype])
        if not tensor.is_contiguous():
            strided.append(len(pointers) - 1)
        if not tensor.is_cpu:
            elsewhere.append(len(pointers) - 1)
    if any(dtype.is_complex for dtype in dtypes) and any(t.is_conj() for t in tensors):
        raise _SuspectError
    if any(map(_is_quantized, dtypes)):
        raise _SuspectError
    # Read in the user's order, which is about that of memory; sorted afterwards, as numbers.
    rows = range(len(names))
    order = rows if is_rising(names) else sorted(rows, key=names.__getitem__)
    place = np.fromiter(order, np.int64, len(names))
    forms = np.array(shape_of, dtype=np.int64)
    form, kind = forms[place], np.array(dtype_of, dtype=np.int64)[place]
    numels = np.array([numel_of(shape) for shape in shapes], dtype=np.int64)
    # A lazy negation is the imaginary part of a conjugate: every other number of it, so strided, or a single one.
    single = np.flatnonzero(numels[forms] <= 1).tolist()
    if any(tensors[i].is_neg() for i in itertools.chain(strided, single)):
        raise _SuspectError
    items = np.array([dtype.itemsize for dtype in dtypes], dtype=np.int64)
    nbytes = (numels[form] * items[kind]).astype(np.uint64)
    addresses = np.array(pointers, dtype=np.uint64)[place]
    if (nbytes[addresses == 0] > 0).any():
        raise _SuspectError
    is_contiguous = np.ones(len(names), dtype=np.bool_)
    is_contiguous[strided] = False
    is_contiguous = is_contiguous[place]
    found, lies_on = _devices(tensors, elsewhere)
    tensors = list(map(tensors.__getitem__, order))
    return Tensors(
        list(map(names.__getitem__, order)),
        tensors,
        addresses,
        nbytes,
        [str(dtype).removeprefix("torch.") for dtype in dtypes],
        kind,
        [tuple(shape) for shape in shapes],
        form,
        is_contiguous,
        {i: tensors[i].stride() for i in map(int, np.flatnonzero(~is_contiguous))},
        found,
        lies_on[place],
    )


def _devices(tensors: list[torch.Tensor], elsewhere: list[int]) -> tuple[list[Device], NDArray[np.int64]]:
    """(distinct devices, which one each tensor lies on) of tensors of which those `elsewhere` are not on the host."""
    found: list[Device] = []
    lies_on = np.full(len(tensors), -1, dtype=np.int64)
    for i in elsewhere:
        device = device_of(tensors[i])
        if device is None:
            raise _SuspectError
        if device not in found:
            found.append(device)
        lies_on[i] = found.index(device)
    return found, lies_on


def _place_problem(tensor: torch.Tensor) -> str | None:
    """Why this tensor's memory cannot be reached."""
    try:
        device_of(tensor)
    except Unreachable as error:
        return f"on {tensor.device}: {error}"
    return None


def _refusal(names: list[str], tensors: list[Any], where: Where) -> UnsupportedTensor:
    problems = [(name, _kind_problem(type(t)) or _value_problem(t)) for name, t in zip(names, tensors, strict=True)]
    found = [(name, problem) for name, problem in problems if problem]
    listed = "; ".join(f"{short(name)}: {problem}" for name, problem in found)
    return UnsupportedTensor(f"tensors that cannot be registered: {listed}", _at(where, found[0][0] if found else None))


def _kind_problem(kind: type) -> str | None:
    """Why no value of this type can be registered."""
    if not issubclass(kind, torch.Tensor):
        return f"a {kind.__name__}, not a tensor"
    if issubclass(kind, (UninitializedParameter, UninitializedBuffer)):
        return "not initialized yet; run the module once"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        hint = "; register its `.to_local()`" if hasattr(kind, "to_local") else ""
        return f"a {kind.__name__}, which wraps other tensors and has no bytes of its own{hint}"
    return None


def copy_problem(tensor: object) -> str | None:
    """Why the values of this, whatever it is, cannot be copied into a tensor that could be registered."""
    if (problem := _kind_problem(type(tensor))) is not None:
        return problem
    assert isinstance(tensor, torch.Tensor)
    return _block_problem(tensor) or _memory_problem(tensor)


def _block_problem(tensor: torch.Tensor) -> str | None:
    """Why this tensor is no block of its values."""
    facts = (
        (tensor.is_nested, "nested, which is no one block of bytes"),
        (tensor.layout is not torch.strided, f"of layout {tensor.layout}, which is no one block of bytes"),
        (
            _is_quantized(tensor.dtype),
            "quantized, with scales that are no bytes of it; register `.int_repr()` and the scales",
        ),
        (tensor.is_meta, "on the meta device: it has no bytes"),
    )
    return next((problem for is_so, problem in facts if is_so), None)


def _memory_problem(tensor: torch.Tensor) -> str | None:
    return "without memory: its storage was freed" if tensor.numel() and not tensor.data_ptr() else None


def _value_problem(tensor: torch.Tensor) -> str | None:
    """Why this tensor has no bytes here that could move as they are."""
    if (problem := _block_problem(tensor)) is not None:
        return problem
    facts = (
        (tensor.is_conj(), "a lazy conjugate, whose bytes are not its values; register `.resolve_conj()`"),
        (tensor.is_neg(), "a lazy negation, whose bytes are not its values; register `.resolve_neg()`"),
    )
    for is_so, problem in facts:
        if is_so:
            return problem
    if (unreachable := _place_problem(tensor)) is not None:
        return unreachable
    return _memory_problem(tensor)


def _is_quantized(dtype: torch.dtype) -> bool:
    """By the dtype: a plain tensor viewed as one is not `is_quantized`, and has no scales either."""
    return str(dtype).startswith("torch.q")


def _at(where: Where, tensor: str | None) -> Where:
    return Where(tensor=tensor and tensor[:NAME_SHOWN_MAX]).over(where)
