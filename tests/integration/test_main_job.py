"""The main job through the public surface: publish in place, replicate, serve on; over a real local server."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorhub
from tensorhub import AtLeast, Newest
from tensorhub.errors import WaitTimeout
from tests.integration.conftest import Opener, blank, same, until_waiting, weights

ENGINES = ["memory", "local", "tcp"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replicate_brings_every_byte(hub: Opener, engine: str) -> None:
    """address_stability: a replicate that returns means that every tensor equals the published one, in place."""
    ours, theirs = weights(1), blank(weights(1))
    pointers = {name: tensor.data_ptr() for name, tensor in theirs.items()}
    trainer, rollout = hub("trainer", ours, engine=engine), hub("rollout", theirs, engine=engine)
    assert rollout.version is None
    trainer.publish(version=3)
    got = rollout.replicate("latest", timeout=20)
    assert same(ours, theirs)
    assert (got.version, got.verified, got.already_held, got.engine) == (3, True, False, engine)
    assert got.nbytes >= sum(tensor.nbytes for tensor in ours.values())
    assert [use.replica for use in got.sources] == ["trainer"]
    assert set(got.phases) == {"wait", "plan", "drain", "register", "transfer", "verify", "install"}
    assert (trainer.version, rollout.version) == (3, 3)
    assert pointers == {name: tensor.data_ptr() for name, tensor in theirs.items()}


def test_a_version_already_held_returns_at_once(hub: Opener) -> None:
    """Asking again for what is held moves nothing and says so."""
    ours, theirs = weights(1), blank(weights(1))
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=0)
    rollout.replicate(0, timeout=20)
    again = rollout.replicate("latest", timeout=20)
    assert (again.already_held, again.nbytes, again.version) == (True, 0, 0)


def test_a_reader_serves_on_after_the_trainer_has_left(hub: Opener) -> None:
    """A replica that holds a version is a source of it, also when its publisher is gone."""
    ours, first, second = weights(5), blank(weights(5)), blank(weights(5))
    expected = {name: tensor.clone() for name, tensor in ours.items()}
    trainer, a, b = hub("trainer", ours), hub("a", first), hub("b", second)
    trainer.publish(version=1)
    a.replicate(1, timeout=20)
    trainer.unpublish(timeout=20)
    for tensor in ours.values():
        tensor.zero_()
    got = b.replicate(1, timeout=20)
    assert [use.replica for use in got.sources] == ["a"]
    assert same(second, expected)


def test_rounds_reuse_the_same_memory(hub: Opener) -> None:
    """repeat_update_many: train, publish, replicate, unpublish, again and again; every round is exact."""
    ours = weights(0, rows=8)
    readers = [blank(ours) for _ in range(2)]
    trainer = hub("trainer", ours)
    rollouts = [hub(f"rollout-{i}", tensors) for i, tensors in enumerate(readers)]
    for step in range(25):
        for tensor in ours.values():
            tensor.add_(1)
        trainer.publish(version=step)
        for rollout in rollouts:
            assert rollout.replicate(step, timeout=20).version == step
        trainer.unpublish(timeout=20)
        assert all(same(ours, theirs) for theirs in readers)


def test_one_version_per_replica(hub: Opener) -> None:
    """one_version_per_replica: shards that ask around a publish end with the same version."""
    shards = 3
    ours = [weights(i, rows=8) for i in range(shards)]
    theirs = [blank(tensors) for tensors in ours]
    trainers = [hub("trainer", ours[i], shard=i, shards=shards) for i in range(shards)]
    rollouts = [hub("rollout", theirs[i], shard=i, shards=shards) for i in range(shards)]
    trainers[0].publish(version=1)
    with ThreadPoolExecutor(shards) as pool:
        first = pool.submit(rollouts[0].replicate, "latest", timeout=20)
        until_waiting(trainers[0])
        for trainer in trainers[1:]:
            trainer.publish(version=1)
        rest = [pool.submit(rollouts[i].replicate, "latest", timeout=20) for i in range(1, shards)]
        got = [first.result(30), *(future.result(30) for future in rest)]
    assert {replication.version for replication in got} == {1}
    assert all(same(ours[i], theirs[i]) for i in range(shards))


def test_selectors(hub: Opener) -> None:
    """Every selector picks what its words say, among versions held by different replicas."""
    sources = [weights(i, rows=8) for i in range(3)]
    lineage = [hub(f"trainer-{i}", tensors) for i, tensors in enumerate(sources)]
    for i, trainer in enumerate(lineage):
        trainer.publish(version=i * 10)
    theirs = blank(sources[0])
    rollout = hub("rollout", theirs)
    for selector, version in [
        ("latest", 20),
        ("latest-1", 10),
        (0, 0),
        ("10", 10),
        (AtLeast(11), 20),
        (Newest(staleness=1), 20),
    ]:
        assert rollout.replicate(selector, timeout=20).version == version
        assert same(theirs, sources[version // 10])
    assert rollout.wait(AtLeast(15), timeout=5) == 20
    assert [view.version.number for view in rollout.versions()] == [20, 10, 0]
    with pytest.raises(WaitTimeout, match="30"):
        rollout.replicate(AtLeast(30), timeout=0.2)
    assert rollout.version == 20, "a wait that timed out changes nothing"


def test_replicate_waits_for_a_publish(hub: Opener) -> None:
    """A replicate called before its version exists returns once it is published."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollout.replicate, AtLeast(4), timeout=20)
        until_waiting(trainer)
        trainer.publish(version=4)
        assert waiting.result(30).version == 4
    assert same(ours, theirs)


@pytest.mark.parametrize("digest", ["now", "off"])
def test_digest_modes(hub: Opener, digest: str) -> None:
    """`digest="now"` verifies like the default; `digest="off"` says that nothing was verified."""
    ours, theirs = weights(2), blank(weights(2))
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1, digest=digest)
    got = rollout.replicate(timeout=20)
    assert got.verified == (digest == "now")
    assert same(ours, theirs)


def test_modules_and_one_call_forms(hub: Opener, server: str, model: str) -> None:
    """An nn.Module is its state dict; the one-call forms open, register and act, and reuse all of it."""
    ours, theirs = torch.nn.Linear(300, 40), torch.nn.Linear(300, 40)
    one = tensorhub.publish(ours, model=model, version=1, replica="trainer", server=server)
    got = tensorhub.replicate(theirs, model=model, replica="rollout", server=server, timeout=20)
    assert got.version == 1
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    one.unpublish(timeout=20)
    with torch.no_grad():
        ours.weight.mul_(2)
    assert tensorhub.publish(ours, model=model, version=2, replica="trainer", server=server) is one
    assert tensorhub.replicate(theirs, model=model, replica="rollout", server=server, timeout=20).version == 2
    assert torch.equal(ours.weight, theirs.weight)


def test_only_updates_exactly_a_subset(hub: Opener) -> None:
    """subset_selection_exact: the named tensors change, all others provably do not, and nobody is served from it."""
    ours, theirs = weights(3), blank(weights(3))
    before = {name: tensor.clone() for name, tensor in theirs.items()}
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    chosen = ["head.weight", "norm.bias"]
    got = rollout.replicate(1, only=chosen, timeout=20)
    assert got.version == 1
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name] if name in chosen else before[name])
    assert rollout.version is None
    assert not any("rollout" in view.complete for view in trainer.versions())


def test_double_buffering(hub: Opener) -> None:
    """Two buffer sets of one hub hold two versions at the same time."""
    first, second = weights(1, rows=8), weights(2, rows=8)
    trainer = hub("trainer", first)
    trainer.register(second, buffers="b")
    trainer.publish(version=1)
    trainer.publish(version=2, buffers="b")
    theirs = blank(first)
    rollout = hub("rollout", theirs)
    rollout.replicate(1, timeout=20)
    assert same(theirs, first)
    trainer.unpublish(timeout=20)
    rollout.replicate("latest", timeout=20)
    assert same(theirs, second)


def test_status_shows_who_holds_what(hub: Opener) -> None:
    """`status` names sessions, versions and holdings of a model; jobs and models do not mix."""
    ours = weights(1, rows=8)
    trainer = hub("trainer", ours)
    hub("other", weights(1, rows=8), job="elsewhere").publish(version=9)
    trainer.publish(version=1)
    status = trainer.status()
    assert [view.version.number for view in status.versions] == [1]
    assert [(holding.seat.replica, holding.version.number) for holding in status.holdings] == [("trainer", 1)]
    assert any(session.pid == os.getpid() for session in status.sessions)
    assert tensorhub.server_versions(server="local:tests", model=trainer._member.seat.model.name)


def test_threads_and_hubs_end(hub: Opener) -> None:
    """After the last hub of a process is closed, none of our threads is left."""
    tensorhub.shutdown()
    one = hub("trainer", weights(1, rows=8))
    one.publish(version=1)
    one.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("tensorhub")] == []
    with pytest.raises(tensorhub.errors.Closed):
        one.publish(version=2)
