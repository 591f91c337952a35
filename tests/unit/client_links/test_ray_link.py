"""What the Ray link says of addresses, of a Ray that is missing, and of calls that fail or do not end; without Ray."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub import messages as m
from tensorhub.client import ray_calls, ray_runtime
from tensorhub.client.hub import default_job
from tensorhub.client.ray_calls import CallsConnection
from tensorhub.client.ray_link import ray_link
from tensorhub.errors import BadRequest, NoServer, ServerUnavailable
from tensorhub.messages import Call
from tensorhub.server.ray_actor import ReferenceServer, options, start


def outcome(work: Callable[[], Awaitable[object]]) -> object:
    async def main() -> object:
        return await work()

    return asyncio.run(main())


@pytest.mark.parametrize("name", ["tensorhub", "a", "A-b_c.9", "x" * 128])
def test_names_of_actors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray://NAME` joins no cluster when it is parsed; the link says what was written."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert ray_link(f"ray://{name}").address == f"ray://{name}"


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", ".a", "x" * 129, "ü", "a\n"])
def test_other_names_are_refused(name: str) -> None:
    """What Ray, a log line or a reader could take for something else is no name."""
    with pytest.raises(BadRequest, match="a name has"):
        ray_link(f"ray://{name}")


@pytest.mark.parametrize("address", ["ray://head:10001", "ray://10.0.0.1:10001", "ray://[::1]:10001"])
def test_ray_client_addresses_are_explained(address: str) -> None:
    """The same scheme means a host and port elsewhere in Ray: refused, with what to write instead."""
    with pytest.raises(BadRequest, match=r"Ray Client.*ray://NAME.*ray\.init"):
        ray_link(address)


def test_missing_ray_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray the error says what to install, before anything is waited for; a wrong address is told first."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ServerUnavailable, match=r"pip install '\.\[ray\]'"):
        ray_link("ray://tensorhub")
    with pytest.raises(BadRequest):
        ray_link("ray://head:10001")


def test_looking_makes_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that may start nothing asks for the name and says that nobody bears it."""
    asked: list[tuple[str, str]] = []

    def get_actor(name: str, namespace: str) -> object:
        asked.append((name, namespace))
        raise ValueError("Failed to look up actor")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, get_actor=get_actor))
    with pytest.raises(NoServer, match="no actor 'typo' in namespace 'tensorhub'"):
        outcome(lambda: ray_link("ray://typo", may_start=False).connect(5.0))
    assert asked == [("typo", "tensorhub")]


def test_no_cluster_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no cluster is found, the error keeps Ray's first line and says how to start, name or enter one."""

    def init(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore\nlines")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    monkeypatch.setattr(ray_runtime, "_joining", ray_runtime._Joining())
    told = r"Could not find any running Ray instance\.; start Ray here .*RAY_ADDRESS.*RAY_AUTH_MODE=token"
    with pytest.raises(ServerUnavailable, match=told):
        outcome(lambda: ray_link("ray://tensorhub").connect(5.0))


def test_a_cluster_that_does_not_answer_is_joined_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining has the caller's deadline, whatever Ray's is; who comes again waits for the attempt that runs."""
    release, attempts = threading.Event(), []

    def init(**options: object) -> None:
        attempts.append(options)
        release.wait(30.0)

    fake = SimpleNamespace(is_initialized=lambda: False, init=init)
    fake.get_runtime_context = lambda: SimpleNamespace(get_worker_id=lambda: "w")
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ray_runtime, "_joining", ray_runtime._Joining())
    joinings = 0
    while joinings < 3:
        with pytest.raises(ServerUnavailable, match=r"Ray( cluster)? took longer than") as told:
            outcome(lambda: ray_link("ray://tensorhub").connect(0.03))
        joinings += "joining" in str(told.value)  # on a busy machine, finding the module may take as long
    release.set()
    assert len(attempts) == 1
    assert attempts[0]["address"] == "auto"


def test_a_cluster_joined_for_us_is_no_job_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that joined only to reach its server stays in the job it had before; a user's own driver has Ray's."""
    monkeypatch.delenv("TENSORHUB_JOB", raising=False)
    joining = ray_runtime._Joining()
    monkeypatch.setattr(ray_runtime, "_joining", joining)
    context = SimpleNamespace(get_worker_id=lambda: "w", get_job_id=lambda: "0100")
    fake = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", fake)
    assert default_job() == "ray-0100"
    fake.is_initialized = lambda: False
    fake.init = lambda **options: None
    outcome(lambda: ray_runtime.joined(5.0))
    fake.is_initialized = lambda: True
    assert default_job() == "default"
    context.get_worker_id = lambda: "of a later ray.init()"
    assert default_job() == "ray-0100"


class Actor:
    """A handle whose methods end as told: with a value, an error, or never."""

    def __init__(self, **outcomes: Any) -> None:
        for name, told in outcomes.items():
            setattr(self, name, SimpleNamespace(remote=lambda *arguments, told=told: self._ref(told)))

    def _ref(self, told: Any) -> Any:
        future: Future[Any] = Future()
        if isinstance(told, Exception):
            future.set_exception(told)
        elif told is not ...:
            future.set_result(told)
        return SimpleNamespace(future=lambda: future)


def test_lost_actor_ends_a_connection() -> None:
    """Whatever Ray raises becomes `ServerUnavailable` at `receive` and `send`, with what was being done."""

    async def main() -> None:
        actor = Actor(open="door", take=RuntimeError("The actor died.\nThe rest."), submit=None, close=None)
        connection = await CallsConnection.open(actor, "peer", "ray://x", 5.0)
        with pytest.raises(ServerUnavailable, match=r"take of ray://x failed: RuntimeError: The actor died\.$"):
            await connection.receive()
        with pytest.raises(ServerUnavailable):
            await connection.send(Call(1, m.List(None)))
        await connection.close()

    asyncio.run(main())


def test_an_actor_that_takes_nothing_holds_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """`send` waits while the actor's inbox is full, and ends with the deadline of the call that hands in."""
    monkeypatch.setattr(ray_calls, "SUBMIT_S", 0.05)
    monkeypatch.setattr(ray_calls, "CALLS_WAITING_MAX", 4)

    async def main() -> None:
        actor = Actor(open="door", take=..., submit=..., close=None)
        connection = await CallsConnection.open(actor, "peer", "ray://x", 5.0)

        async def send_many() -> None:
            for call_id in range(1, 100):
                await connection.send(Call(call_id, m.List(None)))

        with pytest.raises(ServerUnavailable, match=r"submit of ray://x took longer than 0\.05 s"):
            await send_many()
        await connection.close()

    asyncio.run(main())


def test_a_handle_is_dead_without_its_ray() -> None:
    """Once the process has left its cluster, a method is not called: Ray would join, or start, another for it."""
    ray = SimpleNamespace(is_initialized=lambda: True)
    handle = ray_runtime.Handle(ray, SimpleNamespace(take="the method"))
    assert handle.take == "the method"
    ray.is_initialized = lambda: False
    with pytest.raises(ServerUnavailable, match="has left its Ray cluster"):
        _ = handle.take


def test_a_call_given_up_is_not_cancelled() -> None:
    """Ray's own future is left alone when its caller's deadline passes: Ray sets its outcome all the same."""
    theirs: Future[Any] = Future()

    async def main() -> None:
        method = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: theirs))
        with pytest.raises(ServerUnavailable, match=r"asking took longer than 0\.01 s"):
            await ray_runtime.called(method, timeout_s=0.01, doing="asking")

    asyncio.run(main())
    assert not theirs.cancelled()
    theirs.set_result("late")


def test_actor_options() -> None:
    """The actor outlives its maker and its own death, takes no CPU from anybody, and is found by name."""
    told = options("tensorhub", None)
    assert told["lifetime"] == "detached"
    assert told["max_restarts"] == -1
    assert (told["name"], told["namespace"], told["num_cpus"]) == ("tensorhub", "tensorhub", 0)
    assert told["get_if_exists"] is True
    assert ReferenceServer.__module__ == "tensorhub.server.ray_actor", "workers import it by this name"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_settings_that_make_no_sense_are_refused(text: str) -> None:
    """A server is not started with a duration that is none: its first client hears which variable it is."""
    with pytest.raises(BadRequest, match=f"TENSORHUB_LEASE_S='{text}' is no duration"):
        start("tensorhub", {"TENSORHUB_LEASE_S": text})
