"""Peer: bare relays over TCP. No protocol, no verification: every host passes on what it has received so far.

The unit decides what it stands for. A chunk makes it the ideal of a pipeline; the whole shard makes it
store-and-forward; a root with many children and no relays is a star. Connections are made outside the clock.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.remote import Remote, State

#: Of connecting, and of one run of a slow star: the longest that is asked for is 33 shards by one link.
TIMEOUT_SECONDS = 110.0
#: A relay's largest receive: what arrived counts when it did, not when the unit is full.
RECEIVE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Run:
    """One distribution: seconds from the root's start until each reader had everything."""

    seconds: Mapping[str, float]

    @property
    def slowest(self) -> float:
        return max(self.seconds.values())


class Relays:
    """A tree of hosts, connected; `parents` maps each reader to whom it receives from."""

    def __init__(self, team: Mapping[str, Remote], numbers: Mapping[str, str], parents: Mapping[str, str]) -> None:
        roots = set(parents.values()) - set(parents)
        if len(roots) != 1:
            raise ValueError(f"a tree has one root, not {sorted(roots)}")
        self._readers = {name: team[name] for name in parents}
        self._root = team[roots.pop()]
        everyone = [self._root, *self._readers.values()]
        ports = {process.name: process.call(listen, numbers[process.name]) for process in everyone}
        for name, parent in parents.items():
            self._readers[name].call(connect, (numbers[parent], ports[parent]))
        for process in everyone:
            process.call(accept, list(parents.values()).count(process.name))
        self._fill = 0

    def run(self, nbytes: int, unit: int) -> Run:
        """Send a shard of fresh bytes down the tree; every byte is looked at afterwards."""
        self._fill = self._fill % 255 + 1
        for name, process in self._readers.items():
            process.call(allocate, nbytes, 0)
            process.start(receive, unit, name)
        self._root.call(allocate, nbytes, self._fill)
        began = self._root.call(send, unit)
        ended = {name: process.result() for name, process in self._readers.items()}
        for name, process in self._readers.items():
            if not process.call(holds, self._fill):
                raise RuntimeError(f"the relay is no result: {name} does not hold what was sent")
        return Run({name: end - began for name, end in ended.items()})

    def close(self) -> None:
        for process in (self._root, *self._readers.values()):
            process.call(hang_up)


def chain(root: str, readers: Sequence[str]) -> dict[str, str]:
    """Each reader receives from the one before it."""
    return dict(zip(readers, [root, *readers], strict=False))


def star(root: str, readers: Sequence[str]) -> dict[str, str]:
    """All receive from the root."""
    return dict.fromkeys(readers, root)


# ------------------------------------------------------------ in the processes


class Shard:
    """Bytes of which a prefix is there; senders wait for it to grow. The condition guards `filled`."""

    def __init__(self, nbytes: int, fill: int) -> None:
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.full(nbytes, fill, np.uint8)
        self.filled = 0
        self.grown = threading.Condition()

    def grow(self, filled: int) -> None:
        with self.grown:
            self.filled = filled
            self.grown.notify_all()

    def wait(self, wanted: int) -> int:
        """How much is there, as soon as it is at least `wanted`."""
        with self.grown:
            if not self.grown.wait_for(lambda: self.filled >= wanted, TIMEOUT_SECONDS):
                raise TimeoutError(f"{self.filled} of {wanted} bytes after {TIMEOUT_SECONDS:g} s")
            return self.filled


def listen(state: State, host: str) -> int:
    """The port that children find this process at."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    state["listener"] = socket.create_server((host, 0), family=family, backlog=256)
    return int(state["listener"].getsockname()[1])


def connect(state: State, parent: tuple[str, int]) -> None:
    """Reach the parent."""
    state["parent"] = socket.create_connection(parent, TIMEOUT_SECONDS)


def accept(state: State, children: int) -> None:
    """Take in this many children."""
    state["children"] = [state["listener"].accept()[0] for _ in range(children)]
    for child in state["children"]:
        child.settimeout(TIMEOUT_SECONDS)
        child.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def allocate(state: State, nbytes: int, fill: int) -> None:
    """A shard with every page touched."""
    state["shard"] = Shard(nbytes, fill)


def send(state: State, unit: int) -> float:
    """When the root began; returns when its last byte is handed over."""
    shard: Shard = state["shard"]
    began = time.monotonic()
    shard.grow(len(shard.bytes))
    _wait(_serve(state, unit))
    return began


def receive(state: State, unit: int, name: str) -> float:
    """When the last byte had arrived; returns when everything is passed on, too."""
    shard: Shard = state["shard"]
    servers = _serve(state, unit)
    view, at = memoryview(shard.bytes.data), 0
    while at < len(view):
        stop = min(at - at % unit + unit, len(view), at + RECEIVE_BYTES)
        received = state["parent"].recv_into(view[at:stop])
        if received == 0:
            raise ConnectionError(f"{name}: the parent closed after {at} of {len(view)} bytes")
        at += received
        if at % unit == 0 or at == len(view):
            shard.grow(at)
    ended = time.monotonic()
    _wait(servers)
    return ended


def holds(state: State, fill: int) -> bool:
    """Whether every byte is this."""
    return bool((state["shard"].bytes == fill).all())


def hang_up(state: State) -> None:
    """Close all sockets and forget the shard."""
    for sock in (*state.pop("children"), state.pop("parent", None), state.pop("listener")):
        if sock is not None:
            sock.close()
    state.pop("shard", None)


def _serve(state: State, unit: int) -> list[threading.Thread]:
    """One thread per child that hands over whole units as they come."""

    def serve(child: socket.socket) -> None:
        shard: Shard = state["shard"]
        view, at = memoryview(shard.bytes.data), 0
        while at < len(view):
            filled = shard.wait(min(at + unit, len(view)))
            child.sendall(view[at:filled])
            at = filled

    threads = [threading.Thread(target=serve, args=(child,), daemon=True) for child in state["children"]]
    for thread in threads:
        thread.start()
    return threads


def _wait(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
        if thread.is_alive():
            raise TimeoutError(f"a child did not take its bytes within {TIMEOUT_SECONDS:g} s")
