"""The choice of one source among holders made by hand: each rule alone, at its boundary, and the reason told for it."""

from __future__ import annotations

import pytest

from tensorhub.server.offers import hide, refresh
from tensorhub.server.placement import (
    COMPLETE,
    LOAD_STEPS,
    PARTIAL,
    PUBLISHER,
    SLOW,
    host,
    nearest,
    rack,
    shelf_of,
    weight_of,
)
from tensorhub.server.settings import CANDIDATES_MAX, DEPTH_MAX, READERS_PER_SOURCE_MAX
from tensorhub.server.state import Holding
from tensorhub.types import Location
from tests.unit.server.holders import CHUNKS, FILLING, PUBLISHED, Holders

HERE = "dc1/r1/h1"
#: Another host of that rack.
NEAR = "dc1/r1/h2"


def lost(holders: Holders, watermark: int = 4, location: str = "") -> Holding:
    """The filling of one who asks for another source, and has none any more."""
    return holders.add("asker", location, FILLING, watermark=watermark)


# ---------------------------------------------------------------- order


def test_the_reason_says_what_was_found_where() -> None:
    """People read why: how it was found, in which place, and how many read from it already."""
    holders = Holders()
    trainer = holders.add("trainer", "dc1/r2/h1", PUBLISHED)
    assert holders.reason(HERE) == "nearest idle source in dc1: complete, 0 readers"
    partial = holders.add("partial", NEAR, FILLING, watermark=2, reads=trainer)
    assert holders.reason(HERE) == "nearest idle source in dc1/r1: partial, 0 readers"
    holders.add_reader(partial, "reader")
    assert holders.reason(HERE) == "no source is idle; least loaded in dc1/r1: partial, 1 readers"
    assert holders.reason(NEAR) == "on the same host, in dc1/r1/h2: partial, 1 readers"
    assert holders.reason("dc2") == "no source is idle; least loaded in all: complete, 1 readers"


def test_publishers_come_last_once_others_hold_the_version() -> None:
    """Until a copy is complete a near publisher comes before a partial source farther away; from then on after it."""
    holders = Holders()
    trainer = holders.add("trainer", NEAR, PUBLISHED)
    remote = holders.add("remote", "dc2/r1/h1", PUBLISHED)
    holders.add("partial", "dc1/r2/h1", FILLING, watermark=2, reads=remote)
    assert trainer.load == 0
    assert holders.chosen(HERE) == "trainer"
    holders.add("copy", "dc2/r1/h2")
    assert holders.chosen(HERE) == "partial"


def test_at_equal_load_the_shorter_chain_below_comes_first() -> None:
    """Of sources that must be shared, one with a long chain below it would slow all of that down: older or complete
    does not count against that. Between equals complete comes before partial."""
    holders = Holders()
    first = holders.add("first")
    between = holders.add("between", state=FILLING, watermark=0, reads=first)
    holders.add_reader(between, "below")
    second = holders.add("second", readers=1)
    third = holders.add("third", state=FILLING, watermark=6, reads=holders.add("full", readers=3), readers=1)
    assert {holding.load for holding in (first, between, second, third)} == {LOAD_STEPS}
    assert (first.height, between.height, second.height, third.height) == (2, 1, 1, 1)
    assert holders.chosen() == "second"
    hide(holders.turn, second)
    assert holders.chosen() == "between"
    hide(holders.turn, between)
    assert holders.chosen() == "third"
    hide(holders.turn, third)
    assert holders.chosen() == "first"


def test_an_idle_source_is_not_judged_by_what_was_below_it() -> None:
    """Slow readers weigh nothing: among those without load the first one is taken, whatever reads from it."""
    holders = Holders()
    first = holders.add("first")
    holders.add("slow", state=FILLING, watermark=0, reads=first, slow="it lagged")
    holders.add("second")
    assert (first.load, first.height) == (0, 1)
    assert holders.chosen() == "first"


def test_who_is_full_or_kept_from_all_is_not_chosen() -> None:
    """No place, quarantined, hidden: each of them is passed over."""
    holders = Holders()
    trainer = holders.add("trainer", state=PUBLISHED)
    for number in range(READERS_PER_SOURCE_MAX):
        assert holders.chosen() == "trainer"
        holders.add_reader(trainer, f"reader-{number}")
    assert holders.choice() is None
    copy = holders.add("copy")
    assert holders.chosen() == "copy"
    copy.quarantined = True
    refresh(holders.turn, copy)
    assert holders.choice() is None
    hide(holders.turn, holders.add("hidden"))
    assert holders.choice() is None


def test_a_slow_source_is_the_last_resort_however_loaded() -> None:
    """Only when no other has a place in the data centre, and then before any beyond it."""
    holders = Holders()
    slow = holders.add("slow", "dc1/r2/h1", slow="it lagged", readers=1)
    holders.add("far", "dc2/r1/h1")
    assert slow.load > 0
    assert holders.chosen(HERE) == "slow"
    assert holders.reason(HERE) == "slow, but no other has a place in dc1: complete, 1 readers"
    assert holders.chosen("dc3") == "far"
    holders.add("near", "dc1/r3/h1", readers=3)
    assert holders.chosen(HERE) == "near"


@pytest.mark.parametrize(
    ("state", "slow", "doubted", "shelf"),
    [
        (PUBLISHED, "", False, PUBLISHER),
        (PUBLISHED, "it lagged", False, PUBLISHER),
        (FILLING, "", False, PARTIAL),
        (FILLING, "it lagged", False, SLOW),
        (FILLING, "", True, SLOW),
    ],
)
def test_shelves(state: object, slow: str, doubted: bool, shelf: int) -> None:
    """Slow or doubted fillings are last resorts; a publisher never read, so that it cannot have lagged."""
    holding = Holders().add("holder", state=state, slow=slow)  # type: ignore[arg-type]
    holding.doubted = doubted
    assert shelf_of(holding) == shelf
    assert shelf_of(Holders().add("complete")) == COMPLETE


# ---------------------------------------------------------------- the group


def test_the_source_of_the_group_comes_first_while_it_is_idle() -> None:
    """All shards of a replica read from one replica if they can, though another is nearer."""
    holders = Holders()
    holders.add("near", NEAR)
    group = holders.add("group", "dc1/r9/h9")
    assert holders.chosen(HERE, prefer="group") == "group"
    assert holders.reason(HERE, prefer="group") == "the group's source: complete, 0 readers"
    assert holders.chosen(HERE) == "near"
    assert holders.chosen(HERE, prefer="unknown") == "near"
    assert holders.chosen("dc1", prefer="group") == "group"
    holders.add_reader(group, "reader")
    assert holders.chosen(HERE, prefer="group") == "near"


def test_the_source_of_the_group_is_not_fetched_from_afar() -> None:
    """Beyond the data centre it comes first among those there, not before what is at hand."""
    holders = Holders()
    holders.add("far", "dc2/r1/h1")
    holders.add("group", "dc3/r1/h1")
    assert holders.chosen(HERE, prefer="group") == "group"
    holders.add("near", HERE)
    assert holders.chosen(HERE, prefer="group") == "near"


@pytest.mark.parametrize("why", ["hidden", "quarantined", "slow", "suspect", "another version"])
def test_the_source_of_the_group_is_one_like_others(why: str) -> None:
    """What nobody else would be given, or not yet, is not given to a sibling either."""
    holders = Holders()
    holders.add("near")
    group = holders.add(
        "group", slow="it lagged" if why == "slow" else "", version=2 if why == "another version" else 1
    )
    suspects = {group.generation: None} if why == "suspect" else {}
    if why == "hidden":
        hide(holders.turn, group)
    group.quarantined = why == "quarantined"
    refresh(holders.turn, group)
    assert group.load == 0
    assert holders.chosen(prefer="group", suspects=suspects) == "near"


def test_a_hidden_holding_that_is_kept_for_the_group_is_read_at_last() -> None:
    """A decided group may still read what has been hidden since, if nobody else has a place, and up to its limit."""
    holders = Holders()
    kept = holders.add("kept")
    assert holders.choice(pinned=kept, suspects={kept.generation: None}) is None
    hide(holders.turn, kept)
    for number in range(READERS_PER_SOURCE_MAX):
        assert holders.reason(pinned=kept) == f"hidden, but kept for this group: complete, {number} readers"
        holders.add_reader(kept, f"reader-{number}")
    assert holders.choice(pinned=kept) is None
    assert holders.choice(pinned=None) is None
    holders.add("other")
    assert holders.chosen(pinned=kept) == "other"


def test_what_is_kept_is_read_at_last_only_if_it_may_be() -> None:
    """A source that failed the reader is not read because it is kept; one that is offered is found by itself."""
    holders = Holders()
    kept = holders.add("kept", readers=READERS_PER_SOURCE_MAX - 1)
    assert holders.choice(pinned=kept, suspects={kept.generation: None}) is None
    hide(holders.turn, kept)
    assert holders.choice(pinned=kept, suspects={kept.generation: None}) is None
    assert holders.choice("", "kept", pinned=kept) is None


# ---------------------------------------------------------------- waiting


def test_a_promise_nearby_is_waited_for() -> None:
    """Newcomers share nothing while one in their data centre will serve soon; impatient ones do, and who reads
    already does: it would come behind those that wait."""
    holders = Holders()
    holders.add("trainer", "dc1/r1/h9", PUBLISHED, readers=1)
    holders.slot().promises["dc2",] = 1
    assert holders.chosen(HERE) == "trainer"
    assert holders.chosen("dc1") == "trainer"
    holders.slot().promises["dc1",] = 1
    assert holders.choice(HERE) is None
    assert holders.choice("dc1") is None
    assert holders.chosen(HERE, patient=False) == "trainer"
    assert holders.chosen(HERE, filling=lost(holders, location=HERE)) == "trainer"


def test_beyond_the_data_centre_every_promise_is_waited_for() -> None:
    """Who must cross waits for one that will serve anywhere rather than share."""
    holders = Holders()
    holders.add("trainer", "dc2/r1/h1", PUBLISHED, readers=1)
    assert holders.chosen(HERE) == "trainer"
    holders.slot().promises["dc3",] = 1
    assert holders.choice(HERE) is None


def test_what_one_was_asked_to_leave_is_kept_for_those_behind() -> None:
    """It looks idle, but those that the straggler held up get it: newcomers wait, wherever in the data centre it is."""
    holders = Holders()
    trainer = holders.add("trainer", "dc1/r2/h1", PUBLISHED)
    holders.ask_to_leave(holders.add_reader(trainer, "slow"))
    assert trainer.load == 0
    assert holders.choice(HERE) is None
    assert holders.chosen(HERE, patient=False) == "trainer"
    assert holders.chosen(HERE, filling=lost(holders, location=HERE)) == "trainer"


def test_a_kept_source_far_away_is_not_waited_for() -> None:
    """A newcomer shares what is in its own data centre."""
    holders = Holders()
    holders.ask_to_leave(holders.add_reader(holders.add("far", "dc2/r1/h1"), "slow"))
    holders.add("near", "dc1/r2/h1", readers=1)
    assert holders.chosen(HERE) == "near"


def test_another_idle_source_is_taken_when_the_first_is_kept() -> None:
    """A newcomer passes over what is kept for others."""
    holders = Holders()
    holders.ask_to_leave(holders.add_reader(holders.add("first"), "slow"))
    holders.add("second")
    assert holders.chosen() == "second"


def other_shares() -> tuple[Holders, Holding]:
    """A trainer with one reader, in another rack of the data centre."""
    holders = Holders()
    return holders, holders.add("trainer", "dc1/r2/h1", PUBLISHED, readers=1)


def test_an_idle_source_that_is_behind_is_waited_for() -> None:
    """Who lost its source waits for one that needs only more bytes, anywhere in the data centre, rather than share;
    with as many bytes it reads from it at once."""
    holders, trainer = other_shares()
    behind = holders.add("behind", "dc1/r3/h1", FILLING, watermark=3, reads=trainer)
    reader = lost(holders, 4, HERE)
    assert holders.choice(HERE, filling=reader) is None
    assert holders.chosen(HERE, filling=reader, patient=False) == "trainer"
    behind.watermark = 4
    assert holders.chosen(HERE, filling=reader) == "behind"


@pytest.mark.parametrize("why", ["suspect", "own replica", "far away", "reads from the reader", "too long a chain"])
def test_what_may_never_be_read_is_not_waited_for(why: str) -> None:
    """An idle source that lacks bytes, but would not be given to the reader with all of them."""
    holders, trainer = other_shares()
    reader = lost(holders, 4, HERE)
    name = "asker" if why == "own replica" else "behind"
    feeder = reader if why == "reads from the reader" else trainer
    place = "dc2/r1/h1" if why == "far away" else HERE
    shard = {"buffers": "b"} if why == "own replica" else {}
    behind = holders.add(name, place, FILLING, watermark=3, reads=feeder, **shard)  # type: ignore[arg-type]
    if why == "too long a chain":
        reader.height = DEPTH_MAX - 1
    suspects = {behind.generation: None} if why == "suspect" else {}
    assert holders.chosen(HERE, filling=reader, suspects=suspects) == "trainer"


def test_who_was_asked_to_leave_does_not_read_there_again_while_it_is_patient() -> None:
    """It takes what is shared by others; later, if nothing else came, its old source will do."""
    holders, _ = other_shares()
    left = holders.add("left", HERE, readers=1)
    reader = holders.add("asker", HERE, FILLING, watermark=4, reads=left)
    holders.ask_to_leave(reader)
    assert holders.chosen(HERE, filling=reader) == "trainer"
    assert holders.chosen(HERE, filling=reader, patient=False) == "left"


def test_a_straggler_waits_for_the_end_of_the_chain() -> None:
    """Who is slow and was asked to leave waits, whatever can be shared; who is only one of both does not."""
    holders, _ = other_shares()
    slow = holders.add(
        "asker", HERE, FILLING, watermark=4, reads=holders.add("left", HERE, readers=3), slow="it lagged"
    )
    assert holders.chosen(HERE, filling=slow) == "trainer"
    holders.ask_to_leave(slow)
    assert holders.choice(HERE, filling=slow) is None
    assert holders.chosen(HERE, filling=slow, patient=False) == "trainer"
    slow.member.slow = ""
    assert holders.chosen(HERE, filling=slow) == "trainer"


# ---------------------------------------------------------------- chains


def chain(holders: Holders, hops: int) -> Holding:
    """The last of so many fillings in a row, whose first one reads from a trainer. Only the last one is offered."""
    above = holders.add("trainer", state=PUBLISHED)
    for number in range(hops):
        hide(holders.turn, above)
        filling = holders.add(f"link-{number}", state=FILLING, watermark=0)
        filling.upstream, above = above, filling
    refresh(holders.turn, above)
    return above


@pytest.mark.parametrize(("hops", "below", "fits"), [(0, 255, True), (0, 256, False), (5, 250, True), (5, 251, False)])
def test_a_chain_may_have_so_many_hops_with_what_is_below_the_reader(hops: int, below: int, fits: bool) -> None:
    """The reader, all above it and all below it are one chain of at most DEPTH_MAX."""
    holders = Holders()
    end = chain(holders, hops)
    reader = lost(holders, 0)
    reader.height = below
    assert DEPTH_MAX == 256
    assert holders.chosen(filling=reader) == (str(end.member.replica.id) if fits else "")


@pytest.mark.parametrize(("hops", "fits"), [(255, True), (256, False), (257, False)])
def test_the_last_hop_of_a_chain(hops: int, fits: bool) -> None:
    """A newcomer becomes hop number DEPTH_MAX, and no later one."""
    holders = Holders()
    end = chain(holders, hops)
    assert holders.chosen() == (str(end.member.replica.id) if fits else "")


def test_so_many_candidates_are_looked_at() -> None:
    """A step is short in a large crowd: who finds none that fits among the first ones of a place is told none."""
    holders = Holders()
    many = [holders.add(f"holder-{number}") for number in range(CANDIDATES_MAX + 1)]
    suspects = {holding.generation: None for holding in many}
    del suspects[many[CANDIDATES_MAX - 1].generation]
    assert holders.chosen(suspects=suspects) == f"holder-{CANDIDATES_MAX - 1}"
    suspects[many[CANDIDATES_MAX - 1].generation] = None
    del suspects[many[CANDIDATES_MAX].generation]
    assert holders.choice(suspects=suspects) is None


def test_who_weighs_nothing() -> None:
    """Readers that are slow, asked to leave, or given up take little: their source counts as if they were not there."""
    holders = Holders()
    reader = holders.add_reader(holders.add("source"), "reader")
    assert weight_of(reader) == LOAD_STEPS
    reader.watermark = CHUNKS
    assert weight_of(reader) == 1
    for change in ("asked", "doubted"):
        setattr(reader, change, "why")
        assert weight_of(reader) == 0
        setattr(reader, change, "")
    reader.member.slow = "it lagged"
    assert weight_of(reader) == 0


def test_the_rack_of_a_place() -> None:
    """What it lies in; a place of one part is its own."""
    racks = {"dc/r1/h1": ("dc", "r1"), "dc/r1": ("dc",), "dc": ("dc",), "": ()}
    assert {text: rack(Location.parse(text).parts) for text in racks} == racks


# ---------------------------------------------------------------- hosts


def test_a_location_of_three_parts_names_a_host() -> None:
    """Who waits stands in the line of its host, or of its rack where the host is not known."""
    hosts = {"dc/pod/r1/h1": True, "dc/r1/h1": True, "dc/r1": False, "dc": False, "": False}
    assert {text: host(Location.parse(text)) is not None for text in hosts} == hosts
    assert nearest(Location.parse("dc/r1/h1")) == ("dc", "r1", "h1")
    assert nearest(Location.parse("dc/r1")) == ("dc",)


def test_the_own_host_comes_before_the_group_and_all_that_is_idle() -> None:
    """Reads within a host use no uplink: a source that has readers is taken there before an idle one elsewhere."""
    holders = Holders()
    own = holders.add("own", HERE)
    holders.add("group", NEAR)
    holders.add_reader(own, "far")
    assert holders.chosen(HERE, prefer="group") == "own"
    for number in range(READERS_PER_SOURCE_MAX - 1):
        holders.add_reader(own, f"more-{number}")
    assert holders.chosen(HERE, prefer="group") == "group"


def test_what_is_about_to_come_to_the_own_host_is_waited_for() -> None:
    """Newcomers wait for it though another is idle; the impatient do not, nor who has a filling, nor other hosts."""
    holders = Holders()
    trainer = holders.add("trainer", NEAR, PUBLISHED)
    holders.slot().promises["dc1", "r1", "h1"] = 1
    assert holders.choice(HERE) is None
    assert holders.chosen(HERE, patient=False) == "trainer"
    assert holders.chosen("dc1/r1/h3") == "trainer"
    filling = holders.add("asker", HERE, FILLING, watermark=0)
    assert holders.chosen(HERE, filling=filling) == "trainer"
    assert trainer.load == 0


def test_a_reader_of_the_own_host_weighs_nothing() -> None:
    """It takes nothing of the uplink; the same reader elsewhere, or where hosts are not known, does."""
    for place, other, weight in ((HERE, HERE, 0), (HERE, NEAR, LOAD_STEPS), ("dc1/r1", "dc1/r1", LOAD_STEPS)):
        holders = Holders()
        source = holders.add("source", place)
        reader = holders.add("reader", other, FILLING, watermark=0, reads=source)
        assert (weight_of(reader), source.load) == (weight, weight)
