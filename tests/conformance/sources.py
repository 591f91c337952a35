"""What the conformance suite reads from: a source in this process or in another one, behind the same few commands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import EngineUnavailable
from tensorhub.ports import Chunks, Engine, Ranges
from tensorhub.transport import mooncake_library
from tensorhub.transport.cuda_driver import CudaDriver
from tensorhub.transport.cuda_ipc import CudaIpcEngine
from tensorhub.transport.local import LocalEngine
from tensorhub.transport.memory import MemoryEngine
from tensorhub.transport.mooncake import MooncakeEngine
from tensorhub.transport.route import LOOPBACK
from tensorhub.transport.tcp import TcpEngine
from tests.conformance.peer import Memory, pattern
from tests.support.fake_cuda import FakeCuda, FakeGpu


class SourceHere:
    """A second engine of this process."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = MemoryEngine() if engine is None else engine
        self._memory = Memory()
        self.map, self.unmap, self.write = self._memory.map, self._memory.unmap, self._memory.write
        self.poke = self._memory.poke
        self.register, self.deregister = self.engine.register, self.engine.deregister

    def locate(self) -> bytes:
        return self.engine.locate()

    def end(self) -> None:
        asyncio.run(self.engine.close())
        self._memory.close()


class SourceOnGpu:
    """A second engine that reads CUDA memory, on a fake GPU; as between two processes."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._cuda = FakeCuda(gpu)
        self.engine = CudaIpcEngine(CudaDriver(self._cuda))
        self.map, self.unmap = self._cuda.allocate, self._cuda.free
        self.register, self.deregister = self.engine.register, self.engine.deregister

    def write(self, address: int, seed: int, nbytes: int) -> None:
        self._cuda.write(address, pattern(seed, nbytes).tobytes())

    def locate(self) -> bytes:
        return self.engine.locate()

    def end(self) -> None:
        asyncio.run(self.engine.close())
        self._cuda.close()


class SourceProcess:
    """A child that runs `tests.conformance.peer` with one engine, which its locators place on `host`."""

    def __init__(self, engine: str, host: str = LOOPBACK) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.peer", engine, host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def map(self, nbytes: int) -> int:
        return int(self.ask("map", nbytes))

    def unmap(self, address: int) -> None:
        self.ask("unmap", address)

    def write(self, address: int, seed: int, nbytes: int) -> None:
        self.ask("write", address, seed, nbytes)

    def poke(self, address: int, data: bytes) -> None:
        self.ask("poke", address, data.hex())

    def register(self, address: int, nbytes: int) -> None:
        self.ask("register", address, nbytes)

    def deregister(self, address: int, nbytes: int) -> None:
        self.ask("deregister", address, nbytes)

    def locate(self) -> bytes:
        return bytes.fromhex(self.ask("locate"))

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def hold_interpreter(self) -> None:
        """From its answer on, no thread of it runs Python again."""
        self.ask("hold")

    def end(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


Source = SourceHere | SourceOnGpu | SourceProcess
#: What the `cuda_ipc` cases share; unwritten device memory reads as zeros, as the suite expects.
_GPU = FakeGpu(scramble=0)


@dataclass(frozen=True, slots=True)
class Case:
    """One implementation of `ports.Engine` and the kind of source it reads from."""

    open_engine: Callable[[], Engine]
    open_source: Callable[[], Source]
    #: False where the kernel, not the engine, decides what may be read (docs of `transport/local.py`).
    enforces_registration: bool


CASES = {
    "memory": Case(MemoryEngine, SourceHere, True),
    "cuda_ipc": Case(lambda: CudaIpcEngine(CudaDriver(FakeCuda(_GPU))), lambda: SourceOnGpu(_GPU), False),
    "local": Case(LocalEngine, lambda: SourceProcess("local"), False),
    "tcp": Case(lambda: TcpEngine(LOOPBACK), lambda: SourceProcess("tcp"), True),
    "mooncake": Case(lambda: MooncakeEngine(LOOPBACK), lambda: SourceProcess("mooncake"), True),
}


@dataclass(frozen=True, slots=True)
class FollowerCase:
    """An engine that follows by itself, and a source for it in this process or in another one."""

    open_engine: Callable[[], Engine]
    open_source: Callable[[], SourceHere | SourceProcess]


FOLLOWERS = {
    "local here": FollowerCase(LocalEngine, lambda: SourceHere(LocalEngine())),
    "local": FollowerCase(LocalEngine, lambda: SourceProcess("local")),
    "tcp here": FollowerCase(lambda: TcpEngine(LOOPBACK), lambda: SourceHere(TcpEngine(LOOPBACK))),
    "tcp": FollowerCase(lambda: TcpEngine(LOOPBACK), lambda: SourceProcess("tcp")),
}
#: Those with a source process of its own take longer.
FOLLOWER_PARAMS = [
    "local here",
    "tcp here",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("local", "tcp")),
]


def usable(name: str) -> str:
    """The name of a case, whose test is skipped where an optional package is missing."""
    if name == "mooncake":
        try:
            mooncake_library.load(is_ipv6=False)
        except EngineUnavailable as error:
            pytest.skip(error.message)
    return name


class Liar:
    """An engine that moves nothing, too little, the wrong or too many bytes, and reports success (`transport_lies`)."""

    def __init__(self, honest: Engine, lie: str) -> None:
        self.name = honest.name
        self._honest, self._lie = honest, lie
        self.locate, self.register, self.deregister = honest.locate, honest.register, honest.deregister
        self.close = honest.close

    async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
        match self._lie:
            case "nothing":
                return
            case "truncates":
                nbytes = np.maximum(ranges.nbytes - np.uint64(1), np.uint64(1))
                await self._honest.read(peer, Ranges(ranges.remote, ranges.local, nbytes), timeout_s)
            case "reorders":
                await self._honest.read(
                    peer, Ranges(ranges.remote[::-1].copy(), ranges.local, ranges.nbytes), timeout_s
                )
            case "spills":
                await self._honest.read(peer, ranges, timeout_s)
                native.store(int(ranges.local[0] + ranges.nbytes[0]), b"!")
