"""The msgpack of engines' locators, read without trust: small, flat, and of exactly the types that were packed.

It decides what bytes may be a locator at all; what its fields mean is each engine's. A locator comes from a peer, by
way of a server that does not look inside.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgpack

from tensorhub.errors import EngineUnavailable

#: Fields of one locator, and bytes of one of them: ours have six, of some tens of bytes; a path or a host's name fits.
FIELDS_MAX = 16
FIELD_BYTES_MAX = 1024


def packed(values: object) -> bytes:
    """A locator of these fields."""
    return bytes(msgpack.packb(values))


def unpacked(locator: bytes, types: Mapping[str, type]) -> dict[str, object]:
    """Its fields by name, in this order if it is an array; `EngineUnavailable` unless each is of exactly its type.

    Ints are 0 to 2**64 - 1.
    """
    try:
        found = msgpack.unpackb(
            locator,
            max_array_len=FIELDS_MAX,
            max_map_len=FIELDS_MAX,
            max_str_len=FIELD_BYTES_MAX,
            max_bin_len=FIELD_BYTES_MAX,
            max_ext_len=0,
        )
    except Exception as error:  # any bytes may come in, and msgpack has many ways to say no
        raise malformed(f"{type(error).__name__} {str(error)[:80]}") from error
    if isinstance(found, list) and len(found) == len(types):
        found = dict(zip(types, found, strict=True))
    if not isinstance(found, dict) or found.keys() < types.keys():
        raise malformed(f"it lacks some of {', '.join(types)}")
    for name, kind in types.items():
        value = found.get(name)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 2**64):
            raise malformed(f"{name} is {str(value)[:40]!r}")
    return {name: found[name] for name in types}


def malformed(why: str) -> EngineUnavailable:
    """The one way in which all say it."""
    return EngineUnavailable(f"the source's locator is malformed: {why}")
