"""The entries of a manifest as columns: what makes them consistent, and their bytes.

Decides which columns could be a version's at all, whoever made them: sizes, limits, aliases. Every problem is an
answer, not an exception: whose fault it is, only the caller knows. It lays nothing out.

Encoded: one msgpack array [magic, format, names, dtypes [[name, item bytes]], dtype of each entry (u2), shapes,
shape of each entry (u4), aliases (u4), their parents (u4), their offsets (u8)]. Columns are little-endian bytes; tables
list each value once, in order of first use. The format is frozen, version 1.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tensorhub.errors import SourceFailed
from tensorhub.ports import U64

MAGIC = "THMANIF1"
FORMAT = 1
#: One shard of one process; a larger claim is hostile, and its chunk table would not fit a progress block.
STREAM_BYTES_MAX = 1 << 44
#: Entries of one shard: forty times the largest known models' tensors per rank.
ENTRIES_MAX = 1 << 22
#: Names are paths of modules; longer ones are a mistake.
TENSOR_NAME_BYTES_MAX = 1024
#: Characters of a name that an error repeats, and unusable names that it lists: a hundred thousand fit no log.
NAME_SHOWN_MAX = 80
NAMES_LISTED_MAX = 20
#: numpy's own limit of dimensions.
RANK_MAX = 64
#: The widest element any dtype has (complex128).
ITEM_BYTES_MAX = 16
#: More than three times the dtypes torch has.
DTYPES_MAX = 256
DTYPE_NAME_MAX = 64

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One row per entry; few dtypes and shapes serve many rows, so each lies once in a table.

    `parent` is a row or -1, `parent_offset` the byte in the parent at which an alias begins.
    """

    names: list[str]
    #: Distinct dtypes, and which one each entry has.
    dtypes: list[str]
    dtype_of: I64
    #: Distinct shapes, and which one each entry has.
    shapes: list[tuple[int, ...]]
    shape_of: I64
    nbytes: U64
    parent: I64
    parent_offset: U64

    def sorted(self) -> Columns:
        """The same entries in order of name."""
        if is_rising(self.names):
            return self
        order = sorted(range(len(self.names)), key=self.names.__getitem__)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        parent = self.parent[order]
        return replace(
            self,
            names=[self.names[i] for i in order],
            dtype_of=self.dtype_of[order],
            shape_of=self.shape_of[order],
            nbytes=self.nbytes[order],
            parent=np.where(parent < 0, parent, place[parent]),
            parent_offset=self.parent_offset[order],
        )

    def problem(self) -> str | None:
        """Why these are no manifest's columns, or None."""
        columns = (self.dtype_of, self.shape_of, self.nbytes, self.parent, self.parent_offset)
        if set(map(len, columns)) != {len(self.names)}:
            return "columns differ in length"
        return _names_problem(self.names) or _sizes_problem(self) or _aliases_problem(self)


def is_rising(names: Sequence[str]) -> bool:
    """Sorted and without repetition. Code point order, which is the order of the UTF-8 bytes."""
    return all(map(operator.lt, names, names[1:]))


def table_of(values: Sequence[Any]) -> tuple[list[Any], I64]:
    """(the distinct values in order of first use, index of each value)."""
    index = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return list(index), np.fromiter(map(index.__getitem__, values), dtype=np.int64, count=len(values))


def shown(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def short(name: str) -> str:
    """A name for an error, quoted: those that are refused for their length are not repeated at length."""
    return repr(name) if len(name) <= NAME_SHOWN_MAX else f"{name[:NAME_SHOWN_MAX]!r}..."


def listed(names: Sequence[str]) -> str:
    """Names for an error: the first few, and how many more there are."""
    more = f" and {len(names) - NAMES_LISTED_MAX} more" if len(names) > NAMES_LISTED_MAX else ""
    return f"[{', '.join(map(short, names[:NAMES_LISTED_MAX]))}]{more}"


# ---------------------------------------------------------------- consistency


def _names_problem(names: list[str]) -> str | None:
    if len(names) > ENTRIES_MAX:
        return f"{len(names)} tensors, the limit is {ENTRIES_MAX}"
    if not is_rising(names):
        twice = [a for a, b in itertools.pairwise(names) if a == b]
        return f"names appear twice: {listed(twice)}" if twice else "names are not sorted"
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        return f"names that are no text: {listed([name for name in names if not _is_text(name)])}"
    # A character has at most four bytes, so the usual manifest is settled by its longest name.
    if max(map(len, names), default=0) * 4 <= TENSOR_NAME_BYTES_MAX:
        return None
    long = [name for name in names if len(name.encode()) > TENSOR_NAME_BYTES_MAX]
    return f"names longer than {TENSOR_NAME_BYTES_MAX} bytes: {listed(long)}" if long else None


def _is_text(name: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _sizes_problem(columns: Columns) -> str | None:
    """Why bytes, shapes and dtypes contradict each other or exceed a limit. No product or sum below can wrap."""
    shapes, dtypes = columns.shapes, columns.dtypes
    if len(set(shapes)) != len(shapes) or len(set(dtypes)) != len(dtypes):
        return "a table lists something twice"
    if len(dtypes) > DTYPES_MAX or not all(dtype.isascii() and 0 < len(dtype) <= DTYPE_NAME_MAX for dtype in dtypes):
        return "impossible dtypes"
    numels = np.array([numel_of(shape) for shape in shapes], dtype=np.int64)
    if (numels < 0).any():
        return f"impossible shapes {[shown(shape) for shape in shapes if numel_of(shape) < 0]}"
    if len(columns.nbytes) and int(columns.nbytes.max()) > STREAM_BYTES_MAX:
        return f"a tensor of {int(columns.nbytes.max())} bytes, the limit is {STREAM_BYTES_MAX}"
    numel, size, dtype_of = numels[columns.shape_of], columns.nbytes.astype(np.int64), columns.dtype_of
    items = np.zeros(len(dtypes), dtype=np.int64)
    np.maximum.at(items, dtype_of, size // np.maximum(numel, 1))
    is_possible = (items <= ITEM_BYTES_MAX)[dtype_of] & ((numel == 0) == (size == 0))
    if not is_possible.all() or not np.array_equal(numel * items[dtype_of], size):
        return "bytes do not follow from shapes and dtypes"
    is_too_much = size[columns.parent < 0].astype(np.float64).sum() > STREAM_BYTES_MAX
    return f"more than {STREAM_BYTES_MAX} bytes in one shard" if is_too_much else None


def _aliases_problem(columns: Columns) -> str | None:
    """Why an alias does not lie within one tensor that has bytes of its own. Sizes are known to be in range."""
    parent, within, size = columns.parent, columns.parent_offset, columns.nbytes.astype(np.int64)
    if ((parent < -1) | (parent >= len(parent))).any():
        return "an alias of a tensor that does not exist"
    is_alias = parent >= 0
    above, offset = parent[is_alias], within[is_alias]
    if (parent[above] >= 0).any():
        return "an alias of an alias"
    if (size[is_alias] == 0).any() or within[~is_alias].any():
        return "an alias without bytes, or an offset without an alias"
    if (offset > STREAM_BYTES_MAX).any() or (offset.astype(np.int64) + size[is_alias] > size[above]).any():
        return "an alias reaches beyond its parent"
    return None


def numel_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape, -1 for an impossible one."""
    if len(shape) > RANK_MAX or any(not 0 <= dim <= STREAM_BYTES_MAX for dim in shape):
        return -1
    numel = math.prod(shape)
    return numel if numel <= STREAM_BYTES_MAX else -1


# ---------------------------------------------------------------- bytes


def pack(columns: Columns) -> bytes:
    """The bytes of consistent columns."""
    kinds, dtype_of = _by_first_use(columns.dtype_of)
    forms, shape_of = _by_first_use(columns.shape_of)
    #: Bytes of one element; 0 for a dtype of which there is no element.
    items = [0] * len(columns.dtypes)
    filled = np.flatnonzero(columns.nbytes)
    for i in filled[np.unique(columns.dtype_of[filled], return_index=True)[1]]:
        items[columns.dtype_of[i]] = int(columns.nbytes[i]) // math.prod(columns.shapes[columns.shape_of[i]])
    aliases = np.flatnonzero(columns.parent >= 0)
    return bytes(
        msgpack.packb(
            [
                MAGIC,
                FORMAT,
                columns.names,
                [[columns.dtypes[i], items[i]] for i in kinds],
                dtype_of.astype("<u2").tobytes(),
                [columns.shapes[i] for i in forms],
                shape_of.astype("<u4").tobytes(),
                aliases.astype("<u4").tobytes(),
                columns.parent[aliases].astype("<u4").tobytes(),
                columns.parent_offset[aliases].astype("<u8").tobytes(),
            ]
        )
    )


def _by_first_use(values: I64) -> tuple[list[int], I64]:
    """(the distinct values in order of first use, index of each value in that list)."""
    distinct, firsts, index = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return distinct[order].tolist(), rank[index.reshape(-1)]


def unpack(data: bytes) -> Columns:
    """Columns, of the right types and lengths but otherwise unchecked; `SourceFailed` for anything else."""
    try:
        fields = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            object_hook=_no_map,
            max_array_len=min(ENTRIES_MAX, len(data)),  # an entry takes a byte at least: no more is made room for
            max_map_len=0,
            max_ext_len=0,
            max_str_len=TENSOR_NAME_BYTES_MAX,
            max_bin_len=8 * ENTRIES_MAX,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise SourceFailed(f"the source's manifest is malformed: {error or type(error).__name__}") from None
    if not isinstance(fields, list) or fields[:2] != [MAGIC, FORMAT]:
        raise SourceFailed(f"the source's manifest is of no format this reader knows ({MAGIC} {FORMAT})")
    problem = _types_problem(fields[2:]) or _columns_problem(fields[2:])
    if problem is not None:
        raise SourceFailed(f"the source's manifest is malformed: {problem}")
    names, dtypes, dtype_of, shapes, shape_of, aliases, parents, offsets = fields[2:]
    kinds = np.frombuffer(dtype_of, dtype="<u2").astype(np.int64)
    forms = np.frombuffer(shape_of, dtype="<u4").astype(np.int64)
    table = [tuple(shape) for shape in shapes]
    # An impossible shape counts as empty here, and the checks refuse it: no product of 2**44 and 16 wraps.
    numels = np.array([max(0, numel_of(shape)) for shape in table], dtype=np.uint64)
    items = np.array([item for _, item in dtypes], dtype=np.uint64)
    parent = np.full(len(names), -1, dtype=np.int64)
    within = np.zeros(len(names), dtype=np.uint64)
    tied = np.frombuffer(aliases, dtype="<u4").astype(np.int64)
    parent[tied] = np.frombuffer(parents, dtype="<u4")
    within[tied] = np.frombuffer(offsets, dtype="<u8")
    return Columns(
        names, [name for name, _ in dtypes], kinds, table, forms, numels[forms] * items[kinds], parent, within
    )


def _no_map(_: object) -> object:
    """Empty maps pass the limit of their length, and take seventy times their byte."""
    raise ValueError("a map")


def _types_problem(fields: list[Any]) -> str | None:
    """Why decoded fields are of other types than `pack` writes."""
    if [type(value) for value in fields] != [list, list, bytes, list, bytes, bytes, bytes, bytes]:
        return "a table or a column is missing"
    names, dtypes, _, shapes = fields[:4]
    if not all(type(name) is str for name in names):
        return "a name is no text"
    if not all(type(row) is list and list(map(type, row)) == [str, int] for row in dtypes):
        return "a dtype is malformed"
    if not all(type(shape) is list and set(map(type, shape)) <= {int} for shape in shapes):
        return "a shape is malformed"
    return None


def _columns_problem(fields: list[Any]) -> str | None:
    """Why columns have other lengths than they should, or point past their tables."""
    names, dtypes, dtype_of, shapes, shape_of, aliases, _, offsets = fields
    count, tied = len(names), len(offsets) // 8
    if list(map(len, fields[2:3] + fields[4:])) != [2 * count, 4 * count, 4 * tied, 4 * tied, 8 * tied]:
        return "columns differ in length"
    if not all(0 <= item <= ITEM_BYTES_MAX for _, item in dtypes):
        return "a dtype's size is impossible"
    pointing = ((dtype_of, "<u2", len(dtypes)), (shape_of, "<u4", len(shapes)), (aliases, "<u4", count))
    if any(column and int(np.frombuffer(column, dtype=kind).max()) >= size for column, kind, size in pointing):
        return "a column points past its table"
    return None
