"""verl's own manager and a back end: after each step every replica holds what the trainer had, bit for bit.

The promises of verl's test_correctness_on_gpu.py and test_global_steps_on_cpu.py (tests/checkpoint_engine), with real
trainer ranks, and exactly instead of nearly.
"""

from __future__ import annotations

import ray
import torch

from bench.verl.rig import MODULES, Rig, held

STEPS = 3


def test_every_step_arrives_bit_for_bit(either: Rig) -> None:
    """After each of several steps every replica holds the step's number and each tensor's very bytes."""
    manager = either.manager()
    seen = set()
    for _ in range(STEPS):
        step = either.train()
        manager.update_weights(step)
        expected = either.sums()
        for got in held(either.replicas):
            assert got.global_steps == step
            assert got.sums == expected
        seen.add(tuple(expected.values()))
    assert len(seen) == STEPS, "the weights did not change between steps: equal bytes would prove nothing"


def test_floats_are_cast_where_asked(hub: Rig) -> None:
    """`dtype=bfloat16` halves what is moved: each tensor is the trainer's, rounded as torch rounds."""
    hub.use("tensorhub", {"dtype": "bfloat16", "model": "rounded"})
    metrics = hub.manager().update_weights(hub.train())
    expected = hub.sums("bfloat16")
    assert {dtype for dtype, _, _ in expected.values()} == {"torch.bfloat16"}
    assert [got.sums for got in held(hub.replicas)] == [expected] * len(hub.replicas)
    assert sum(published(metrics)) == sum(2 * numel(shape) for _, shape, _ in expected.values())


def test_the_trainers_ranks_share_the_work(hub: Rig) -> None:
    """Metrics have keys of each rank's own, so verl's merging loses none; together the ranks move each byte once."""
    step = hub.train()
    metrics = hub.manager().update_weights(step)
    assert metrics["tensorhub/version"] == step
    parts = published(metrics)
    assert all(parts)
    assert sum(parts) == sum(4 * numel(shape) for _, shape, _ in hub.sums().values())


def test_a_step_without_a_number(either: Rig) -> None:
    """verl may give no `global_steps`: weights arrive all the same, and the next numbered step after them, too."""
    manager = either.manager()
    either.train()
    manager.update_weights()
    assert [got.sums for got in held(either.replicas)] == [either.sums()] * 2
    assert [got.global_steps for got in held(either.replicas)] == [None] * 2
    manager.update_weights(either.train())
    assert [got.sums for got in held(either.replicas)] == [either.sums()] * 2


def test_a_step_number_that_comes_again(either: Rig) -> None:
    """A number given twice, with other weights the second time, brings the second weights; a smaller one as well."""
    manager = either.manager()
    step = either.train()
    for number in (step, step, step - 1):
        either.train()
        manager.update_weights(number)
        expected = either.sums()
        assert [(got.global_steps, got.sums) for got in held(either.replicas)] == [(number, expected)] * 2


def test_generation_stands_still_while_weights_change(either: Rig) -> None:
    """Servers are stopped, empty their caches, and go on, in that order, and stand still in between: the promise of
    verl's test_special_server_adapter.py as far as a manager keeps it."""
    servers = [server for replica in either.replicas for server in replica.servers]
    ray.get([server.seen.remote() for server in servers])
    either.manager().update_weights(either.train())
    calls = ["abort", "release_kv_cache", "resume_kv_cache", "resume"]
    assert ray.get([server.seen.remote() for server in servers]) == [(True, calls)] * 2


def test_replicas_come_and_go(either: Rig) -> None:
    """One that is added has the next step's bytes like all others; one that is removed keeps what it had."""
    manager = either.manager()
    manager.update_weights(either.train())
    (late,) = either.grow(1)
    manager.add_replicas([late])
    manager.update_weights(either.train())
    with_late = either.sums()
    assert [got.sums for got in held(either.replicas)] == [with_late] * 3
    manager.remove_replicas([late])
    manager.update_weights(either.train())
    without = either.sums()
    assert [got.sums for got in held(either.replicas)] == [without, without, with_late]


def test_a_model_of_many_megabytes(large: Rig) -> None:
    """More than 300 MB of weights: every byte arrives, step after step, on either back end."""
    for backend in MODULES:
        large.use(backend)
        manager = large.manager()
        for _ in range(2):
            ray.get(large.trainer.compute(0.0))
            step = next(large.steps)
            manager.update_weights(step)
            expected = large.sums()
            assert sum(4 * numel(shape) for _, shape, _ in expected.values()) >= 300e6
            assert [(got.global_steps, got.sums) for got in held(large.replicas)] == [(step, expected)] * 2


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def published(metrics: dict[str, int]) -> list[int]:
    """Bytes that each of the trainer's ranks published."""
    return [metrics[f"tensorhub/rank{rank}/bytes"] for rank in range(2)]
