"""Rows of tensors by name, and which rows a rank of a distributed tensor answers for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorhub.client.slices import Slice, Wholes, is_distributed, joined, missing, own_rows
from tensorhub.integrations import ungathered as module
from tensorhub.integrations.ungathered import ungathered


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """This process as one rank of several, of whom nobody answers: a collective would give nonsense."""
    dist.init_process_group("fake", store=FakeStore(), world_size=world, rank=rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Placement]) -> DTensor:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    local, at = whole, init_device_mesh("cpu", mesh)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = torch.chunk(local, mesh[dim], placement.dim)
            mine = at.get_coordinate()[dim]
            local = chunks[mine] if mine < len(chunks) else local.narrow(placement.dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), at, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("name", ["w", "a.b[0]", "x[1:2/3]"])
def test_rows_have_a_name_of_their_own(name: str) -> None:
    """What a name says is what was put into it, also when the tensor's own name looks like one of rows."""
    piece = Slice(name, 2, 5, 9)
    assert Slice.of(str(piece), (3, 7)) == piece


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("w", (3,)),
        ("[1:2/3]", (1,)),
        ("w[2:5/9]", (4,)),
        ("w[2:5/9]", ()),
        ("w[5:2/9]", (3,)),
        ("w[3:3/9]", (0,)),
        ("w[2:5/4]", (3,)),
        ("w[02:5/9]", (3,)),
        ("w[2:5/9] ", (3,)),
    ],
)
def test_other_names_are_tensors_by_themselves(text: str, shape: tuple[int, ...]) -> None:
    """A name that says rows which its tensor does not have is a name."""
    assert Slice.of(text, shape) is None


@pytest.mark.parametrize(
    ("held", "lack"),
    [
        ([(0, 4), (4, 6)], None),
        ([(4, 6), (0, 4)], None),
        ([(0, 4)], "rows 4 to 6 of 'w'"),
        ([(2, 6)], "rows 0 to 2 of 'w'"),
        ([(0, 2), (3, 6)], "rows 2 to 3 of 'w'"),
        ([(0, 4), (3, 6)], "rows 4 to 3 of 'w'"),
    ],
)
def test_each_row_is_held_once(held: list[tuple[int, int]], lack: str | None) -> None:
    """every_byte_written_once: a gap, a missing end and an overlap are told, by the rows."""
    assert missing([Slice("w", first, stop, 6) for first, stop in held]) == lack


def test_pieces_of_two_wholes_are_none() -> None:
    """Ranks that disagree how many rows there are hold no tensor."""
    assert missing([Slice("w", 0, 3, 6), Slice("w", 3, 7, 7)]) is not None


def made(wholes: Wholes, *cuts: tuple[int, int]) -> list[tuple[Slice, torch.Tensor]]:
    pieces = [Slice("w", start, stop, 8) for start, stop in cuts]
    return [(piece, wholes.rows(piece, (piece.stop - piece.start, 3), torch.float32)) for piece in pieces]


def test_rows_that_are_cut_otherwise_get_other_memory() -> None:
    """Rows in which others may still read an older version are not given to another shard; the same rows are given to
    the same one again, and what nobody uses any more is let go."""
    wholes = Wholes(lambda name, shape, dtype: torch.empty(shape, dtype=dtype))
    halves = made(wholes, (0, 4), (4, 8))
    whole = joined(halves)
    assert whole is not None
    assert whole.shape == (8, 3)
    again = made(wholes, (4, 8), (0, 4))
    assert sorted(piece.data_ptr() for _, piece in again) == sorted(piece.data_ptr() for _, piece in halves)
    thirds = made(wholes, (0, 2), (2, 8))
    assert joined(thirds) is not None
    assert thirds[0][1].data_ptr() != whole.data_ptr()
    assert joined([halves[0], thirds[1]]) is None
    wholes.keep(thirds)
    assert made(wholes, (0, 2))[0][1].data_ptr() == thirds[0][1].data_ptr()
    wholes.keep([])
    assert joined(made(wholes, (0, 4), (4, 8))) is not None


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_ranks_answer_for_all_rows_once(rows: int, world: int) -> None:
    """Whatever the division leaves: stretches in order, as long as what torch gave to each rank."""
    found: list[int] = []
    for rank in range(world):
        with rank_of(world, rank):
            tensor = distributed((rows, 3), (world,), [Shard(0)])
            mine = own_rows(tensor)
            assert mine is not None
            assert len(mine) == tensor.to_local().shape[0]
            found.extend(mine)
    assert found == list(range(rows))


def test_one_of_several_replicas_answers() -> None:
    """Hybrid sharding: of the ranks that hold the same rows the first does, the others keep silent."""
    found = []
    for rank in range(4):
        with rank_of(4, rank):
            found.append(own_rows(distributed((6, 2), (2, 2), [Replicate(), Shard(0)])))
    assert found == [range(3), range(3, 6), range(0), range(0)]


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4, 6), [Shard(1)]),
        ((4, 6), [Replicate()]),
        ((4, 6), [Partial()]),
        ((0, 6), [Shard(0)]),
    ],
)
def test_what_is_no_stretch_of_rows_is_gathered(shape: tuple[int, ...], placements: list[Placement]) -> None:
    """Columns, copies, sums and nothing at all have no rows to answer for."""
    with rank_of(2, 0):
        assert own_rows(distributed(shape, (2,), placements)) is None


class Queued:
    """A lock that tells when somebody has come to it."""

    def __init__(self) -> None:
        self.lock, self.come = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.come.release()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_threads_take_turns_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes while another is in it waits; when the last is done, `full_tensor` is torch's own again."""
    real, queued = DTensor.full_tensor, Queued()
    monkeypatch.setattr(module, "_lock", queued)

    def enter() -> None:
        with ungathered():
            pass

    with ThreadPoolExecutor(1) as pool:
        with ungathered():
            other = pool.submit(enter)
            for _ in range(2):
                assert queued.come.acquire(timeout=20)
        other.result(20)
    assert DTensor.full_tensor is real


def test_full_tensor_hands_on_what_the_rank_has() -> None:
    """While it lasts nothing is gathered; afterwards, and where it is not wanted, it is."""
    with rank_of(2, 1):
        tensor = distributed((4, 2), (2,), [Shard(0)])
        with ungathered():
            assert tensor.full_tensor() is tensor
        with ungathered(False):
            assert not is_distributed(tensor.full_tensor())
        assert tensor.full_tensor().shape == (4, 2)
        assert is_distributed(tensor)
        assert not is_distributed(torch.ones(2))
