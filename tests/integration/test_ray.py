"""The main job with a reference server that is a Ray actor: made by whoever comes first, killed, replaced, shared."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

import tensorhub
from tensorhub import messages as m
from tensorhub.client.hub import default_job
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.errors import Broken, Unauthorized
from tensorhub.server.ray_actor import options
from tensorhub.types import ModelKey, ReplicaId, Seat
from tests.integration.conftest import blank, same, weights
from tests.support.breakable_actor import BreakableServer
from tests.support.process import child
from tests.support.ray_cluster import PATIENCE_S, RayServer
from tests.support.servers import new_session_id
from tests.support.session_process import SessionProcess

pytestmark = pytest.mark.slow
LEASE_S, BEAT_S = 2.0, 0.2
SEAT = Seat(ModelKey("job", "actor"), ReplicaId("r"), 0)


@pytest.fixture
def server(ray_server: RayServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayServer]:
    """A server whose leases are short; all hubs are closed after the test, before their Ray is left."""
    monkeypatch.setenv("TENSORHUB_LEASE_S", str(LEASE_S))
    monkeypatch.setenv("TENSORHUB_BEAT_S", str(BEAT_S))
    yield ray_server
    tensorhub.shutdown()


def opened(server: RayServer, replica: str, tensors: dict[str, torch.Tensor], **more: object) -> tensorhub.Hub:
    hub = tensorhub.open("actor", replica=replica, server=server.address, timeout=PATIENCE_S, **more)  # type: ignore[arg-type]
    hub.register(tensors)
    return hub


@pytest.mark.parametrize("direct", ["1", "0"], ids=["frames", "calls"])
def test_a_killed_server_is_replaced_between_two_pulls(
    server: RayServer, direct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """server_restart_midtransfer: Ray starts the next life, sessions find it and tell it what they hold."""
    monkeypatch.setenv("TENSORHUB_RAY_DIRECT", direct)
    ours, first, second = weights(1, rows=8), blank(weights(1, rows=8)), blank(weights(1, rows=8))
    trainer, a, b = opened(server, "trainer", ours), opened(server, "a", first), opened(server, "b", second)
    trainer.publish(version=1)
    a.replicate(1, timeout=20)
    server.restart()
    assert b.replicate("latest", timeout=PATIENCE_S).version == 1
    assert a.replicate("latest", timeout=20).already_held
    assert same(first, ours)
    assert same(second, ours)


def test_a_server_made_anew_under_its_name_is_found(server: RayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """server_recreated_same_name: removed for good, then made again by whoever needs it: another actor, empty, which
    wants its maker's token from everybody."""
    monkeypatch.setenv("TENSORHUB_TOKEN", "secret")
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    trainer, rollout = opened(server, "trainer", ours), opened(server, "rollout", theirs)
    trainer.publish(version=1)
    actor, before = server.handle()._actor_id, server.epoch()
    server.remove()
    server.until_another_life(before)  # the sessions that lost it make it anew
    assert rollout.replicate("latest", timeout=PATIENCE_S).version == 1
    assert same(theirs, ours)
    assert server.handle()._actor_id != actor
    stranger = Session(parse_server(server.address), new_session_id(), host="host", pid=os.getpid())
    with pytest.raises(Unauthorized, match="wants a token"):
        asyncio.run(stranger.open(PATIENCE_S))


def held_gil(pipe: Connection, address: str, model: str) -> None:
    """A plain process with weights, that keeps its interpreter from everybody for longer than its lease."""
    hub = tensorhub.open(model, replica="trainer", server=address, timeout=PATIENCE_S)
    hub.register(weights(7, rows=8))
    hub.publish(version=1, digest="now")
    pipe.send((default_job(), hub._member.seat.model.job, hub._member.session.lapses))
    pipe.recv()
    ctypes.PyDLL(None).usleep(int(2 * LEASE_S * 1e6))
    pipe.send(hub._member.session.lapses)
    pipe.recv()
    hub.close()


def test_a_trainer_that_holds_the_gil_keeps_its_lease(server: RayServer) -> None:
    """Its beats go on over TCP without the interpreter, so it is a source meanwhile. That its process joined Ray only
    to find the server makes it no job of Ray's."""
    theirs = blank(weights(7, rows=8))
    with child(held_gil, server.address, "actor") as trainer:
        assert trainer.hear() == ("default", "default", 0)
        rollout = opened(server, "rollout", theirs)
        trainer.tell("hold")
        assert rollout.replicate(1, timeout=20).version == 1
        while not trainer.pipe.poll():
            assert ["trainer" in view.complete for view in rollout.versions()] == [True], "the trainer was forgotten"
        assert trainer.hear() == 0
        trainer.tell("end")
    assert same(theirs, weights(7, rows=8))


def test_six_that_come_at_once_make_one_server(server: RayServer) -> None:
    """concurrent_first_contact, 64_clients_one_host: processes that find no actor make one, and all speak to it."""
    clients = [SessionProcess(server.address, f"replica-{number}") for number in range(6)]
    try:
        assert len({client.report()["epoch"] for client in clients}) == 1
    finally:
        for client in clients:
            client.end()


def other_job(pipe: Connection, address: str) -> None:
    """Another driver of the cluster, with the same names of model and replica, and other weights."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="error")
    ours, theirs = weights(2, rows=8), blank(weights(2, rows=8))
    trainer = tensorhub.open("actor", replica="trainer", server=address, timeout=PATIENCE_S)
    rollout = tensorhub.open("actor", replica="rollout", server=address, timeout=PATIENCE_S)
    trainer.register(ours)
    rollout.register(theirs)
    trainer.publish(version=9)
    got = rollout.replicate("latest", timeout=20)
    pipe.send((default_job(), got.version, same(theirs, ours), [view.version.number for view in trainer.versions()]))
    pipe.recv()


def test_two_jobs_same_cluster(server: RayServer) -> None:
    """two_jobs_same_cluster: two drivers, same names, one server: each sees its own versions only, and a worker is in
    its driver's job."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="error")
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    trainer, rollout = opened(server, "trainer", ours), opened(server, "rollout", theirs)
    with child(other_job, server.address) as other:
        job, version, exact, versions = other.hear()
        assert (version, exact, versions) == (9, True, [9])
        trainer.publish(version=1)
        assert rollout.replicate("latest", timeout=20).version == 1
        assert [view.version.number for view in rollout.versions()] == [1]
        other.tell("end")
    assert same(theirs, ours)
    assert default_job() == f"ray-{ray.get_runtime_context().get_job_id()}" != job
    in_a_worker = ray.remote(num_cpus=0)(default_job).remote()
    assert ray.get(in_a_worker, timeout=PATIENCE_S) == default_job()


def test_a_broken_server_is_replaced(server: RayServer) -> None:
    """Whoever broke the machine hears `Broken`; then the process ends and Ray starts another life."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="error")
    ray.remote(BreakableServer).options(**options(server.name, None)).remote(server.name, None, None)
    before = server.epoch()

    async def break_it() -> None:
        session = Session(parse_server(server.address), new_session_id(), host="host", pid=os.getpid())
        await session.open(PATIENCE_S)
        with pytest.raises(Broken, match="the server broke at"):
            await session.call(m.Abort(SEAT, 1, 1, "break"), 20.0)
        await session.close(1.0)

    asyncio.run(break_it())
    server.until_another_life(before)
