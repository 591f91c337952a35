"""Ranks that publish copies of their parts, and mirrors that hold all of it: over a real local server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tensorhub
from tensorhub import Staging
from tensorhub.errors import BadRequest, Busy, Closed, LayoutMismatch, SeatTaken, Unavailable, VersionOrder, WaitTimeout
from tests.integration.conftest import Mirrors, Opener, Ranks, same, until_waiting, weights
from tests.support.engines import Gate, Meddler, meddled


def publish(ranks: list[Staging], version: int, tensors: dict[str, torch.Tensor]) -> list[tensorhub.Staged]:
    return [rank.publish(version, iter(tensors.items())) for rank in ranks]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_mirror_holds_what_all_ranks_published(ranks: Ranks, mirror: Mirrors, shards: int) -> None:
    """Each rank keeps a part, the parts are the whole, and the mirror learns names, shapes and dtypes from them."""
    trainer, rollout = ranks(shards), mirror()
    for version in range(3):
        ours = weights(version)
        staged = publish(trainer, version, ours)
        got = rollout.pull(timeout=20)
        assert same(rollout.tensors, ours)
        assert (got.version, rollout.version) == (version, version)
        assert sum(part.tensors for part in staged) == len(ours)
        assert sum(part.nbytes for part in staged) == sum(tensor.nbytes for tensor in ours.values())
        assert {use.shard for use in got.sources} == set(range(shards))


def test_tensors_stay_where_they_are(ranks: Ranks, mirror: Mirrors) -> None:
    """address_stability: versions of one layout are written in place, on both sides."""
    trainer, rollout = ranks(1, sets=1), mirror()
    pointers = []
    for version in range(3):
        publish(trainer, version, weights(version))
        rollout.pull(timeout=20)
        pointers.append({name: tensor.data_ptr() for name, tensor in rollout.tensors.items()})
    assert pointers[0] == pointers[1] == pointers[2]


def test_a_mirror_serves_the_next(ranks: Ranks, mirror: Mirrors) -> None:
    """Whoever comes later reads from mirrors; the trainer may be gone by then."""
    trainer, first, second = ranks(2), mirror("first"), mirror("second")
    ours = weights(1)
    publish(trainer, 1, ours)
    first.pull(1, timeout=20)
    for rank in trainer:
        rank.close()
    got = second.pull("latest", timeout=20)
    assert {use.replica for use in got.sources} == {"first"}
    assert same(second.tensors, ours)


def test_a_mirror_that_came_first_waits_for_a_version(ranks: Ranks, mirror: Mirrors) -> None:
    """It needs no layout, no count of ranks and no publisher to begin; its deadline is its own."""
    rollout = mirror()
    with pytest.raises(WaitTimeout):
        rollout.pull(timeout=0.05)
    trainer = ranks(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollout.pull, 4, timeout=20)
        publish(trainer, 4, weights(4))
        assert waiting.result(30).version == 4
    assert same(rollout.tensors, weights(4))


def test_other_tensors_are_made_for_another_layout(ranks: Ranks, mirror: Mirrors) -> None:
    """alias_changes_between_versions: names, shapes and dtypes may change from version to version, and back."""
    trainer, rollout = ranks(2), mirror()
    more = {**weights(2), "added.weight": torch.randn(100, 100), "step": torch.tensor([1.0, 2.0])}
    for version, ours in enumerate([weights(1), more, {"only": torch.arange(7)}, weights(1)]):
        publish(trainer, version, ours)
        rollout.pull(version, timeout=20)
        assert same(rollout.tensors, ours)


def test_a_trainer_of_other_ranks_goes_on(ranks: Ranks, mirror: Mirrors) -> None:
    """A trainer that comes back with more ranks opens a lineage; mirrors follow it to its shards, and back again."""
    rollout, other = mirror(), mirror("other")
    for life, shards in enumerate([2, 3, 1]):
        trainer = ranks(shards, replica=f"trainer-{life}", lineage=f"life-{life}")
        publish(trainer, 5, weights(life))
        for one in (rollout, other):
            assert one.pull(5, timeout=20).version == 5
            assert same(one.tensors, weights(life))
        for rank in trainer:
            rank.close()


def test_parts_are_balanced_and_disjoint(ranks: Ranks) -> None:
    """missing_shard_refused: every tensor has one owner; owners have about as much as each other."""
    trainer = ranks(4)
    ours = {f"layer{i}": torch.zeros(100 + i) for i in range(100)}
    staged = publish(trainer, 1, ours)
    assert sum(part.tensors for part in staged) == 100
    sizes = [part.nbytes for part in staged]
    assert max(sizes) - min(sizes) <= 4 * 200


def test_a_wire_dtype_is_cast_to_and_spares_what_is_named(ranks: Ranks, mirror: Mirrors) -> None:
    """No cast unasked; asked for, floating-point tensors are cast, except those that match a pattern."""
    trainer = ranks(2, dtype=torch.bfloat16, keep_dtype=["*.router.*"])
    ours = {
        "a": torch.randn(50, 50),
        "x.router.weight": torch.randn(9),
        "ids": torch.arange(4),
        "h": torch.ones(3).half(),
    }
    publish(trainer, 1, ours)
    rollout = mirror()
    rollout.pull(timeout=20)
    cast = {name: ours[name].to(torch.bfloat16) for name in ("a", "h")}
    assert same(rollout.tensors, {**ours, **cast})


def test_the_last_version_stays_while_the_next_is_copied(ranks: Ranks, mirror: Mirrors) -> None:
    """With two sets a version is readable until the turn of its memory comes again: the other is written meanwhile."""
    trainer, rollout = ranks(1, sets=2), mirror()
    for version in (1, 2):
        publish(trainer, version, weights(version))
    rollout.pull(1, timeout=20)
    assert same(rollout.tensors, weights(1))
    publish(trainer, 3, weights(3))
    rollout.pull(2, timeout=20)
    assert same(rollout.tensors, weights(2))


def test_a_stream_that_fails_publishes_nothing(ranks: Ranks, mirror: Mirrors) -> None:
    """no_advance_on_failure: the version before it stays, and the next publish works."""
    (rank,) = ranks(1)
    rank.publish(1, iter(weights(1).items()))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", torch.zeros(2, 2)
        raise RuntimeError("the gather failed")

    with pytest.raises(RuntimeError, match="the gather failed"):
        rank.publish(2, broken())
    with pytest.raises(BadRequest, match="'w' twice"):
        rank.publish(2, iter([("w", torch.zeros(1)), ("w", torch.zeros(1))]))
    rollout = mirror()
    assert rollout.pull(timeout=20).version == 1
    rank.publish(2, iter(weights(2).items()))
    assert rollout.pull(timeout=20).version == 2
    assert same(rollout.tensors, weights(2))
    with pytest.raises(VersionOrder):
        rank.publish(2, iter(weights(2).items()))


def test_readers_that_stay_are_abandoned_not_waited_for(
    ranks: Ranks, mirror: Mirrors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reader_fetched_before_unpublish: a reader that holds the drain for longer than allowed fails untorn; the trainer
    goes on, says so, and the next pull has the new version."""
    gate = Gate()
    with meddled(monkeypatch, lambda inner: Meddler(inner, before=gate.pass_through)), ThreadPoolExecutor(1) as pool:
        (rank,) = ranks(1, sets=1, drain_s=0.05)
        assert not rank.publish(1, iter(weights(1).items())).abandoned
        rollout = mirror()
        reading = pool.submit(rollout.pull, 1, timeout=1.0)
        assert gate.arrived.wait(20)
        assert rank.publish(2, iter(weights(2).items())).abandoned
        gate.open()
        assert isinstance(reading.exception(30), Unavailable)
        assert rollout.version is None
        assert rollout.pull(timeout=20).version == 2
        assert same(rollout.tensors, weights(2))


def test_shards_that_share_names_make_no_mirror(hub: Opener, mirror: Mirrors) -> None:
    """Tensor-parallel shards hold parts of tensors under the same names: refused by name, not mixed. What
    was refused is neither held nor served on."""
    for shard in range(2):
        hub("trainer", {"w": torch.ones(8), f"own{shard}": torch.ones(1)}, shard=shard, shards=2).publish(version=1)
    rollout = mirror()
    for _ in range(2):
        with pytest.raises(LayoutMismatch, match=r"\['w'\] are in several shards"):
            rollout.pull(timeout=20)
        assert (rollout.version, rollout.tensors) == (None, {})


def test_a_mirror_that_cannot_take_all_its_seats_takes_none(ranks: Ranks, mirror: Mirrors, hub: Opener) -> None:
    """register_failure_is_fatal: a seat that another process holds is told, and holds back no pull that comes after."""
    trainer, rollout = ranks(2), mirror("rollout")
    publish(trainer, 1, weights(1))
    with hub("rollout", shard=1, shards=2), pytest.raises(SeatTaken):
        rollout.pull(timeout=20)
    assert rollout.tensors == {}
    assert rollout.pull(timeout=20).version == 1
    assert same(rollout.tensors, weights(1))


def test_one_pull_at_a_time_and_none_after_the_end(ranks: Ranks, mirror: Mirrors, hub: Opener) -> None:
    """double_replicate: a second pull meanwhile is refused by name; so is one of a mirror that is closed."""
    rollout = mirror()
    publish(ranks(1), 1, weights(1))
    rollout.pull(timeout=20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollout.pull, 2, timeout=2)
        until_waiting(hub("observer"))
        with pytest.raises(Busy):
            rollout.pull(1, timeout=1)
        assert isinstance(waiting.exception(30), WaitTimeout)
    rollout.close()
    with pytest.raises(Closed):
        rollout.pull(timeout=1)


def test_a_pull_of_what_does_not_come_changes_nothing(ranks: Ranks, mirror: Mirrors) -> None:
    """no_advance_on_failure: a mirror that waited in vain holds, and serves, what it held."""
    trainer, rollout = ranks(2), mirror()
    publish(trainer, 1, weights(1))
    rollout.pull(timeout=20)
    for rank in trainer:
        rank.close()
    with pytest.raises(WaitTimeout):
        rollout.pull(9, timeout=0.1)
    assert rollout.version == 1
    other = mirror("other")
    assert other.pull(timeout=20).version == 1
    assert same(other.tensors, weights(1))


def test_rows_of_several_ranks_are_whole_in_a_mirror(ranks: Ranks, mirror: Mirrors, hub: Opener) -> None:
    """Shards that publish rows under names that say which: the mirror has the whole tensor, written in place by every
    pull; rows that nobody has are refused by name."""
    rollout = mirror()
    where = []
    for version in (1, 2):
        whole, plain = torch.randn(700, 50), torch.randn(9)
        first = hub("trainer", {"w[0:300/700]": whole[:300].clone(), "n[0:2/3]": torch.ones(2)}, shard=0, shards=2)
        second = hub("trainer", {"w[300:700/700]": whole[300:].clone(), "n[2:3/3]": torch.zeros(1), "b": plain},
                     shard=1, shards=2)  # fmt: skip
        first.publish(version=version)
        second.publish(version=version)
        rollout.pull(version, timeout=20)
        assert same(rollout.tensors, {"w": whole, "n": torch.tensor([1.0, 1.0, 0.0]), "b": plain})
        where.append(rollout.tensors["w"].data_ptr())
        first.close()
        second.close()
    assert where[0] == where[1]
    hub("short", {"w[0:300/700]": torch.ones(300, 50)}, lineage="short").publish(version=3)
    with pytest.raises(LayoutMismatch, match="rows 300 to 700 of 'w'"):
        rollout.pull(3, timeout=20)


def rows_of(hub: Opener, version: int, *parts: dict[str, torch.Tensor]) -> list[tensorhub.Hub]:
    """The shards of a trainer of this version alone, published."""
    shards = [
        hub(f"trainer-{version}", part, shard=shard, shards=len(parts), lineage=f"line-{version}")
        for shard, part in enumerate(parts)
    ]
    for shard in shards:
        shard.publish(version=version)
    return shards


NO_WHOLES = {
    "dtype": ({"w[0:4/8]": torch.ones(4, 9)}, {"w[4:8/8]": torch.ones(4, 9).half()}, r"'w' are torch\.float16 .* and"),
    "shape": ({"w[0:4/8]": torch.ones(4, 9)}, {"w[4:8/8]": torch.ones(4, 3)}, r"'w' are torch\.float32 \[3\] and"),
    "both": ({"w[0:8/8]": torch.ones(8, 9)}, {"w": torch.ones(8, 9)}, "'w'.* whole, and by rows"),
    "twice": ({"w[0:8/8]": torch.ones(8, 9)}, {"w[4:8/8]": torch.ones(4, 9)}, "no shard, or by two"),
}


@pytest.mark.parametrize("kind", NO_WHOLES)
def test_rows_that_make_no_whole_are_refused(mirror: Mirrors, hub: Opener, kind: str) -> None:
    """every_byte_written_once: rows of other dtypes or shapes, and rows beside a whole, are no tensor, and memory of
    which only a part was read is shown to nobody."""
    first, second, message = NO_WHOLES[kind]
    rollout = mirror()
    rows_of(hub, 1, first, second)
    with pytest.raises(LayoutMismatch, match=message):
        rollout.pull(1, timeout=20)
    assert (rollout.version, rollout.tensors) == (None, {})
    whole = torch.randn(8, 9)
    rows_of(hub, 2, {"w[0:4/8]": whole[:4].clone()}, {"w[4:8/8]": whole[4:].clone()})
    with pytest.raises(BadRequest, match="a NoneType, which is no tensor"):
        mirror("other", make=lambda name, shape, dtype: None).pull(2, timeout=20)
    rollout.pull(2, timeout=20)
    assert same(rollout.tensors, {"w": whole})


def test_rows_that_are_tied_are_tied_in_the_whole(mirror: Mirrors, hub: Opener) -> None:
    """tied_once, alias_changes_between_versions: two names of the same rows in all shards are two names of one whole;
    tied in one shard only, they make none."""
    rollout = mirror()
    for version, is_tied in ((1, False), (2, True), (3, False)):
        w, v = torch.randn(8, 9), torch.randn(8, 9)
        parts = [{f"w[{at}:{at + 4}/8]": w[at : at + 4].clone()} for at in (0, 4)]
        for at, part in zip((0, 4), parts, strict=True):
            part[f"v[{at}:{at + 4}/8]"] = part[f"w[{at}:{at + 4}/8]"] if is_tied else v[at : at + 4].clone()
        rows_of(hub, version, *parts)
        rollout.pull(version, timeout=20)
        assert same(rollout.tensors, {"w": w, "v": w if is_tied else v})
        assert (rollout.tensors["w"].data_ptr() == rollout.tensors["v"].data_ptr()) is is_tied
    half = torch.ones(4, 9)
    rows_of(hub, 4, {"w[0:4/8]": half, "v[0:4/8]": half}, {"w[4:8/8]": half.clone(), "v[4:8/8]": half.clone()})
    with pytest.raises(LayoutMismatch, match="'w' are tied to other tensors in some shards"):
        rollout.pull(4, timeout=20)


def test_a_version_of_which_half_came_leaves_no_rows_elsewhere(mirror: Mirrors, hub: Opener) -> None:
    """no_advance_on_failure: one shard made memory for a version that the other never got; what comes next is whole
    again, in the memory that both had."""
    short: list[int] = []

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name == "more":
            short.append(1)
            raise MemoryError("no more memory")
        return torch.empty(shape, dtype=dtype)

    rollout, whole = mirror(make=make), torch.randn(8, 9)
    rows_of(hub, 1, {"w[0:4/8]": whole[:4].clone()}, {"w[4:8/8]": whole[4:].clone()})
    rollout.pull(1, timeout=20)
    before = rollout.tensors["w"].data_ptr()
    half = whole.half()
    rows_of(hub, 2, {"w[0:4/8]": half[:4].clone(), "more": torch.ones(3)}, {"w[4:8/8]": half[4:].clone()})
    with pytest.raises(MemoryError):
        rollout.pull(2, timeout=20)
    assert short
    assert rollout.version is None
    rows_of(hub, 3, {"w[0:4/8]": whole[:4] + 1}, {"w[4:8/8]": whole[4:] + 1})
    rollout.pull(3, timeout=20)
    assert same(rollout.tensors, {"w": whole + 1})
    assert rollout.tensors["w"].data_ptr() == before


def test_a_mirror_that_is_closed_meanwhile_takes_no_seat(ranks: Ranks, mirror: Mirrors, hub: Opener) -> None:
    """Closed by another thread while it waits for its first version: when that comes the pull ends by name, and the
    replica's name is free."""
    rollout, observer = mirror("rollout"), hub("observer")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rollout.pull, timeout=20)
        until_waiting(observer)
        rollout.close()
        publish(ranks(2), 1, weights(1))
        assert isinstance(waiting.exception(30), Closed)
    successor = mirror("rollout")
    assert successor.pull(timeout=20).version == 1
    assert rollout.tensors == {}
