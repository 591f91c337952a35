"""Two processes of a peer, a source and a reader, with the same bytes as ours; stopped while it is not their turn.

Peers poll, in threads of their own, while they wait: what runs in turns with them must not pay for that. It imports
neither torch nor any peer.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from bench.process import cpu_seconds
from bench.remote import Missing, Remote, State


class Pair:
    """A context manager: leaving it kills both processes, which hold nothing; some libraries hang or crash at exit."""

    def __init__(self, name: str, sizes: list[int]) -> None:
        self.name = name
        self.sizes = sizes
        self.source = Remote(f"{name}-source")
        self.reader = Remote(f"{name}-reader")

    def __enter__(self) -> Pair:
        self.source.call(allocate, self.sizes, 1)
        self.reader.call(allocate, self.sizes, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.kill()
        self.source.kill()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """New bytes at the source, then the caller moves them, then they must be at the reader."""
        self.source.resume()
        self.reader.resume()
        self.source.call(change)
        yield
        there, here = self.source.call(first_bytes), self.reader.call(first_bytes)
        if there != here:
            raise RuntimeError(f"{self.name} is no result: the reader holds {here}, the source {there}")
        self.source.pause()
        self.reader.pause()

    def cpu_seconds(self) -> float:
        """CPU time of both processes so far."""
        return cpu_seconds(self.source.pid) + cpu_seconds(self.reader.pid)


def allocate(state: State, sizes: list[int], fill: int) -> None:
    """Arrays of these sizes with every page touched."""
    state["arrays"] = [np.full(nbytes, fill, np.uint8) for nbytes in sizes]


def change(state: State) -> None:
    """Change every byte."""
    for array in state["arrays"]:
        np.add(array, 1, out=array)


def first_bytes(state: State) -> list[int]:
    """The first and the last byte of each array: a peer that moved nothing shows here."""
    return [int(array[at]) for array in state["arrays"] for at in (0, -1)]


def fills(state: State) -> list[int | None]:
    """What each array is full of; None where its bytes differ: half a transfer shows here."""
    return [int(array[0]) if bool((array == array[0]).all()) else None for array in state["arrays"]]


def places(state: State) -> list[tuple[int, int]]:
    """(address, nbytes) of each array."""
    return [(array.ctypes.data, array.nbytes) for array in state["arrays"]]


def load(module: str, install: str, **environment: str) -> ModuleType:
    """Import a peer's library in its process, under these settings; `Missing` says what to install."""
    os.environ.update(environment)
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise Missing(f"no {module} ({error}); install: {install}") from error


def silence() -> None:
    """Drop what a library prints while it works. What fails says so by codes and exceptions, which do not pass here."""
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere.fileno(), stream.fileno())


def check(code: Any, what: str) -> None:
    """A peer's return code, 0 for success."""
    if code != 0:
        raise RuntimeError(f"{what} returned {code}")
