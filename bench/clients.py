"""Clients of a server under load: processes with one or more sessions each, all at once, one call at a time each.

What one client does in a cycle is its own: `Reference` asks a reference server for what a pull asks for, echoes ask for
their own bytes. Every function runs in a `Remote`, on its state; its event loop only runs while a function does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bench.remote import State
from tensorhub import messages as m
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.types import (
    ID_BYTES,
    Digest,
    Exactly,
    Generation,
    Location,
    ModelKey,
    ReplicaId,
    Seat,
    SessionId,
    Version,
)

T = TypeVar("T")

CALL_SECONDS = 30.0
VERSION = Version("main", 1)
CHUNKS, CHUNK_BYTES = 1024, 1 << 20
#: As long as those of real engines and holders: what a grant carries has its real size.
LOCATOR = m.Locator("tcp", bytes(96))
EXPOSURE = bytes(64)


class Client(Protocol):
    """One session's worth of load."""

    async def cycle(self) -> tuple[int, float]:
        """(calls made, seconds that the first of them took)."""
        ...

    async def close(self) -> None: ...


Opener = Callable[[str, str], Awaitable[Client]]


@dataclass(frozen=True, slots=True)
class Load:
    """What a process's clients did together within the measured time."""

    calls: int
    first_call_seconds: tuple[float, ...]


def prepare(state: State, opener: Opener, address: str, names: list[str], environment: dict[str, str]) -> None:
    """Open a client per name. `Missing` where what they need is not installed."""
    os.environ.update(environment)
    logging.getLogger("tensorhub").setLevel(logging.ERROR)  # that actor calls are slower is what is measured
    state["runner"] = asyncio.Runner()
    state["clients"] = [state["runner"].run(opener(address, name)) for name in names]


def load(state: State, begin: float, seconds: float) -> Load:
    """Cycles of all clients at once from `begin`, on the shared clock, for so long."""
    outcome: Load = state["runner"].run(_load(state["clients"], begin, seconds))
    return outcome


def finish(state: State) -> None:
    """Close the clients."""
    for client in state.pop("clients"):
        state["runner"].run(client.close())
    state.pop("runner").close()


async def _load(clients: list[Client], begin: float, seconds: float) -> Load:
    end = begin + seconds
    await asyncio.sleep(max(0.0, begin - time.monotonic()))
    done = await asyncio.gather(*[_cycles(client, end) for client in clients])
    return Load(sum(one.calls for one in done), tuple(took for one in done for took in one.first_call_seconds))


async def _cycles(client: Client, end: float) -> Load:
    calls = 0
    took: list[float] = []
    while True:
        made, seconds = await client.cycle()
        if time.monotonic() > end:
            return Load(calls, tuple(took))
        calls += made
        took.append(seconds)


class Reference:
    """A session that holds a published version of a model of its own and replicates it, again and again.

    A cycle is what one shard's pull asks the server: Replicate until Granted, Serve, Done until Committed. A model per
    session: what is measured is the server, not how readers of one source wait for each other. The fillings are those
    of a subset, which serve nobody, so that the next cycle is granted anew.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        model = ModelKey("bench", name)
        self._publisher = Seat(model, ReplicaId("publisher"), 0)
        self._reader = Seat(model, ReplicaId("reader"), 0)
        self._group = 0
        self._sequence = 0
        self._root = Digest(secrets.token_bytes(ID_BYTES))

    @classmethod
    async def open(cls, address: str, name: str) -> Reference:
        """Welcome, with a version published."""
        session = Session(
            parse_server(address), SessionId(secrets.token_bytes(ID_BYTES)), host="bench", pid=os.getpid()
        )
        await session.open(CALL_SECONDS)
        client = cls(session, name)
        await client._publish()
        return client

    async def _publish(self) -> None:
        for seat in (self._publisher, self._reader):
            joined = await self._ask(m.Join(seat, 1, "", False, Location()), m.Joined)
            self._group, self._sequence = joined.group, joined.sequence
        content = m.Content(Digest(secrets.token_bytes(ID_BYTES)), CHUNKS * CHUNK_BYTES, CHUNKS, True)
        generation = _generation()
        await self._ask(m.Publish(self._publisher, "a", VERSION, generation, content, (LOCATOR,), EXPOSURE), m.Ok)
        await self._ask(m.Seal(self._publisher, generation, self._root), m.Ok)

    async def cycle(self) -> tuple[int, float]:
        generation, turn = _generation(), (self._group, self._sequence)
        wanted = m.Replicate(
            self._reader, "a", *turn, Exactly(VERSION.number), int(CALL_SECONDS * 1e9), generation, serves=False
        )
        began = time.perf_counter()
        await self._ask(wanted, m.Granted)
        granted = time.perf_counter() - began
        await self._ask(m.Serve(self._reader, generation, (LOCATOR,), EXPOSURE, "tcp"), m.Ok)
        done = m.Done(self._reader, *turn, generation, self._root, CHUNKS * CHUNK_BYTES)
        await self._ask(done, m.Committed)
        self._sequence += 1
        return 3, granted

    async def close(self) -> None:
        await self._session.close(CALL_SECONDS)

    async def _ask(self, request: m.Request, expected: type[T]) -> T:
        reply = await self._session.call(request, CALL_SECONDS)
        if not isinstance(reply, expected):
            raise TypeError(f"{type(request).__name__} is answered by {reply}")  # a cycle that failed is no load
        return reply


def _generation() -> Generation:
    return Generation(secrets.token_bytes(ID_BYTES))
