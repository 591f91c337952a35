"""Transfers that were under way when a server died: which go on in the next life, where they are, and how they end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import DEFAULTS, SECOND_NS
from tensorhub.server.state import HoldingState
from tensorhub.types import AtLeast, Digest, Generation, Version
from tests.unit.server.comers import MAIN, NEW, OLD, TOO_MANY, back, group_of, held, reader, trainer_of
from tests.unit.server.kit import Cluster, Process, claim, content, ident, root, undertaking


def aborted(process: Process) -> str:
    """Why its transaction is over; empty while it goes on."""
    notices = process.notices(m.TransactionAborted)
    assert len(notices) <= 1
    return notices[0].reason if notices else ""


UNDER_WAY: dict[str, tuple[dict[str, object], str]] = {
    "lineage": ({"version": Version("", 4)}, "lineage must be"),
    "number": ({"version": Version("main", -1)}, "outside 0 to"),
    "selector": ({"selector": AtLeast(-1)}, "outside 0 to"),
    "watermark": ({"watermark": -1}, "-1 chunks"),
    "bytes": ({"bytes_done": -1}, "-1 bytes"),
    "generation": ({"generation": Generation(b"short")}, "16 random bytes"),
    "buffers": ({"buffers": ""}, "buffer set must be"),
    "locators": ({"locators": TOO_MANY}, "at most 64 locators"),
    "content": ({"content": content(4, chunks=9)}, "other bytes"),
    "root": ({"root": root(5)}, "other bytes"),
    "held": ({"held": True}, "does not hold version 4 any more"),
}


@pytest.mark.parametrize("kind", UNDER_WAY)
def test_a_transfer_that_makes_no_sense_is_over(kind: str) -> None:
    """Its owner hears so, and why; nothing of it is kept."""
    change, message = UNDER_WAY[kind]
    cluster = Cluster()
    trainer_of(cluster, 4)
    roll = reader(cluster, **change)
    assert message in aborted(roll)
    assert len(cluster.machine.state.generations) == 1
    assert group_of(cluster, roll).transaction is None


def test_the_root_of_a_subset_is_not_compared() -> None:
    """It has read a part of the version, so it knows no root of it."""
    cluster = Cluster()
    trainer_of(cluster, 4)
    assert aborted(reader(cluster, serves=False, root=root(5))) == ""


def test_a_buffer_set_is_not_both_held_and_filled() -> None:
    """The claim stays, the transfer is over."""
    cluster = Cluster()
    shown = claim(cluster.stranger("roll"))
    roll = back(cluster, "roll", shown, undertaking=undertaking)
    assert "both filled and held" in aborted(roll)
    assert held(cluster, roll).generation == shown.generation


def test_what_is_said_to_be_held_is_of_that_version() -> None:
    """A claim of another version in this buffer set is no copy of the one that was decided."""
    cluster = Cluster()
    shown = claim(cluster.stranger("roll"), version=NEW, content=content(5), root=root(5))
    roll = back(cluster, "roll", shown, undertaking=lambda process: undertaking(process, held=True))
    assert "does not hold version 4 any more" in aborted(roll)


def test_a_decided_version_is_kept_for_those_who_have_not_asked_yet() -> None:
    """One holder of each shard that is still to come may not vanish under the group; once it reads, none is kept."""
    cluster = Cluster(shards=2)
    trainers = [
        back(cluster, name, claim(cluster.stranger(name), published=True), shards=2)
        for name in ("trainer#0", "trainer#1")
    ]
    first = reader(cluster, "roll#0", shards=2)
    assert [list(held(cluster, trainer).pins) for trainer in trainers] == [[], [replace(first.seat, shard=1)]]
    reader(cluster, "roll#1", shards=2)
    assert [list(held(cluster, trainer).pins) for trainer in trainers] == [[], []]


def test_who_holds_the_version_hidden_goes_on_to_its_commit() -> None:
    """It was told that it holds it, before it began to drain that: it is done with nothing filled."""
    cluster = Cluster(shards=2)
    shown = claim(cluster.stranger("roll#0"), hidden=True)
    roll = back(cluster, "roll#0", shown, shards=2, undertaking=lambda process: undertaking(process, held=True))
    call = roll.done(4)
    other = reader(cluster, "roll#1", shards=2)
    assert roll.answer(call) is None
    assert other.answer(other.done(4)) == roll.answer(call) == m.Committed(OLD)


def test_the_story_says_that_a_transfer_goes_on() -> None:
    """Who looks at a replica sees that its transfer was not begun in this life."""
    cluster = Cluster()
    roll = reader(cluster)
    assert "shard 0: resumed version 4. transaction 7/3" in str(group_of(cluster, roll).story)


def test_a_filling_may_have_readers_of_an_earlier_life() -> None:
    """Drained, over a restart: not even after its commit is it given up before those had a lease to come back."""
    cluster = Cluster()
    roll = reader(cluster)
    assert roll.answer(roll.done(4)) == m.Committed(OLD)
    call = roll.unpublish(60)
    cluster.alive(DEFAULTS.lease_ns // SECOND_NS - 1, roll)
    assert roll.answer(call) is None
    cluster.alive(1, roll)
    assert isinstance(roll.answer(call), m.Unpublished)


def test_a_filling_that_has_all_chunks_is_offered_without_a_source() -> None:
    """It waits for its siblings only: others may read all of it meanwhile."""
    cluster = Cluster(shards=2)
    whole = held(cluster, reader(cluster, "whole#0", shards=2, watermark=8))
    part = held(cluster, reader(cluster, "part#0", shards=2, watermark=7))
    assert whole.listed is not None
    assert part.listed is None


def test_what_is_held_is_offered_while_the_group_goes_on() -> None:
    """Nobody is about to overwrite it, though nobody else has brought this version back yet."""
    cluster = Cluster()
    shown = claim(cluster.stranger("roll"))
    roll = back(cluster, "roll", shown, undertaking=lambda process: undertaking(process, held=True))
    assert not held(cluster, roll).hidden
    assert cluster.state_of(4) == "readable"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selector": AtLeast(4)}, "others of its group ask"),
        ({"buffers": "b"}, "others of its group ask"),
        ({"version": NEW, "content": content(5)}, "has decided 4 meanwhile"),
    ],
)
def test_siblings_go_on_with_one_thing(change: dict[str, object], message: str) -> None:
    """One selector, one buffer set, one version: who came back with another hears what the group does."""
    cluster = Cluster(shards=2)
    reader(cluster, "roll#0", shards=2)
    assert message in aborted(reader(cluster, "roll#1", shards=2, **change))
    assert aborted(reader(cluster, "other#0", shards=2)) == aborted(reader(cluster, "other#1", shards=2)) == ""


def test_a_filling_is_where_it_was() -> None:
    """Chunks and bytes as told, never more chunks than there are; shown as it was, unless it never was."""
    cluster = Cluster()
    first = held(cluster, reader(cluster, "first", watermark=0, bytes_done=0))
    assert (first.watermark, first.bytes_done, first.serves, first.begun, first.claimed) == (0, 0, True, True, True)
    assert (first.exposure, first.locators[0].data) == (b"there", b"first")
    more = held(cluster, reader(cluster, "more", watermark=99, bytes_done=8 * 65536, root=root(4)))
    assert (more.watermark, more.bytes_done, more.root) == (8, 8 * 65536, root(4))
    bare = held(cluster, reader(cluster, "bare", exposure=b"", begun=False))
    assert (bare.serves, bare.begun, bare.root) == (False, False, None)
    subset = held(cluster, reader(cluster, "subset", serves=False))
    assert not subset.serves


def test_what_a_filling_has_left_of_its_time_is_all_it_gets() -> None:
    """The wait of a transfer that goes on ends when its call would have."""
    cluster = Cluster()
    roll = reader(cluster, timeout_ns=7 * SECOND_NS)
    transaction = group_of(cluster, roll).transaction
    assert transaction is not None
    assert transaction.parts[0].deadline_ns == cluster.now_ns + 7 * SECOND_NS


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("is_held", [True, False])
def test_who_has_not_heard_of_its_commit_keeps_what_it_read(serves: bool, is_held: bool) -> None:
    """A sibling tells of the commit: what was read for it is a whole copy from then on, unless it was a subset."""
    cluster = Cluster(shards=2)
    back(cluster, "roll#0", shards=2, sequence=4, committed_sequence=3, committed=OLD)
    one = reader(cluster, "roll#1", shards=2, serves=serves, held=is_held)
    assert aborted(one) == ""
    found = list(cluster.machine.state.generations.values())
    assert len(found) == (1 if serves and not is_held else 0)
    assert all((each.state, each.watermark) == (HoldingState.COMPLETE, 8) for each in found)


def test_a_commit_that_is_told_ends_what_its_siblings_read() -> None:
    """All shards were done, or it had not been committed: what is under way is whole and reads from nobody, and what
    was held already stays as it is."""
    cluster = Cluster(shards=3)
    source = Generation(ident("claim of trainer#2"))
    trainer = back(cluster, "trainer#2", claim(cluster.stranger("trainer#2"), published=True), shards=3)
    shown = claim(cluster.stranger("roll#1"))
    keeper = back(cluster, "roll#1", shown, shards=3, undertaking=lambda process: undertaking(process, held=True))
    reading = reader(cluster, "roll#2", shards=3, upstream=source, root=root(4))
    assert list(held(cluster, trainer).readers) == [reading.generation]
    back(cluster, "roll#0", shards=3, sequence=4, committed_sequence=3, committed=OLD)
    copy = held(cluster, reading)
    assert (copy.state, copy.watermark, copy.upstream) == (HoldingState.COMPLETE, 8, None)
    assert not held(cluster, trainer).readers
    assert held(cluster, keeper).generation == shown.generation
    assert aborted(keeper) == aborted(reading) == ""


@pytest.mark.parametrize("named", [root(4), Digest(b"")])
def test_what_a_committed_reader_has_read_names_the_root(named: Digest) -> None:
    """Its publisher is gone before it has digested: the first root that a reader named is the version's."""
    cluster = Cluster(shards=2)
    author = claim(cluster.stranger("trainer#1"), published=True, root=Digest(b""))
    trainer = back(cluster, "trainer#1", author, shards=2)
    roll = reader(cluster, "roll#1", shards=2, root=named)
    back(cluster, "roll#0", shards=2, sequence=4, committed_sequence=3, committed=OLD)
    assert held(cluster, roll).slot.root is None
    trainer.leave()
    assert held(cluster, roll).slot.root == (named or None)


def test_the_root_of_a_version_whose_publisher_is_gone_is_that_of_the_first_committed() -> None:
    """Nobody is left who could contradict it: it is settled in that very step."""
    cluster = Cluster(shards=2)
    roll = reader(cluster, "roll#1", shards=2, root=root(4))
    back(cluster, "roll#0", shards=2, sequence=4, committed_sequence=3, committed=OLD)
    assert held(cluster, roll).slot.root == root(4)


def test_a_commit_of_another_version_is_no_commit_of_this() -> None:
    """A number that was given twice, by servers that both believed to be the one, is over for who was not told."""
    cluster = Cluster(shards=2)
    one = reader(cluster, "roll#1", shards=2)
    back(cluster, "roll#0", shards=2, sequence=4, committed_sequence=3, committed=NEW, lineages=(MAIN,))
    assert aborted(one) != ""
    assert not [each for each in cluster.machine.state.generations.values() if each.state is HoldingState.COMPLETE]
