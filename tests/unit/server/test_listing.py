"""What is offered, over holders made by hand: what the indexes say of each, and what is looked at again for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.messages import Event
from tensorhub.server.holdings import attach, detach
from tensorhub.server.offers import end_promise, hide, index_readable, promise, refresh, show, uplink_load
from tensorhub.server.placement import COMPLETE, PARTIAL
from tensorhub.server.settings import COMPLETE_SOURCES, DEFAULTS, READERS_PER_SOURCE_MAX
from tensorhub.server.state import Holding, HoldingState, Kind
from tests.unit.server.holders import CHUNKS, FILLING, PUBLISHED, Holders


def forget(holders: Holders) -> None:
    """Of what the turn would look at again so far."""
    holders.turn.models.clear()
    holders.turn.slots.clear()


def test_what_was_hidden_is_offered_again_when_nothing_was_written() -> None:
    """`show` undoes `hide`: readable and offered as before."""
    holders = Holders()
    holding = holders.add("holder")
    before = holding.listed
    hide(holders.turn, holding)
    assert (holding.listed, holding.slot.record.readable, holders.model.readable) == (None, False, [])
    show(holders.turn, holding)
    assert (holding.listed, holding.slot.record.readable, holders.model.readable) == (before, True, [1])


def test_selectors_are_looked_at_again_when_a_place_gets_or_loses_its_source() -> None:
    """Who waits for a version nearby hears of its first source in the data centre, and of the end of the last one."""
    holders = Holders()
    trainer = holders.add("trainer", "dc1/r1/h1", PUBLISHED)
    forget(holders)
    first = holders.add("first", "dc2/r1/h1", FILLING, watermark=1, reads=trainer)
    assert holders.model in holders.turn.models
    forget(holders)
    second = holders.add("second", "dc2/r1/h2", FILLING, watermark=1, reads=first)
    hide(holders.turn, first)
    assert holders.model not in holders.turn.models
    hide(holders.turn, second)
    assert holders.model in holders.turn.models


def test_selectors_and_watchers_hear_when_a_version_becomes_readable_or_hidden() -> None:
    """Also where its source was one before, while it filled: the place has no more sources than it had."""
    holders = Holders()
    trainer = holders.add("trainer", state=PUBLISHED)
    filling = holders.add("filling", state=FILLING, watermark=1, reads=trainer)
    holders.model.watchers[trainer.member.session.id, 5] = None
    hide(holders.turn, trainer)
    forget(holders)
    filling.state, filling.watermark = HoldingState.COMPLETE, CHUNKS
    refresh(holders.turn, filling)
    assert holders.model in holders.turn.models
    told = [(out.id, out.message) for out in holders.turn.out]
    version = filling.slot.record.version
    assert told == [
        (5, Event("hidden", holders.model.key, version, "trainer", 0, "")),
        (5, Event("readable", holders.model.key, version, "filling", 0, "")),
    ]


def test_the_list_of_readable_versions_has_each_once_and_no_other() -> None:
    """In order of number; asked again it changes nothing; what is hidden or retired is not in it."""
    holders = Holders()
    records = [holders.add("holder", version=number, buffers=str(number)).slot.record for number in (2, 3, 1)]
    assert holders.model.readable == [1, 2, 3]
    for record in records:
        index_readable(record)
    assert holders.model.readable == [1, 2, 3]
    records[0].retired, records[1].covered = True, 0
    for _ in range(2):
        for record in records:
            index_readable(record)
        assert holders.model.readable == [1]


def test_those_in_line_are_looked_at_again_when_a_place_is_free() -> None:
    """A new source, or a place at one, is for those who wait; a holding without a place changes nothing for them, and
    nobody is looked at where nobody waits."""
    holders = Holders()
    full = holders.add("full", readers=READERS_PER_SOURCE_MAX - 1)
    slot = full.slot
    forget(holders)
    refresh(holders.turn, full)
    hide(holders.turn, full)
    show(holders.turn, full)
    assert slot not in holders.turn.slots
    slot.lines[(Kind.ODD, ())] = {}
    last = holders.add_reader(full, "last")
    assert full.listed is not None
    assert full.listed.shelf is None
    assert slot not in holders.turn.slots
    detach(holders.turn, last)
    assert full.listed.shelf == COMPLETE
    assert slot in holders.turn.slots


def test_a_filling_is_offered_while_it_moves_or_has_all() -> None:
    """One that has lost its source and lacks bytes may never get them; with all bytes it needs none."""
    holders = Holders()
    trainer = holders.add("trainer", state=PUBLISHED)
    filling = holders.add("filling", state=FILLING, watermark=1, reads=trainer)
    assert filling.listed is not None
    assert (filling.listed.complete, filling.listed.shelf) == (False, PARTIAL)
    detach(holders.turn, filling)
    assert filling.listed is None
    filling.watermark = CHUNKS
    refresh(holders.turn, filling)
    assert filling.listed is not None
    filling.serves = False
    refresh(holders.turn, filling)
    assert filling.listed is None


# ---------------------------------------------------------------- promises


def planning(settings: object = DEFAULTS, *, location: str = "dc1/r1/h1", slow: str = "") -> tuple[Holders, Holding]:
    """A filling that has its grant from a trainer of `dc1` and does not serve yet."""
    holders = Holders(settings)  # type: ignore[arg-type]
    trainer = holders.add("trainer", "dc1/r9/h9", PUBLISHED)
    filling = holders.add("filling", location, FILLING, watermark=0, slow=slow)
    filling.serves = False
    attach(holders.turn, filling, trainer)
    return holders, filling


@pytest.mark.parametrize(
    ("location", "patience_ns"), [("dc1/r1/h1", DEFAULTS.patience_ns), ("dc2/r1/h1", DEFAULTS.far_patience_ns)]
)
def test_a_promise_lasts_as_long_as_a_plan_may_take(location: str, patience_ns: int) -> None:
    """Longer over a long link. It counts once, and is taken back with its deadline; those in line are looked at."""
    holders, filling = planning(location=location)
    place = tuple(location.split("/"))
    promise(holders.turn, filling)
    promise(holders.turn, filling)
    assert filling.promises
    assert filling.slot.promises == {place[:1]: 1, place: 1}
    assert holders.turn.deadlines.next_ns() == patience_ns
    forget(holders)
    end_promise(holders.turn, filling)
    assert (filling.promises, filling.slot.promises) == (False, {})
    assert holders.turn.deadlines.next_ns() is None
    assert filling.slot in holders.turn.slots
    forget(holders)
    end_promise(holders.turn, filling)
    assert filling.slot not in holders.turn.slots


def test_promises_are_counted_in_each_place() -> None:
    """One of two that ends leaves the other."""
    holders, first = planning()
    second = holders.add("second", "dc1/r2/h2", FILLING, watermark=0)
    second.serves = False
    assert first.upstream is not None
    attach(holders.turn, second, first.upstream)
    promise(holders.turn, first)
    promise(holders.turn, second)
    hosts = [("dc1", "r1", "h1"), ("dc1", "r2", "h2")]
    assert first.slot.promises == {("dc1",): 2, hosts[0]: 1, hosts[1]: 1}
    end_promise(holders.turn, first)
    assert first.slot.promises == {("dc1",): 1, hosts[1]: 1}


def test_the_uplink_of_a_host_is_that_of_all_its_holders() -> None:
    """What one of them bears for other hosts stands in the rows of all; it is forgotten with the last reader."""
    holders = Holders()
    first, second = holders.add("first", "dc1/r1/h1"), holders.add("second", "dc1/r1/h1")
    elsewhere = holders.add("elsewhere", "dc1/r1/h2")
    reader = holders.add_reader(first, "reader")
    here = ("dc1", "r1", "h1")
    assert first.slot.uplinks == {here: reader.weight}
    loads = [holding.listed.load for holding in (first, second, elsewhere) if holding.listed is not None]
    assert loads == [reader.weight, reader.weight, 0]
    assert (first.load, second.load, uplink_load(second)) == (reader.weight, 0, reader.weight)
    detach(holders.turn, reader)
    assert first.slot.uplinks == {}
    assert [holding.listed.load for holding in (first, second) if holding.listed is not None] == [0, 0]


def test_a_promise_is_over_once_it_serves_or_has_lost_its_source() -> None:
    """What it was waited for has come, or will not soon."""
    for change in ("serves", "source lost"):
        holders, filling = planning()
        promise(holders.turn, filling)
        refresh(holders.turn, filling)
        assert filling.promises
        if change == "serves":
            filling.serves = True
            refresh(holders.turn, filling)
        else:
            detach(holders.turn, filling)
        assert not filling.promises


@pytest.mark.parametrize("why", ["serves", "slow", "no source", "complete sources only", "no patience"])
def test_who_promises_nothing(why: str) -> None:
    """Nobody waits for what serves already, or will not, or shall not be waited for."""
    settings = {
        "complete sources only": replace(DEFAULTS, sources=COMPLETE_SOURCES),
        "no patience": replace(DEFAULTS, patience_ns=0),
    }
    holders, filling = planning(settings.get(why, DEFAULTS), slow="it lagged" if why == "slow" else "")
    if why == "no source":
        detach(holders.turn, filling)
    filling.serves = why == "serves"
    promise(holders.turn, filling)
    assert (filling.promises, filling.slot.promises) == (False, {})
