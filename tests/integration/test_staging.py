"""A rank's staging when something goes wrong: it takes part in its stream to the end, and goes on afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tensorhub import Staging
from tensorhub.client import staging
from tensorhub.errors import BadRequest, Closed, ContractBroken, UnsupportedTensor, VersionConflict
from tests.integration.conftest import Mirrors, Opener, Ranks, same


class Stream:
    """Items, and how many of them were taken; an item that is an error is raised."""

    def __init__(self, *items: object) -> None:
        self.items, self.taken = items, 0

    def __iter__(self) -> Iterator[object]:
        for item in self.items:
            self.taken += 1
            if isinstance(item, BaseException):
                raise item
            yield item


def named(count: int = 3) -> list[tuple[str, torch.Tensor]]:
    return [(f"w{i}", torch.full((10,), float(i))) for i in range(count)]


def told(rank: Staging, version: int, stream: Stream) -> BaseException:
    """What that publish raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller looks
        rank.publish(version, stream)  # type: ignore[arg-type]
    return caught.value


def until_told_of_a_conflict(rank: Staging) -> None:
    """Until the server has told this rank that others published its version with other bytes."""
    hub = rank._hub
    assert hub is not None
    for _ in range(5000):
        publications = [slot.publication for slot in hub._member.slots.values()]
        if any(each is not None and each.broken for each in publications):
            return
        hub.status()
    raise AssertionError("never")


def test_a_conflict_is_told_once(ranks: Ranks, mirror: Mirrors, hub: Opener) -> None:
    """version_conflict: who published other bytes under a version hears it at the next publish, and then goes on."""
    (rank,) = ranks(1, sets=1)
    other = hub("other", {"w0": torch.ones(10)})
    other.publish(version=1, digest="now")
    rank.publish(1, named(1))
    until_told_of_a_conflict(rank)
    stream = Stream(*named())
    assert isinstance(told(rank, 2, stream), VersionConflict)
    assert stream.taken == 3
    for version in (2, 3):
        rank.publish(version, named())
    rollout = mirror()
    assert rollout.pull(timeout=20).version == 3
    assert same(rollout.tensors, dict(named()))


def test_a_broken_contract_is_told_once(ranks: Ranks, mirror: Mirrors) -> None:
    """mutate_during_read: a copy that was written to while shown is told of at its next turn, and then goes on."""
    (rank,) = ranks(1, sets=1)
    rank.publish(1, named(1))
    rank._hub._member.slots["staging-0"].publication.broken = ContractBroken("written to")  # type: ignore[union-attr]
    assert isinstance(told(rank, 2, Stream(*named())), ContractBroken)
    rank.publish(2, named())
    assert mirror().pull(timeout=20).version == 2


@pytest.mark.parametrize(
    ("item", "kind", "why"),
    [
        (("x", torch.eye(3).to_sparse()), UnsupportedTensor, "of layout torch.sparse_coo"),
        (("x", torch.empty(3, device="meta")), UnsupportedTensor, "on the meta device"),
        (("x", torch.zeros(3, dtype=torch.int8).view(torch.qint8)), UnsupportedTensor, "quantized"),
        (("x", torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)), UnsupportedTensor, "NestedTensor"),
        (("x", None), UnsupportedTensor, "a NoneType, not a tensor"),
        (("x", torch.ones(1), 1), BadRequest, "pairs of a name and a tensor, not a tuple of 3"),
        ("x", BadRequest, "pairs of a name and a tensor, not a str"),
        (None, BadRequest, "pairs of a name and a tensor, not a NoneType"),
        (("w0", torch.ones(1)), BadRequest, "names 'w0' twice"),
    ],
    ids=["sparse", "meta", "quantized", "nested", "none", "three", "name", "nothing", "twice"],
)
def test_what_cannot_be_published_is_named_and_the_stream_drained(
    ranks: Ranks, model: str, item: object, kind: type[Exception], why: str
) -> None:
    """The error names model, replica and tensor; this rank has taken part in all of the stream; the next one works."""
    (rank,) = ranks(1)
    stream = Stream(named()[0], item, *named()[1:])
    error = told(rank, 1, stream)
    assert type(error) is kind
    for part in (why, f"model {model!r}", "replica 'trainer'") + (("tensor 'x'",) if kind is UnsupportedTensor else ()):
        assert part in str(error)
    assert stream.taken == 4
    assert rank.publish(1, named()).tensors == 3


def test_a_stream_is_drained_whatever_fails(ranks: Ranks) -> None:
    """Also when the staging is closed; what the stream itself raises counts, the first error is its context."""
    (rank,) = ranks(1)
    stream = Stream(("x", None), *named(), RuntimeError("the gather failed"), ("y", torch.ones(1)))
    error = told(rank, 1, stream)
    assert isinstance(error, RuntimeError)
    assert isinstance(error.__context__, UnsupportedTensor)
    assert stream.taken == 5
    rank.close()
    stream = Stream(*named())
    assert isinstance(told(rank, 1, stream), Closed)
    assert stream.taken == 3


def test_an_interrupt_stops_at_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the process to end waits for no stream; the next publish works."""
    (rank,) = ranks(1)
    stream = Stream(*named())
    with monkeypatch.context() as patch:
        patch.setattr(rank, "_copy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert isinstance(told(rank, 1, stream), KeyboardInterrupt)
    assert stream.taken == 1
    rank.publish(1, named())


def test_what_all_ranks_gather_is_gathered_also_while_draining(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has failed leaves no other alone in a collective."""
    (rank,) = ranks(1)
    rank.close()
    theirs = torch.ones(3)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(staging, "is_distributed", lambda tensor: tensor is theirs)
    monkeypatch.setattr(staging, "own_rows", lambda tensor: None)
    monkeypatch.setattr(staging, "gathered", asked.append)
    assert isinstance(told(rank, 1, Stream(*named(), ("x", theirs))), Closed)
    assert len(asked) == 1


def test_one_pattern_is_one(ranks: Ranks, mirror: Mirrors) -> None:
    """A str is a pattern, not its letters; what is no pattern is refused by what is allowed."""
    (rank,) = ranks(1, dtype="bfloat16", keep_dtype="lm_head*")
    rank.publish(1, [("lm_head.w", torch.ones(4)), ("other", torch.ones(4))])
    rollout = mirror()
    rollout.pull(timeout=20)
    assert [rollout.tensors[name].dtype for name in ("lm_head.w", "other")] == [torch.float32, torch.bfloat16]
    with pytest.raises(BadRequest, match="keep_dtype must be a str or several, not 5"):
        ranks(1, "second", keep_dtype=5)
