"""This process's one connection to Ray, and the only place of the client that calls it: with deadlines, off the loop.

It decides when the process joins a cluster (none is joined by it yet, and a `ray://` server was named) and how Ray's
errors are told. It never starts a cluster and never leaves one: a Ray that the user started is the user's, and one that
was joined here stays joined until the process ends, since others may have come to use it.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tensorhub.errors import ServerUnavailable, TensorHubError

T = TypeVar("T")

#: What to do when there is no cluster, or one that lets nobody in without its token: Ray then hangs rather than fails.
_HOW = (
    "start Ray here ('ray start --head', or with --address to join a cluster), set RAY_ADDRESS, or call ray.init(); "
    "if the cluster wants Ray's own token (~/.ray/auth_token, RAY_AUTH_TOKEN), set RAY_AUTH_MODE=token"
)

_INSTALL = "install it by: pip install '.[ray]' in a checkout of TensorHub"


class _Joining:
    """Joining a cluster, tried by one thread at a time for the whole process: Ray cannot be interrupted, nor asked
    twice at once."""

    def __init__(self) -> None:
        #: Guards the attempt, for event loops of several threads; held for moments only.
        self._lock = threading.Lock()
        self._attempt: Future[None] | None = None
        #: Ray's id of this process as we joined it, or None. Another one means that the user has joined since.
        self._joined_as: str | None = None

    def is_ours(self, ray: Any) -> bool:
        """Whether the connection there is was made for us, or is being made."""
        if self._attempt is not None and not self._attempt.done():
            return True
        return self._joined_as is not None and ray.get_runtime_context().get_worker_id() == self._joined_as

    def attempt(self, ray: Any) -> Future[None]:
        """The attempt that runs, or a new one."""
        with self._lock:
            if self._attempt is None or self._attempt.done():
                self._attempt = _in_thread(lambda: self._join(ray))
            return self._attempt

    def _join(self, ray: Any) -> None:
        if not ray.is_initialized():
            # Errors only: this process is no driver in its user's eyes.
            ray.init(address="auto", namespace="tensorhub", log_to_driver=False, logging_level="error")
            self._joined_as = ray.get_runtime_context().get_worker_id()


_joining = _Joining()


def check_installed() -> None:
    """`ServerUnavailable` where there is no Ray to import: waiting would not bring it. Imports nothing."""
    if sys.modules.get("ray") is None and importlib.util.find_spec("ray") is None:
        raise ServerUnavailable(f"Ray is not installed; {_INSTALL}")


def job_id() -> str | None:
    """The Ray job whose driver or worker this process is; None when it is none, or joined a cluster only for us."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or _joining.is_ours(ray):
        return None
    return str(ray.get_runtime_context().get_job_id())


async def joined(timeout_s: float) -> Any:
    """The module `ray`, connected to a cluster: the user's, else the one found by `address="auto"`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    ray: Any = await blocking(_import_ray, timeout_s, "importing Ray")
    if not ray.is_initialized():
        await _outcome(_joining.attempt(ray), max(0.0, deadline_s - loop.time()), "joining a Ray cluster", _HOW)
    return ray


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise ServerUnavailable(f"Ray cannot be imported ({error}); {_INSTALL}") from error
    _close_hubs_before_ray()
    return ray


@functools.cache
def _close_hubs_before_ray() -> None:
    """What was registered last runs first when the interpreter ends: hubs say goodbye while Ray is still there."""
    atexit.register(importlib.import_module("tensorhub.client.runtime").shutdown)


class Handle:
    """An actor's handle that is used only while its Ray is connected: a call would start another Ray otherwise."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        if not self._ray.is_initialized():
            raise ServerUnavailable("this process has left its Ray cluster")
        return getattr(self._actor, method)


async def blocking(work: Callable[[], T], timeout_s: float, doing: str) -> T:
    """The result of a call into Ray that blocks, or the error of ours that it raises; after `timeout_s` it is left to
    end by itself, in a daemon thread."""
    return await _outcome(_in_thread(work), timeout_s, doing, passed=(TensorHubError,))


async def called(method: Any, *arguments: object, timeout_s: float, doing: str) -> Any:
    """The result of an actor's method. An error of ours that it raised there says nothing about this caller."""
    try:
        future = _kept(method.remote(*arguments).future())
    except Exception as error:  # whatever the library raises: this is its port
        raise _told(error, doing) from error
    return await _outcome(future, timeout_s, doing)


def _kept(theirs: Future[Any]) -> Future[Any]:
    """A future with that one's outcome, which cannot be cancelled: Ray Client stumbles over a future that was."""
    ours: Future[Any] = Future()
    ours.set_running_or_notify_cancel()

    def hand_on(done: Future[Any]) -> None:
        if done.cancelled():
            ours.set_exception(RuntimeError("Ray cancelled it"))
        elif (error := done.exception()) is not None:
            ours.set_exception(error)
        else:
            ours.set_result(done.result())

    theirs.add_done_callback(hand_on)
    return ours


async def _outcome(
    future: Future[T], timeout_s: float, doing: str, advice: str = "", passed: tuple[type[Exception], ...] = ()
) -> T:
    after = f"; {advice}" if advice else ""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise ServerUnavailable(f"{doing} took longer than {timeout_s:.3g} s{after}") from error
    except passed:
        raise
    except Exception as error:
        raise _told(error, doing, after) from error


def _told(error: Exception, doing: str, after: str = "") -> ServerUnavailable:
    """Ray raises a zoo: RayError, ConnectionError, RuntimeError, ValueError. The first line says enough, of the cause
    where Ray tells it: the error of a method is a traceback otherwise."""
    lines = str(getattr(error, "cause", None) or error).strip().splitlines() or [""]
    return ServerUnavailable(f"{doing} failed: {type(error).__name__}: {lines[0]}{after}")


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Not a pool's thread: those are waited for when the interpreter ends, and Ray may hang for minutes."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled, only not waited for

    def main() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - all of it is whoever waits to know
            future.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - Ray exits this thread when it is told to end
            future.set_exception(RuntimeError(f"ended by {error!r}"))

    threading.Thread(target=main, name="tensorhub-ray", daemon=True).start()
    return future
