"""verl's own manager while somebody dies in the middle of a sync: an error that says so, soon, and the rest goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.exceptions import RayError

from bench.verl.rig import Rig, held, kill, workers

#: Hang guards: far above what anything here takes, far below the timeouts of verl and Ray.
SOON_SECONDS = 60.0


def test_a_replica_killed_in_the_middle(either: Rig) -> None:
    """reader_killed: the sync fails and names the dead actor; without it the next reaches all others bit for bit."""
    (victim,) = either.grow(1)
    manager = either.manager()
    manager.update_weights(either.train())
    workers([victim]).hold(3)
    step = either.train()
    with ThreadPoolExecutor(1) as pool:
        sync = pool.submit(manager.update_weights, step)
        ray.get(victim.workers[0].wait_holding.remote(), timeout=SOON_SECONDS)
        kill(victim.workers[0])
        with pytest.raises(RayError, match=r"(?i)actor.*(died|dead)"):
            sync.result(SOON_SECONDS)
    manager.remove_replicas([victim])
    manager.update_weights(either.train())
    assert [got.sums for got in held(either.replicas[:2])] == [either.sums()] * 2


def test_a_trainer_rank_killed_while_it_publishes(doomed: Rig) -> None:
    """missing_shard_refused: a rank dies half way through its part: the sync fails by naming the dead actor, and no
    replica is given anything of the step."""
    doomed.use("tensorhub")
    manager = doomed.manager()
    manager.update_weights(doomed.train())
    before = doomed.sums()
    step = doomed.train()
    victim = doomed.trainer.workers[1]
    ray.get(victim.hold.remote(5), timeout=SOON_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        sync = pool.submit(manager.update_weights, step)
        assert ray.get(victim.wait_holding.remote(), timeout=SOON_SECONDS)
        kill(victim)
        with pytest.raises(RayError, match=r"(?i)actor.*(died|dead)|connection"):
            sync.result(SOON_SECONDS)
    assert [(got.global_steps, got.sums) for got in held(doomed.replicas)] == [(step - 1, before)]
