"""One fixed example of every message, made from its type hints: what the golden bytes are the bytes of.

Values count up field by field, so that two swapped fields give other bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import NewType, Union, get_args, get_origin, get_type_hints


def example(cls: type) -> object:
    """The example of a message class."""
    return _value(cls, itertools.count(1))


def _value(hint: object, count: Iterator[int]) -> object:
    if isinstance(hint, NewType):
        return _value(hint.__supertype__, count) if hint.__supertype__ is not bytes else bytes([next(count)]) * 16
    if hint is int:
        return next(count)
    if hint is str:
        return f"text-{next(count)}"
    if hint is bool:
        return bool(next(count) % 2)
    if hint is bytes:
        return bytes([next(count)])
    origin = get_origin(hint)
    if origin is tuple:
        return (_value(get_args(hint)[0], count), _value(get_args(hint)[0], count))
    if origin in (Union, UnionType):
        return _value(next(member for member in get_args(hint) if member is not NoneType), count)
    assert isinstance(hint, type), hint
    hints = get_type_hints(hint)
    return hint(**{field.name: _value(hints[field.name], count) for field in dataclasses.fields(hint)})
