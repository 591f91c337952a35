"""What a new life takes of what sessions bring, and what not: each claim and each number at its boundary."""

from __future__ import annotations

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import BUFFER_SETS_MAX, GROUP_MAX, LINEAGES_MAX, LOCATORS_MAX, PLACES_MAX, SECOND_NS
from tensorhub.server.state import Holding, HoldingState, Lineage, Replica
from tensorhub.types import UNVERIFIED, VERSION_MAX, AtLeast, Digest, Generation, Version
from tests.unit.server.comers import MAIN, NEW, OLD, back, holder, reader, trainer_of
from tests.unit.server.kit import Cluster, Process, claim, content, ident, root, undertaking

MUCH = (m.Locator("memory", b""),) * (LOCATORS_MAX + 1)


def held(cluster: Cluster, process: Process, buffers: str = "a") -> Holding:
    return cluster.machine.state.sessions[process.session].members[process.seat].holdings[buffers]


def group_of(cluster: Cluster, process: Process) -> Replica:
    return cluster.machine.state.models[process.seat.model].replicas[process.seat.replica]


def conflict(process: Process) -> str:
    """What it heard of its claim; empty when that was taken."""
    notices = process.notices(m.Conflicted)
    assert len(notices) <= 1
    return notices[0].reason if notices else ""


def aborted(process: Process) -> str:
    """Why its transaction is over; empty while it goes on."""
    notices = process.notices(m.TransactionAborted)
    assert len(notices) <= 1
    return notices[0].reason if notices else ""


# ---------------------------------------------------------------- claims


NONSENSE: dict[str, tuple[dict[str, object], str]] = {
    "lineage": ({"version": Version("", 4)}, "lineage must be"),
    "number": ({"version": Version("main", -1)}, "outside 0 to"),
    "generation": ({"generation": Generation(b"short")}, "16 random bytes"),
    "buffers": ({"buffers": ""}, "buffer set must be"),
    "locators": ({"locators": MUCH}, "at most 64 locators"),
    "watermark": ({"watermark": -1}, "-1 chunks"),
    "content": ({"content": content(4, chunks=-1)}, "malformed content"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_claim_that_makes_no_sense_is_refused_by_name(kind: str) -> None:
    """Nothing of it is kept, and its owner hears what was wrong."""
    change, message = NONSENSE[kind]
    cluster = Cluster()
    assert message in conflict(holder(cluster, "roll", **change))
    assert not cluster.machine.state.generations


def test_a_claim_that_contradicts_what_others_hold_is_refused() -> None:
    """One content and one layout per version: what came first stays; with the same bytes the next is as good."""
    cluster = Cluster()
    holder(cluster, "first")
    assert "other bytes" in conflict(holder(cluster, "longer", content=content(4, chunks=9)))
    assert "other bytes" in conflict(holder(cluster, "other", root=root(5)))
    shown = claim(cluster.stranger("half#0"))
    assert "another layout" in conflict(back(cluster, "half#0", shown, shards=2))
    assert conflict(holder(cluster, "same")) == ""
    assert conflict(holder(cluster, "digesting", root=Digest(b""))) == ""
    assert len(cluster.machine.state.generations) == 3


def test_a_buffer_set_is_claimed_once() -> None:
    """The second claim of it is refused, another set's is not."""
    cluster = Cluster()
    stranger = cluster.stranger("roll")
    first, second = claim(stranger), claim(stranger, generation=Generation(ident("second")))
    other = claim(stranger, generation=Generation(ident("third")), buffers="b")
    roll = back(cluster, "roll", first, second, other)
    assert "'a' is claimed twice" in conflict(roll)
    assert held(cluster, roll).generation == first.generation
    assert held(cluster, roll, "b").generation == other.generation


def test_lineages_have_a_limit_for_those_that_come_back() -> None:
    """A claim of one more is refused, and one more is not remembered; those that are known are taken."""
    cluster = Cluster()
    holder(cluster, "first")
    model = cluster.machine.state.models[cluster.processes["first"].seat.model]
    for number in range(len(model.lineages), LINEAGES_MAX):
        model.lineages[f"lineage {number}"] = Lineage(number, 0, 0)
    assert conflict(holder(cluster, "known")) == ""
    assert f"{LINEAGES_MAX} lineages already" in conflict(holder(cluster, "more", version=Version("more", 4)))
    back(cluster, "told", lineages=(m.LineageMark("more", 7, 1),), seen=None)
    back(cluster, "lower", lineages=(m.LineageMark("main", 0, 0),), seen=None)
    assert "more" not in model.lineages
    assert model.lineages["main"].first == 0


@pytest.mark.parametrize(
    ("published", "told", "watermark"), [(True, 0, 0), (True, 3, 3), (True, 9, 8), (False, 0, 8), (False, 9, 8)]
)
def test_a_claim_is_read_as_far_as_it_says(published: bool, told: int, watermark: int) -> None:
    """A publisher may still be digesting, and has no more chunks than there are; a copy that was committed is whole."""
    cluster = Cluster()
    process = holder(cluster, "roll", published=published, watermark=told, exposure=b"x", locators=MUCH[:1])
    holding = held(cluster, process)
    assert (holding.watermark, holding.bytes_done) == (watermark, watermark * 65536)
    assert (holding.locators, holding.exposure) == (MUCH[:1], b"x")
    assert holding.state is (HoldingState.PUBLISHED if published else HoldingState.COMPLETE)


def test_a_claim_of_nothing_is_whole() -> None:
    """A version without bytes has no chunk to count."""
    cluster = Cluster()
    holding = held(cluster, holder(cluster, "roll", content=content(4, chunks=0)))
    assert (holding.watermark, holding.bytes_done) == (0, 0)


def test_who_still_digests_decides_the_root() -> None:
    """The first that is back without a root is the author: what others name is offered once it agrees with that."""
    cluster = Cluster()
    author = trainer_of(cluster, 4, root=Digest(b""))
    second = holder(cluster, "second", root=Digest(b""), published=True)
    reader_of_it = holder(cluster, "third")
    assert [held(cluster, each).proven for each in (author, second, reader_of_it)] == [True, False, False]
    author.published = held(cluster, author).generation
    author.seal(4)
    assert [held(cluster, each).proven for each in (author, second, reader_of_it)] == [True, False, True]


def test_a_root_that_is_known_proves_those_that_name_it() -> None:
    """Who has not digested yet when it is known is not offered until it has."""
    cluster = Cluster()
    first = holder(cluster, "first")
    late = holder(cluster, "late", root=Digest(b""), published=True)
    assert (held(cluster, first).slot.root, held(cluster, first).slot.author) == (root(4), None)
    assert [held(cluster, each).proven for each in (first, late)] == [True, False]


def test_without_digests_all_are_as_good() -> None:
    """A version published without them has no root to prove."""
    cluster = Cluster()
    what = {"content": content(4, verified=False), "root": Digest(b"")}
    pair = [holder(cluster, name, **what) for name in ("first", "second")]
    assert [(held(cluster, each).proven, held(cluster, each).root) for each in pair] == [(True, UNVERIFIED)] * 2


# ---------------------------------------------------------------- what was


def test_what_a_publisher_tells_binds_its_next_version() -> None:
    """Its own last version, told or claimed: a lower number is refused from then on."""
    cluster = Cluster()
    told = back(cluster, "told", published=NEW)
    claimed = holder(cluster, "claimed", published=True)
    both = back(cluster, "both", claim(cluster.stranger("both"), published=True), published=NEW)
    copy = holder(cluster, "copy")
    members = [cluster.machine.state.sessions[each.session].members[each.seat] for each in (told, claimed, both, copy)]
    assert [member.published for member in members] == [NEW, OLD, NEW, None]


def test_marks_beyond_the_limit_are_not_read() -> None:
    """One lineage for each buffer set, and those of what was seen, published and is under way."""
    cluster = Cluster()
    marks = tuple(m.LineageMark(f"lineage {number}", number, 0) for number in range(BUFFER_SETS_MAX + 4))
    liar = back(cluster, "liar", lineages=marks, seen=None)
    assert list(cluster.machine.state.models[liar.seat.model].lineages) == [mark.name for mark in marks[:-1]]


@pytest.mark.parametrize(
    ("mark", "is_taken"),
    [
        (m.LineageMark("main", 0, 0), True),
        (m.LineageMark("main", PLACES_MAX, 0), True),
        (m.LineageMark("main", PLACES_MAX + 1, 0), False),
        (m.LineageMark("main", -1, 0), False),
        (m.LineageMark("main", 0, -1), False),
        (m.LineageMark("", 0, 0), False),
    ],
)
def test_a_place_that_cannot_be_is_not_remembered(mark: m.LineageMark, is_taken: bool) -> None:
    """Nor is what is told after it."""
    cluster = Cluster()
    roll = back(cluster, "roll", lineages=(mark,), published=OLD, seen=None)
    model = cluster.machine.state.models[roll.seat.model]
    assert (list(model.lineages), model.vouched) == ((["main"], True) if is_taken else ([], False))


@pytest.mark.parametrize("number", [-1, VERSION_MAX + 1])
@pytest.mark.parametrize("what", ["seen", "published"])
def test_a_number_that_cannot_be_is_not_remembered(what: str, number: int) -> None:
    """It would retire every version of the lineages before it, or be newer than any that is to come."""
    cluster = Cluster()
    told: dict[str, object] = {"seen": None, what: Version("main", number)}
    roll = back(cluster, "roll", **told)
    model = cluster.machine.state.models[roll.seat.model]
    assert (model.lineages["main"].first, model.lineages["main"].highest) == (1, 1)
    assert (model.floor, model.vouched) == (None, False)


def test_a_publisher_that_brings_nothing_vouches_all_the_same() -> None:
    """It has unpublished its last version, which others hold: who waits for the latest gets that at once."""
    cluster = Cluster()
    holder(cluster, "copy")
    asking = cluster.process("asking")
    call = asking.replicate()
    assert asking.answer(call) is None
    back(cluster, "trainer", published=OLD)
    assert isinstance(asking.answer(call), m.Granted)


def test_a_version_of_a_lineage_that_nobody_names_says_nothing() -> None:
    """Where it stands is not known: it is no floor, and its publisher vouches for nothing."""
    cluster = Cluster()
    roll = back(cluster, "roll", lineages=(), seen=OLD, published=NEW)
    model = cluster.machine.state.models[roll.seat.model]
    assert (model.lineages, model.floor, model.vouched) == ({}, None, False)


@pytest.mark.parametrize(
    ("group", "sequence", "is_believed"),
    [
        (1, 0, True),
        (GROUP_MAX, GROUP_MAX, True),
        (0, 3, False),
        (GROUP_MAX + 1, 3, False),
        (7, -1, False),
        (7, GROUP_MAX + 1, False),
    ],
)
def test_numbers_of_a_group_are_believed_within_reason(group: int, sequence: int, is_believed: bool) -> None:
    """Nonsense would use up all numbers there are; 0 is of a process that knows of no earlier life."""
    cluster = Cluster()
    cluster.process("first of this life, which has number 1")
    roll = back(cluster, "roll", group=group, sequence=sequence)
    assert ((roll.group, roll.sequence) == (group, sequence)) == is_believed


def test_new_groups_count_on_from_those_that_came_back() -> None:
    """No number of a group is given twice through all lives: not that of the highest, and not that of a lower one."""
    cluster = Cluster()
    back(cluster, "high", group=900)
    back(cluster, "low", group=5)
    assert cluster.process("fresh").group > 900


def test_a_commit_that_was_told_answers_who_asks_late() -> None:
    """Of the last number only if that is over; the first number of a group counts as any."""
    cluster = Cluster()
    committed = back(cluster, "first", sequence=1, committed_sequence=0, committed=OLD)
    assert [str(outcome) for outcome in group_of(cluster, committed).outcomes.values()] == ["it committed version 4"]
    assert list(group_of(cluster, committed).outcomes) == [(7, 0)]
    for name, told in {
        "to come": {"sequence": 3, "committed_sequence": 3},
        "none": {"sequence": 3, "committed_sequence": -1},
    }.items():
        roll = back(cluster, name, committed=OLD, **told)
        assert not group_of(cluster, roll).outcomes


def test_a_sibling_at_a_later_number_moves_the_group() -> None:
    """All others hear it, and why; who came back does not: the answer to its Join says it."""
    cluster = Cluster(shards=2)
    zero = back(cluster, "roll#0", shards=2)
    one = back(cluster, "roll#1", shards=2, sequence=4)
    assert group_of(cluster, one).moved == "shard 1 came back and knows it to be over"
    assert len(zero.notices(m.Moved)) == 1
    assert not one.notices(m.Moved)
    again = back(cluster, "other#0", shards=2)
    later = back(cluster, "other#1", shards=2, group=9, sequence=0)
    assert group_of(cluster, again).moved == "shard 1 came back and knows of a later incarnation"
    assert (later.group, later.sequence) == (9, 0)
    assert [(notice.group, notice.sequence) for notice in again.notices(m.Moved)] == [(9, 0)]


def test_siblings_that_know_the_same_number_move_nothing() -> None:
    """The common case: all were told the same."""
    cluster = Cluster(shards=2)
    pair = [back(cluster, f"roll#{shard}", shards=2) for shard in range(2)]
    assert not any(each.notices(m.Moved) for each in pair)
    assert group_of(cluster, pair[0]).moved == ""


# ---------------------------------------------------------------- what is under way


UNDER_WAY: dict[str, tuple[dict[str, object], str]] = {
    "lineage": ({"version": Version("", 4)}, "lineage must be"),
    "number": ({"version": Version("main", -1)}, "outside 0 to"),
    "selector": ({"selector": AtLeast(-1)}, "outside 0 to"),
    "watermark": ({"watermark": -1}, "-1 chunks"),
    "bytes": ({"bytes_done": -1}, "-1 bytes"),
    "generation": ({"generation": Generation(b"short")}, "16 random bytes"),
    "buffers": ({"buffers": ""}, "buffer set must be"),
    "locators": ({"locators": MUCH}, "at most 64 locators"),
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


def test_a_commit_of_another_version_is_no_commit_of_this() -> None:
    """A number that was given twice, by servers that both believed to be the one, is over for who was not told."""
    cluster = Cluster(shards=2)
    one = reader(cluster, "roll#1", shards=2)
    back(cluster, "roll#0", shards=2, sequence=4, committed_sequence=3, committed=NEW, lineages=(MAIN,))
    assert aborted(one) != ""
    assert not [each for each in cluster.machine.state.generations.values() if each.state is HoldingState.COMPLETE]


# ---------------------------------------------------------------- the same life


def test_what_a_seat_claims_again_stays() -> None:
    """The next Join of a seat that lost an answer drops what it does not name, and nothing else; readers hear of it."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    trainer.seal(1)
    kept = trainer.published
    trainer.publish(2, buffers="b")
    trainer.seal(2)
    trainer.join((claim(trainer, generation=kept, version=Version("main", 1), content=content(1), root=root(1)),))
    assert list(cluster.machine.state.generations) == [kept]


def test_what_drains_or_is_in_a_transaction_is_not_dropped_unclaimed() -> None:
    """The seat may not have heard of its end yet: the answer is still owed."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    trainer.seal(1)
    roll = cluster.process("roll")
    roll.replicate()
    call = trainer.unpublish()
    trainer.join()
    assert trainer.answer(call) is None
    assert trainer.published in cluster.machine.state.generations
    roll.join()
    assert roll.generation in cluster.machine.state.generations


def test_a_claim_of_what_is_known_changes_nothing() -> None:
    """Neither of a generation that the server has, nor of a buffer set that holds something else."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    trainer.seal(1)
    known = claim(trainer, generation=trainer.published, version=Version("main", 1), content=content(1), root=root(1))
    trainer.join((known, claim(trainer)))
    assert conflict(trainer) == ""
    assert list(cluster.machine.state.generations) == [trainer.published]
