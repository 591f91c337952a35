"""A Transfer Engine within one process, for what no machine without RDMA shows: requests that write late, or never end.

Implements the calls that `transport/mooncake_library.py` uses. `tests/conformance/test_mooncake_library.py` holds it
to the real one where they overlap.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensorhub.transport.mooncake_library import Library, start

_ports = itertools.count(20000)
#: {"host:port": engine} of those that run.
_network: dict[str, FakeTransferEngine] = {}


class FakeTransferEngine:
    """`mooncake.engine.TransferEngine` as far as it is used. A request moves its bytes when it is first asked for."""

    def __init__(self) -> None:
        self.regions: dict[int, int] = {}
        #: (address, nbytes) of every successful registration, ever.
        self.registered: list[tuple[int, int]] = []
        #: What a test does to a request before it is answered: "go", "hold" or "fail".
        self.meddle: Callable[[str, int, int, int], str] = lambda peer, local, remote, nbytes: "go"
        self.initialize_code = 0
        self.register_code: int | None = None
        self.requests: list[tuple[str, int, int, int]] = []
        self._batches: dict[int, tuple[str, int, int, int]] = {}
        self._numbers = itertools.count(1)
        self._port = next(_ports)

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        if self.initialize_code == 0:
            _network[f"{host}:{self._port}"] = self
        return self.initialize_code

    def get_rpc_port(self) -> int:
        return self._port

    def register_memory(self, address: int, nbytes: int) -> int:
        if nbytes == 0:
            return -1
        if self.register_code is not None:
            return self.register_code
        if any(address < start + size and start < address + nbytes for start, size in self.regions.items()):
            return -7
        self.regions[address] = nbytes
        self.registered.append((address, nbytes))
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self.regions.pop(address, None) is not None else -3

    def send_probe(self, peer: str) -> int:
        return 0 if peer in _network else -101

    def batch_transfer_async_read(self, peer: str, local: list[int], remote: list[int], nbytes: list[int]) -> int:
        if peer not in _network:
            return 0
        batch = next(self._numbers)
        request = (peer, local[0], remote[0], nbytes[0])
        self.requests.append(request)
        self._batches[batch] = request
        return batch

    def transfer_check_status(self, batch: int) -> int:
        peer, local, remote, nbytes = self._batches[batch]
        fate = self.meddle(peer, local, remote, nbytes)
        if fate == "hold":
            return 0
        del self._batches[batch]
        source = _network.get(peer)
        if fate == "fail" or source is None or not source.serves(remote, nbytes) or not self._may_write(local, nbytes):
            return -1
        ctypes.memmove(local, remote, nbytes)
        return 1

    def serves(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self.regions.items())

    def _may_write(self, local: int, nbytes: int) -> bool:
        """RDMA writes only to what is registered here."""
        return self.serves(local, nbytes)

    def late_writes(self) -> None:
        """Every request that has not ended arrives now, where the device may still write."""
        self.meddle = lambda *_: "go"
        for peer, local, remote, nbytes in self._batches.values():
            if _network[peer].serves(remote, nbytes) and self._may_write(local, nbytes):
                ctypes.memmove(local, remote, nbytes)


@contextmanager
def fake_library(protocol: str = "rdma", host: str = "127.0.0.1") -> Iterator[tuple[Library, FakeTransferEngine]]:
    """A started library over a fake engine."""
    engine = FakeTransferEngine()
    library = start(engine, host, protocol)
    try:
        yield library, engine
    finally:
        _network.pop(str(library.address), None)
