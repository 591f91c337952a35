"""The reference server as a named Ray actor: one `Host`, reached by frames over TCP, or by actor calls where a firewall
leaves nothing else.

It decides how the actor is made, that clients find it by name, and that a broken one ends its process, so that Ray
starts the next life. What it answers is the machine's. It imports no torch, and ray only to start or serve.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

from tensorhub.errors import BadRequest, Broken, ServerUnavailable
from tensorhub.server import life
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.host import Host
from tensorhub.server.polled import PolledDoors
from tensorhub.server.settings import SECOND_NS
from tensorhub.server.streams import CONNECTIONS_MAX, FLUSH_S
from tensorhub.wire.token import read_token

#: All reference servers of a cluster live here, whatever namespace their clients have.
NAMESPACE = "tensorhub"
#: Each connection polls, hands in and closes; a call beyond it waits in Ray.
CALLS_MAX = 3 * CONNECTIONS_MAX
LEASE_ENV, BEAT_ENV, LOG_LEVEL_ENV = "TENSORHUB_LEASE_S", "TENSORHUB_BEAT_S", "TENSORHUB_LOG_LEVEL"
#: Not 0, and not `exit_actor`: Ray restarts what failed, not what is done.
FAILED = 1

_LOG = logging.getLogger("tensorhub.server")


def start(name: str, environ: Mapping[str, str] = os.environ, node_id: str | None = None) -> Any:
    """The handle of the actor `name`, made if there is none yet, however many ask at once. Blocks; Ray's errors pass.

    `environ` gives the durations a new server is started with, `node_id` where it should live if that node can. In
    every life it wants the token that this process has; Ray keeps it: who may read that may run code there anyway.
    """
    lease_ns, beat_ns = _duration_ns(environ, LEASE_ENV), _duration_ns(environ, BEAT_ENV)
    log_level = environ.get(LOG_LEVEL_ENV, "WARNING").upper()
    token = read_token()

    import ray

    actor = ray.remote(ReferenceServer).options(**options(name, node_id))
    return actor.remote(name, lease_ns, beat_ns, log_level, token)


def find(name: str) -> Any:
    """The handle of the actor `name`, or None while there is none. Blocks; Ray's other errors pass."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:  # what Ray says of a name that nobody bears
        return None


def options(name: str, node_id: str | None) -> dict[str, Any]:
    """How Ray keeps the actor: see the top."""
    chosen: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": CALLS_MAX,
        "num_cpus": 0,
    }
    if node_id is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        chosen["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return chosen


def _duration_ns(environ: Mapping[str, str], name: str) -> int | None:
    """The duration a variable holds, in seconds; None when it is not set."""
    text = environ.get(name)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise BadRequest(f"{name}={text!r} is no duration; write seconds, as in {name}=10")
    return round(seconds * SECOND_NS)


class ReferenceServer:
    """The actor. Ray runs all of it on one event loop, and `__init__` anew in every life."""

    def __init__(
        self, name: str, lease_ns: int | None, beat_ns: int | None, log_level: str = "WARNING", token: bytes = b""
    ) -> None:
        _set_up_logging(log_level)
        machine = life.begin(lease_ns, beat_ns)
        self._epoch = machine.state.epoch
        self._host = Host(machine, token=token)
        self._doors = PolledDoors(self._host)
        #: Where frames are taken; None where nothing can be bound, and clients can only call.
        self._listener = _listen()
        self._address = None if self._listener is None else str(address_of(self._listener))
        self._serving = asyncio.get_running_loop().create_task(self._serve())
        _LOG.info("process %d serves ray://%s at %s", os.getpid(), name, self._address)

    async def where(self) -> tuple[str | None, str, bytes]:
        """(`host:port` for frames or None when nothing listens, this node's host, epoch) of this life."""
        return self._address, _node_host(), self._epoch

    async def open(self, peer: str) -> str:
        """A connection by calls: its id."""
        return self._doors.open(peer)

    async def submit(self, door_id: str, frames: list[bytes]) -> str | None:
        """Calls of a connection, in order; why it is closed, else None."""
        return await self._doors.submit(door_id, frames)

    async def take(self, door_id: str) -> tuple[list[bytes], str | None]:
        """The next answers of a connection, perhaps none yet; and why it is closed once no more will come."""
        return await self._doors.take(door_id)

    async def close(self, door_id: str) -> None:
        """The end of a connection."""
        self._doors.close(door_id)

    async def _serve(self) -> None:
        """This life. However it ends, its process ends with it: a server without a host would answer nobody."""
        try:
            if self._listener is None:
                await self._host.run()
            else:
                await serve_direct(self._listener, self._host)
        except Broken:
            pass  # logged with its story by the host
        except Exception:  # noqa: BLE001 - our fault, and told; the next life is the remedy
            _LOG.exception("the server ends")
        finally:
            await asyncio.sleep(FLUSH_S)  # answers that are out for delivery
            os._exit(FAILED)


def _listen() -> socket.socket | None:
    try:
        return listen(_node_host())
    except ServerUnavailable as error:
        _LOG.warning("clients can only use actor calls: %s", error)
        return None


def _node_host() -> str:
    """By what this node is known to the cluster: the number its raylet is reached by."""
    util: Any = importlib.import_module("ray.util")
    return str(util.get_node_ip_address())


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("tensorhub")
    log.addHandler(handler)
    log.setLevel(level)
