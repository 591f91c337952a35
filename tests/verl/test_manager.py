"""`TensorHubCheckpointManager`: the trainer waits for no replica, and no replica for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from bench.verl.rig import Rig, held, kill, workers

#: A hang guard.
SOON_SECONDS = 60.0


@pytest.fixture
def manager(hub: Rig) -> Iterator[Any]:
    """Of all replicas, which hold a first version."""
    from tensorhub.integrations.verl import TensorHubCheckpointManager

    found = hub.manager(manager=TensorHubCheckpointManager)
    found.update_weights(hub.train())
    yield found
    found.remove_replicas(list(found.replicas))


def test_the_first_version_is_everywhere_when_it_returns(hub: Rig, manager: Any) -> None:
    """Rollouts begin with dummy weights: the first update returns when every replica holds it and generates."""
    expected = hub.sums()
    assert [got.sums for got in held(hub.replicas)] == [expected] * 2
    seen = ray.get([server.seen.remote() for replica in hub.replicas for server in replica.servers])
    assert [generating for generating, _ in seen] == [True, True]


def test_the_trainer_waits_for_nobody(hub: Rig, manager: Any) -> None:
    """While one replica stands still in the middle of loading, steps go on, and reach the other; when it moves again it
    comes to the newest at once, bit for bit."""
    slow, quick = hub.replicas
    workers([slow]).hold(3)
    step = hub.train()
    manager.update_weights(step)
    ray.get(slow.workers[0].wait_holding.remote(), timeout=SOON_SECONDS)
    for _ in range(3):
        step = hub.train()
        manager.update_weights(step)
        ray.get(quick.workers[0].wait_step.remote(step), timeout=SOON_SECONDS)
    expected = hub.sums()
    assert [got.sums for got in held([quick])] == [expected]
    workers([slow]).move()
    ray.get(slow.workers[0].wait_step.remote(step), timeout=SOON_SECONDS)
    assert [(got.global_steps, got.sums) for got in held([slow])] == [(step, expected)]


def test_a_late_replica_needs_no_step(hub: Rig, manager: Any) -> None:
    """One that is added comes to the newest version at once, though the trainer publishes nothing more."""
    step = hub.train()
    manager.update_weights(step)
    (late,) = hub.grow(1)
    manager.add_replicas([late])
    ray.get(late.workers[0].wait_step.remote(step), timeout=SOON_SECONDS)
    assert [got.sums for got in held([late])] == [hub.sums()]


def test_a_replica_that_dies_costs_nobody(hub: Rig, manager: Any) -> None:
    """reader_killed: one dies while it loads. No update fails, the others have every step, and it is left out."""
    (victim,) = hub.grow(1)
    manager.add_replicas([victim])
    step = hub.train()
    manager.update_weights(step)
    ray.get(victim.workers[0].wait_step.remote(step), timeout=SOON_SECONDS)
    workers([victim]).hold(3)
    manager.update_weights(hub.train())
    ray.get(victim.workers[0].wait_holding.remote(), timeout=SOON_SECONDS)
    kill(victim.workers[0])
    step = hub.train()
    manager.update_weights(step)
    others = hub.replicas[:2]
    ray.get([other.workers[0].wait_step.remote(step) for other in others], timeout=SOON_SECONDS)
    assert [got.sums for got in held(others)] == [hub.sums()] * 2
