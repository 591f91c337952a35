"""Finds, loads and binds the shared library, and gives it the digest function it does not implement itself.

The only module that knows signatures of C functions. Either everything works, self-test included, or
`EngineUnavailable` says what was tried and how to build.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tensorhub.errors import BadRequest, EngineUnavailable

#: Must equal `ABI` in tensorhub.c.
ABI = 9
#: Lengths around every branch of XXH3-64: 0, 1-3, 4-8, 9-16, 17-128, 129-240, then stripes and blocks.
_SELF_TEST_LENGTHS = (0, 1, 3, 4, 8, 9, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 4096, 8191)

_u64, _i64, _i32, _u32, _at = ctypes.c_uint64, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p

_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "th_bind_xxh3": (None, (_at,)),
    "th_digest": (_u64, (_u64, _u64)),
    "th_digest_runs": (_i32, (_at, _at, _at, _u64, _at, _at)),
    "th_copy": (None, (_u64, _u64, _u64)),
    "th_copy_ranges": (None, (_at, _at, _at, _u64)),
    "th_compare_ranges": (_u64, (_at, _at, _at, _u64, _at)),
    "th_store": (None, (_u64, ctypes.c_char_p, _u64)),
    "th_read_open": (_at, (_i32, _at, _at, _at, _u64, _at, _at, _u64, _i64, _at)),
    "th_read_run": (None, (_at,)),
    "th_read_cancel": (None, (_at,)),
    "th_read_outcome": (None, (_at, _at)),
    "th_read_close": (None, (_at,)),
    "th_probe_process": (_i32, (_i32,)),
    "th_allow_readers": (_i32, ()),
    "th_lower_priority": (_i32, (_i32,)),
    "th_server_start": (_i32, (_i32, ctypes.c_char_p, _at, _at)),
    "th_server_add": (_i32, (_at, _u64, _u64)),
    "th_server_remove": (_i32, (_at, _u64, _u64)),
    "th_server_facts": (None, (_at, _at, _at)),
    "th_server_stop": (_i32, (_at,)),
    "th_server_forget": (None, (_at,)),
    "th_streams_open": (_i32, (_at, _at, _at, _u64, _at, _at, _u64, _i64, _at, _at)),
    "th_streams_wait_fast": (_i32, (_at,)),
    "th_streams_cancel": (None, (_at,)),
    "th_streams_give_up": (None, (_at,)),
    "th_streams_outcome": (None, (_at, _at)),
    "th_streams_close": (None, (_at,)),
    "th_stream_open": (_i32, (_i32, ctypes.c_char_p, _at, _i64, _at, _at)),
    "th_stream_is_idle": (_i32, (_at,)),
    "th_stream_run": (_i32, (_at, _at)),
    "th_stream_close": (None, (_at,)),
    "th_beat_start": (_i32, (_i32, ctypes.c_char_p, _u32, ctypes.c_char_p, _u32, _i64, _i64, _at)),
    "th_beat_acknowledged_ns": (_i64, (_at,)),
    "th_beat_ending": (_i32, (_at, _at, _at, _at)),
    "th_beat_stop": (_i32, (_at,)),
    "th_beat_forget": (None, (_at,)),
}

_BUILD = "build it with 'pip install .', or 'python setup.py build_ext --inplace' in a checkout (needs a C compiler)"


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once, digests checked against the `xxhash` package."""
    native = _load(_library_file(Path(__file__).parent))
    native.th_bind_xxh3(_find_xxh3())
    for length in _SELF_TEST_LENGTHS:
        data = _pattern(length)
        if native.th_digest(
            ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value, length
        ) != xxhash.xxh3_64_intdigest(data):
            raise EngineUnavailable(f"the native digest of {length} bytes differs from the xxhash package's")
    return native


def _library_file(directory: Path) -> Path:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        file = directory / f"_tensorhub{suffix}"
        if file.exists():
            return file
    raise EngineUnavailable(f"the native library is not built: no _tensorhub.* in {directory}; {_BUILD}")


def _load(file: Path) -> ctypes.CDLL:
    try:
        native = ctypes.CDLL(os.fspath(file))
        built = native.th_abi()
    except (OSError, AttributeError) as error:
        raise EngineUnavailable(f"the native library {file} does not load: {error}; {_BUILD}") from error
    if built != ABI:
        raise EngineUnavailable(f"the native library {file} is a stale build ({built}, expected {ABI}); {_BUILD}")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(native, name)
        function.restype = result
        function.argtypes = arguments
    return native


def _find_xxh3() -> int:
    """Address of an XXH3-64 that passes the self-test: the fastest of the `xxhash` package, else the system's."""
    tried: list[str] = []
    for source, path in (("the xxhash package", _xxhash_extension), ("libxxhash", lambda: "libxxhash.so.0")):
        try:
            holder = ctypes.CDLL(path())
        except (OSError, ImportError, AttributeError) as error:
            tried.append(f"{source}: {error}")
            continue
        for symbol in ("XXH3_64bits_dispatch", "XXH3_64bits"):
            function = getattr(holder, symbol, None)
            if function is not None and _computes_xxh3(function):
                return ctypes.cast(function, ctypes.c_void_p).value or 0
            tried.append(f"{source}: {symbol} is {'absent' if function is None else 'wrong'}")
    raise EngineUnavailable(f"no usable XXH3-64 was found ({'; '.join(tried)}); install the xxhash wheel or libxxhash0")


def _xxhash_extension() -> str:
    return str(importlib.import_module("xxhash._xxhash").__file__)


def _computes_xxh3(function: Callable[..., int]) -> bool:
    function.restype = ctypes.c_uint64  # type: ignore[attr-defined]
    function.argtypes = (ctypes.c_char_p, ctypes.c_size_t)  # type: ignore[attr-defined]
    datas = map(_pattern, _SELF_TEST_LENGTHS)
    return all(function(data, len(data)) == xxhash.xxh3_64_intdigest(data) for data in datas)


def _pattern(length: int) -> bytes:
    return bytes(range(1, 252)) * (length // 251) + bytes(range(1, 1 + length % 251))


def address_of(name: str, array: NDArray[np.uint64], length: int | None = None) -> int:
    """Address of a dense uint64 vector, of `length` elements if given; `BadRequest` for anything else."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint64 or array.ndim != 1:
        raise BadRequest(f"{name} must be a uint64 vector, not {getattr(array, 'dtype', type(array).__name__)}")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise BadRequest(f"{name} must be contiguous and aligned")
    if length is not None and len(array) != length:
        raise BadRequest(f"{name} has {len(array)} elements, expected {length}")
    return int(array.ctypes.data)


def check(error: int, what: str) -> None:
    """`OSError` for what a C function returned, unless it is 0."""
    if error != 0:
        raise OSError(error, f"{what}: {os.strerror(error)}")
