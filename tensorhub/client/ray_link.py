"""The way to a reference server that is a named Ray actor: found by name at each connect, spoken to by frames over TCP.

It decides which of the two ways is taken: the actor's own address, which costs Ray nothing per message and keeps a
heartbeat that needs no interpreter; or, where that cannot be reached, the actor's methods (`ray_calls.py`). A handle is
trusted for one connection: the actor may have been removed and made again under its name, elsewhere.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import socket
from dataclasses import dataclass
from typing import Any

from tensorhub.addresses import Address
from tensorhub.client import ray_runtime
from tensorhub.client.frame_link import FrameLink
from tensorhub.client.ray_calls import CallsConnection, CallsHeart
from tensorhub.errors import BadRequest, NoServer, ServerUnavailable
from tensorhub.ports import Connection, Heart
from tensorhub.transport.route import host_towards

#: "0" leaves the actor's own address alone: what a firewall does, without waiting for it.
DIRECT_ENV = "TENSORHUB_RAY_DIRECT"
#: A route that a firewall swallows silently is given up after this long; one that exists answers in milliseconds.
DIRECT_S = 2.0
#: To open a connection for heartbeats, to a server that has just answered on another.
BEAT_OPEN_S = 5.0
#: What Ray takes for a name, and is unmistakable in an address.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
#: Loaded by name, as the local link starts its server: client and server meet only in messages.
_ACTOR_MODULE = "tensorhub.server.ray_actor"

_LOG = logging.getLogger("tensorhub.client")


def ray_link(address: str, may_start: bool = True) -> RayLink:
    """The link to `ray://NAME`; `BadRequest` for what is none, `ServerUnavailable` where Ray is not installed."""
    name = address.removeprefix("ray://")
    if ":" in name:
        raise BadRequest(
            f"server address {address!r} looks like a host and port, as Ray Client has it; write 'ray://NAME', the "
            "name of the reference server's actor, and connect to the cluster by ray.init() or RAY_ADDRESS"
        )
    if not _NAME.fullmatch(name):
        raise BadRequest(f"server address {address!r}: a name has 1 to 128 letters, digits, '_', '-' or '.'")
    ray_runtime.check_installed()  # here, not at each connect: a session would ask again until its deadline
    return RayLink(address, name, may_start)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one life of the actor is."""

    actor: Any
    #: Where it takes frames; None when it does not, or we must not.
    direct: Address | None
    #: The host of its node, as Ray knows it.
    node: str


class RayLink:
    """`ray://NAME`: see the top."""

    def __init__(self, address: str, name: str, may_start: bool) -> None:
        self.address = address
        self._name = name
        self._may_start = may_start
        #: Where the last connection went, and how; heartbeats go the same way.
        self._place: _Place | None = None
        self._frames: FrameLink | None = None
        #: Told once per link: every reconnect would say the same.
        self._told = False

    async def own_host(self) -> str:
        place = self._place or await self._find(BEAT_OPEN_S)
        return host_towards(place.direct or Address(place.node, 0))

    async def connect(self, timeout_s: float) -> Connection:
        """A connection to whoever bears the name now; the actor is made when there is none, if we may."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        self._place = self._frames = None
        place = await self._find(timeout_s)
        connection, frames = await self._directly(place, max(0.0, min(DIRECT_S, deadline_s - loop.time())))
        if connection is None:
            left_s = max(0.0, deadline_s - loop.time())
            connection = await CallsConnection.open(place.actor, _self(), self.address, left_s)
        self._place, self._frames = place, frames
        return connection

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        """By a native thread over the actor's address, or by calls, as the last connection."""
        if self._place is None:
            await (await self.connect(BEAT_OPEN_S)).close()
        place = self._place
        if self._frames is not None:
            return await self._frames.beat(session, interval_ns)
        if place is None:
            raise ServerUnavailable(f"{self.address} is being looked for")
        connection = await CallsConnection.open(place.actor, f"heart of {_self()}", self.address, BEAT_OPEN_S)
        return CallsHeart(connection, session, interval_ns)

    async def _find(self, timeout_s: float) -> _Place:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        ray = await ray_runtime.joined(timeout_s)
        doing = f"finding the actor of {self.address}"
        found = await ray_runtime.blocking(self._get_or_start, max(0.0, deadline_s - loop.time()), doing)
        actor = ray_runtime.Handle(ray, found)
        left_s = max(0.0, deadline_s - loop.time())
        text, node, _ = await ray_runtime.called(
            actor.where, timeout_s=left_s, doing=f"asking {self.address} where it is"
        )
        return _Place(actor, Address.parse(text) if text is not None and _may_be_direct() else None, node)

    def _get_or_start(self) -> Any:
        server = importlib.import_module(_ACTOR_MODULE)
        if self._may_start:
            return server.start(self._name)
        if (actor := server.find(self._name)) is None:
            raise NoServer(
                f"no actor {self._name!r} in namespace {server.NAMESPACE!r} of this Ray cluster; the first hub that is "
                f"opened with server={self.address!r} makes it"
            )
        return actor

    async def _directly(self, place: _Place, timeout_s: float) -> tuple[Connection | None, FrameLink | None]:
        """A connection over the actor's own address, if there is a way."""
        if place.direct is None:
            why = "it could not listen on its node" if _may_be_direct() else f"{DIRECT_ENV}=0"
        else:
            frames = FrameLink(self.address, place.direct)
            try:
                return await frames.connect(timeout_s), frames
            except ServerUnavailable as error:
                why = str(error)
        if not self._told:
            self._told = True
            _LOG.warning("%s is spoken to by actor calls, which are slower: %s", self.address, why)
        return None, None


def _may_be_direct() -> bool:
    return os.environ.get(DIRECT_ENV, "1") != "0"


def _self() -> str:
    return f"process {os.getpid()} of {socket.gethostname()}"
