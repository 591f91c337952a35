"""One private local server per test session, and hubs that are closed after each test."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

import tensorhub
from tensorhub import Hub, Mirror, Staging

_names = itertools.count()
#: Long enough for a busy machine, short enough that a test can outlast it.
LEASE_S = 4.0


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server of our own: an empty runtime directory means that nobody else's is found."""
    directory = tempfile.mkdtemp(prefix="th-")
    patch = pytest.MonkeyPatch()
    patch.setenv("TENSORHUB_RUNTIME_DIR", directory)
    patch.setenv("TENSORHUB_LEASE_S", str(LEASE_S))
    patch.setenv("TENSORHUB_BEAT_S", "0.3")
    try:
        yield "local:tests"
    finally:
        patch.undo()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def model() -> str:
    """A model name no other test uses: all share one server."""
    return f"model-{next(_names)}"


Opener = Callable[..., Hub]


@pytest.fixture
def hub(server: str, model: str) -> Iterator[Opener]:
    """`hub("trainer")` opens a hub of this test's model; all are closed at the end."""
    opened: list[Hub] = []

    def opener(replica: str, tensors: object = None, **options: object) -> Hub:
        arguments: dict[str, object] = {"server": server, **options}
        name = str(arguments.pop("model", model))
        fresh = tensorhub.open(name, replica=replica, **arguments)  # type: ignore[arg-type]
        opened.append(fresh)
        if tensors is not None:
            fresh.register(tensors)  # type: ignore[arg-type]
        return fresh

    yield opener
    for one in reversed(opened):
        one.close()
    tensorhub.shutdown()  # also the hubs of one-call forms: the next test's engines are its own


Ranks = Callable[..., list[Staging]]
Mirrors = Callable[..., Mirror]


@pytest.fixture
def opened(server: str) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
    tensorhub.shutdown()


@pytest.fixture
def ranks(opened: ExitStack, server: str, model: str) -> Ranks:
    """`ranks(2)`: the stagings of a trainer of two ranks, of this test's model."""

    def opener(shards: int, replica: str = "trainer", **options: object) -> list[Staging]:
        return [
            opened.enter_context(
                Staging(model, replica=replica, shard=rank, shards=shards, server=server, **options)  # type: ignore[arg-type]
            )
            for rank in range(shards)
        ]

    return opener


@pytest.fixture
def mirror(opened: ExitStack, server: str, model: str) -> Mirrors:
    """`mirror("rollout")`: a mirror of this test's model."""

    def opener(replica: str = "rollout", **options: object) -> Mirror:
        return opened.enter_context(Mirror(model, replica=replica, server=server, **options))  # type: ignore[arg-type]

    return opener


def weights(seed: int, *, rows: int = 64) -> dict[str, torch.Tensor]:
    """A small model: two large tensors of several chunks, a few tiny ones, one of 16-bit."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(rows, 4096, generator=generator),
        "head.weight": torch.randn(rows * 2, 1024, generator=generator).to(torch.bfloat16),
        "norm.bias": torch.randn(33, generator=generator),
        "norm.weight": torch.randn(33, generator=generator),
        "step": torch.tensor(seed),
    }


def blank(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the same shapes, full of something else."""
    return {name: torch.full_like(tensor, 7) for name, tensor in like.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def until_waiting(observer: Hub, requests: int = 1) -> None:
    """Block until the server shows so many waiting requests of this model."""
    for _ in range(5000):
        if len(observer.status().waiting) >= requests:
            return
    raise AssertionError(f"no {requests} requests wait")
