"""The background half of a publish: what it shows, and what it notices of a publisher that breaks the contract."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from tensorhub.client.holding import Holding
from tensorhub.client.publication import Publication
from tensorhub.client.registry import register
from tensorhub.errors import ContractBroken, Where
from tensorhub.types import Generation, SessionId

T = TypeVar("T")
HERE = Where(model="actor", replica="trainer-0", shard=0)


class Between:
    """Work runs inline; `meanwhile` runs before each piece of it: what the publisher does in the background's back."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile

    async def run(self, work: Callable[[], T]) -> T:
        self._meanwhile()
        return work()


def published(tensors: dict[str, torch.Tensor], meanwhile: Callable[[], None] = lambda: None) -> Publication:
    buffers = register(tensors, name="a", where=HERE)
    holding = Holding(buffers, (), SessionId(b"s" * 16))
    publication = Publication(holding, HERE, Between(meanwhile), buffers.counters())
    buffers.snapshot()
    holding.begin(Generation(b"g" * 16), digests=True)
    return publication


@pytest.mark.parametrize("digests", [True, False])
def test_a_tensor_given_other_memory_while_published_is_noticed(digests: bool) -> None:
    """aba_same_pointer: `.data = ` under a publish never shows freed memory. The old memory stays mapped, nothing of
    it is shown, and the publisher hears which tensor it was."""
    tensors = {"v": torch.ones(8), "w": torch.ones(4 << 20)}

    def rebind() -> None:
        tensors["w"].data = torch.zeros(4 << 20)
        gc.collect()

    publication = published(tensors, rebind)
    with pytest.raises(ContractBroken, match="'w' moved from") as caught:
        asyncio.run(publication.run(digests=digests))
    assert publication.holding.watermark == 0
    assert publication.root is None
    assert publication.broken is caught.value
    assert caught.value.where.tensor == "w"
    assert caught.value.where.model == "actor"


@pytest.mark.parametrize("name", ["tiny", "large"])
def test_a_tensor_given_other_memory_later_is_told_at_unpublish(name: str) -> None:
    """aba_same_pointer: also tiny ones, whose old memory, perhaps freed, is not compared with what was published."""
    tensors = {"tiny": torch.ones(8), "large": torch.ones(4000)}
    publication = published(tensors)
    assert asyncio.run(publication.run(digests=True)) == publication.root
    assert publication.holding.watermark == publication.holding.manifest.chunks
    publication.check()
    tensors[name].data = tensors[name].clone()
    with pytest.raises(ContractBroken, match=f"'{name}' moved from"):
        publication.check()
    assert publication.broken is not None


def test_a_tiny_tensor_given_other_memory_early_breaks_nothing_that_is_shown() -> None:
    """aba_same_pointer: a snapshot of it is served, so readers go on; unpublish tells."""
    tensors = {"tiny": torch.ones(8), "large": torch.ones(4000)}
    before = tensors["tiny"].detach()  # alive, so that no other memory can have its address

    def rebind() -> None:
        tensors["tiny"].data = torch.zeros(8)

    publication = published(tensors, rebind)
    asyncio.run(publication.run(digests=True))
    assert before.sum() == 8
    assert publication.holding.watermark == publication.holding.manifest.chunks
    with pytest.raises(ContractBroken, match="'tiny' moved from"):
        publication.check()
