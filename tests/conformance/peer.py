"""A source process for the conformance suite: allocates, registers, and answers one JSON line per command.

Run as `python -m tests.conformance.peer ENGINE HOST`. Its bytes are those of `pattern`, so the reader knows them
without asking.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import sys

import numpy as np

from tensorhub import native
from tensorhub.transport.router import open_engines

#: Not in Python's `mmap` before 3.13: sparse mappings may be larger than what is free.
MAP_NORESERVE = 0x4000


def pattern(seed: int, nbytes: int) -> np.ndarray:
    """Bytes that differ between any two places and seeds."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Memory:
    """Anonymous mappings, sparse until written; what a command names by address stays mapped until `unmap`."""

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}

    def map(self, nbytes: int) -> int:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        view = (ctypes.c_char * 1).from_buffer(mapping)
        address = ctypes.addressof(view)
        del view
        self._mappings[address] = mapping
        return address

    def unmap(self, address: int) -> None:
        self._mappings.pop(address).close()

    def write(self, address: int, seed: int, nbytes: int) -> None:
        data = pattern(seed, nbytes)
        ctypes.memmove(address, data.ctypes.data, nbytes)

    def poke(self, address: int, data: bytes) -> None:
        """As a holder writes its progress block: whoever waits for it is told."""
        native.store(address, data)

    def peek(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def close(self) -> None:
        for address in list(self._mappings):
            self.unmap(address)


def main() -> None:
    """Serve commands until standard input ends."""
    name, host = sys.argv[1:]
    (engine,), memory = open_engines([name], host), Memory()
    commands = {
        "map": memory.map,
        "unmap": memory.unmap,
        "write": memory.write,
        "poke": lambda address, data: memory.poke(address, bytes.fromhex(data)),
        "register": engine.register,
        "deregister": engine.deregister,
        "locate": lambda: engine.locate().hex(),
        "forbid": lambda: ctypes.CDLL(None).prctl(4, 0, 0, 0, 0),  # PR_SET_DUMPABLE
        "close": lambda: asyncio.run(engine.close()),
    }
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "hold":
            print("null", flush=True)
            ctypes.PyDLL(None).pause()  # unlike CDLL, keeps the interpreter's lock
        print(json.dumps(commands[command](*arguments)), flush=True)


if __name__ == "__main__":
    main()
