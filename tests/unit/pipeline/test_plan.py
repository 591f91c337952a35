"""Plans: which bytes are read from where to where, batches of them, and versions that tensors here cannot take."""

from __future__ import annotations

import numpy as np
import pytest

from tensorhub.errors import Broken, LayoutMismatch, Where
from tensorhub.pipeline.manifest import Manifest
from tensorhub.pipeline.memory_map import MemoryMap
from tensorhub.pipeline.plan import Plan, check_compatible, chunk_ranges, ranges
from tensorhub.ports import Ranges

#: Ten bytes: the source holds four and six of them in a row, the reader wants six and four.
SOURCE = MemoryMap.tiled([1000, 5000], [4, 6])
DESTINATION = MemoryMap.tiled([100, 900], [6, 4])
#: Four chunks of the ten bytes, and the reads (from, to, bytes) that bring each of them.
STARTS, ENDS = (np.array(edges, dtype=np.uint64) for edges in ([0, 3, 5, 8], [3, 5, 8, 10]))
FIRST = [(1000, 100, 3)]
SECOND = [(1003, 103, 1), (5000, 104, 1)]
THIRD = [(5001, 105, 1), (5002, 900, 2)]
FOURTH = [(5004, 902, 2)]


def shown(reads: Ranges) -> list[tuple[int, int, int]]:
    return list(zip(reads.remote.tolist(), reads.local.tolist(), reads.nbytes.tolist(), strict=True))


def test_a_read_ends_where_either_side_goes_on_elsewhere() -> None:
    """every_byte_written_once: both maps' edges cut the stretch; nothing before or behind it is read."""
    assert shown(ranges(SOURCE, DESTINATION, 0, 10)) == [(1000, 100, 4), (5000, 104, 2), (5002, 900, 4)]
    assert shown(ranges(SOURCE, DESTINATION, 5, 9)) == [(5001, 105, 1), (5002, 900, 3)]
    assert shown(ranges(SOURCE, DESTINATION, 5, 5)) == []


def test_each_stretch_has_its_own_reads() -> None:
    """slice_boundary: no read belongs to two chunks; chunks may be asked for in part and in any order."""
    reads, firsts = chunk_ranges(SOURCE, DESTINATION, STARTS, ENDS)
    assert (shown(reads), firsts.tolist()) == ([*FIRST, *SECOND, *THIRD, *FOURTH], [0, 1, 3, 5, 6])
    reads, firsts = chunk_ranges(SOURCE, DESTINATION, [8, 3], [10, 5])
    assert (shown(reads), firsts.tolist()) == ([*FOURTH, *SECOND], [0, 1, 3])


def test_a_plan_has_the_chunks_that_are_wanted_under_their_numbers() -> None:
    """Chunks outside the spans have no reads, and those inside keep their place in the version."""
    plan = Plan.of(SOURCE, DESTINATION, STARTS, ENDS, [(0, 1), (2, 4)])
    assert shown(plan.reads) == [*FIRST, *THIRD, *FOURTH]
    assert plan.firsts.tolist() == [0, 1, 1, 3, 4]
    nothing = Plan.of(SOURCE, DESTINATION, STARTS, ENDS, [])
    assert (shown(nothing.reads), nothing.firsts.tolist()) == ([], [0] * 5)


def test_batches_are_the_plan_in_parts() -> None:
    """A batch has the reads of its chunks and counts them from its own first; it begins and ends at any chunk."""
    plan = Plan.of(SOURCE, DESTINATION, STARTS, ENDS, [(0, 4)])
    parts = {(0, 4): [0, 1, 3, 5, 6], (1, 3): [0, 2, 4], (3, 4): [0, 1], (2, 2): [0]}
    each = [FIRST, SECOND, THIRD, FOURTH]
    for (first, stop), firsts in parts.items():
        reads, found = plan.batch(first, stop)
        assert shown(reads) == [read for chunk in each[first:stop] for read in chunk]
        assert found.tolist() == firsts


def test_a_wanted_chunk_without_a_place_is_no_plan() -> None:
    """every_byte_written_once: a gap within a wanted chunk is our fault; within another one it is a subset's."""
    gap = MemoryMap(*(np.array(column, dtype=np.uint64) for column in ([0, 8], [100, 900], [3, 2])))
    for source, destination in ((SOURCE, gap), (gap, DESTINATION)):
        plan = Plan.of(source, destination, STARTS, ENDS, [(0, 1), (3, 4)])
        assert plan.firsts.tolist() == [0, 1, 1, 1, 2]
        with pytest.raises(Broken, match="have a place in memory"):
            Plan.of(source, destination, STARTS, ENDS, [(0, 2)])


# ---------------------------------------------------------------- what fits


#: {name: (bytes, name of the tensor whose memory it lies in, where in it)}, of one dimension.
Tensors = dict[str, tuple[int, str | None, int]]


def manifest(tensors: Tensors) -> Manifest:
    names = list(tensors)
    return Manifest.build(
        names,
        ["int8"] * len(names),
        [(nbytes,) for nbytes, _, _ in tensors.values()],
        [nbytes for nbytes, _, _ in tensors.values()],
        [-1 if holder is None else names.index(holder) for _, holder, _ in tensors.values()],
        [offset for _, _, offset in tensors.values()],
    )


def refusal(mine: Tensors, theirs: Tensors, only: list[str] | None = None) -> str:
    """The reasons; empty when it fits."""
    try:
        check_compatible(manifest(mine), manifest(theirs), Where(), only)
    except LayoutMismatch as error:
        return error.message.partition("there: version: ")[2]
    return ""


def test_a_version_that_does_not_fit_is_refused_with_every_reason() -> None:
    """shape_mismatch_early, dest_without_source, source_without_dest: all differences at once, before any byte moves,
    and of what they are."""
    mine: Tensors = {"a": (6, None, 0), "b": (4, None, 0), "mine": (1, None, 0)}
    theirs: Tensors = {"a": (7, None, 0), "b": (4, None, 0), "theirs": (1, None, 0)}
    assert refusal(mine, theirs) == "'a': shape (6) here, (7) there; 'mine': missing there; 'theirs': missing here"
    assert refusal(mine, mine) == ""
    with pytest.raises(LayoutMismatch) as caught:
        check_compatible(manifest(mine), manifest(theirs), Where(model="actor"))
    assert caught.value.where.model == "actor"


def test_nothing_is_no_version_of_something() -> None:
    """every_byte_written_once: a version without bytes cannot satisfy tensors that have some, nor the reverse."""
    something: Tensors = {"a": (4, None, 0)}
    assert refusal(something, {}) == "'a': missing there"
    assert refusal({}, something) == "'a': missing here"
    assert refusal(something, {"a": (0, None, 0)}) == "'a': shape (4) here, (0) there"
    assert refusal({}, {}) == ""


def test_of_a_subset_only_its_names_must_fit() -> None:
    """Others may differ, be missing, or be all that has bytes; a name that is not registered is refused even when
    everything else is equal."""
    mine: Tensors = {"a": (4, None, 0), "b": (4, None, 0), "none": (0, None, 0)}
    assert refusal(mine, {"a": (4, None, 0), "b": (5, None, 0)}, ["a"]) == ""
    assert refusal(mine, {"none": (0, None, 0)}, ["none"]) == ""
    assert refusal(mine, {"a": (5, None, 0), "b": (5, None, 0)}, ["a"]) == "'a': shape (4) here, (5) there"
    assert refusal(mine, mine, ["a", "c"]) == "'c': not registered here, and not in the version either"


#: (the alias, what it lies in): whichever is first by name.
ORDERS = [("a", "b"), ("b", "a")]


@pytest.mark.parametrize(("alias", "holder"), ORDERS)
def test_memory_that_is_shared_here_is_shared_alike_in_the_version(alias: str, holder: str) -> None:
    """tied_once, fused_views: one place cannot take two contents; so separate tensors there, or the alias at another
    place of its holder, are refused, and the same place is not, wherever in the stream it is."""
    mine: Tensors = {"A": (8, None, 0), holder: (8, None, 0), alias: (4, holder, 4), "z": (8, None, 0)}
    apart = f"{alias!r} shares memory with {holder!r} here, not so there"
    assert refusal(mine, {**mine, alias: (4, None, 0)}) == apart
    assert refusal(mine, {**mine, alias: (4, holder, 0)}) == apart
    assert refusal(mine, {**mine, alias: (4, "z", 4)}) == apart
    within: Tensors = {**mine, holder: (8, "z", 0), alias: (4, "z", 4)}
    assert refusal(mine, within) == ""
    assert refusal({**mine, "y": (1, None, 0)}, {**mine, "y": (1, holder, 0)}) == ""


def test_memory_that_is_shared_only_in_the_version_is_written_twice() -> None:
    """tied_once: nothing here shares memory, so that both places get their bytes."""
    assert refusal({"a": (8, None, 0), "b": (4, None, 0)}, {"a": (8, None, 0), "b": (4, "a", 4)}) == ""


@pytest.mark.parametrize(("alias", "holder"), ORDERS)
def test_a_subset_has_all_that_shares_memory_or_none(alias: str, holder: str) -> None:
    """tied_once: to write one of two that share memory would change the other; whichever of them is left out."""
    mine: Tensors = {holder: (8, None, 0), alias: (4, holder, 4), "z": (8, None, 0)}
    theirs: Tensors = {**mine, "z": (9, None, 0)}
    half = f"{alias!r} shares memory with {holder!r} here: update both or none"
    assert refusal(mine, theirs, [alias]) == half
    assert refusal(mine, theirs, [holder]) == half
    assert refusal(mine, theirs, [alias, holder]) == ""
    assert refusal(mine, {"z": (8, None, 0)}, ["z"]) == ""
    separate: Tensors = {**theirs, alias: (4, None, 0)}
    assert refusal(mine, separate, [alias, holder]) == f"{alias!r} shares memory with {holder!r} here, not so there"
