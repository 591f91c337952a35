"""Who counts as slow: each rule of the judgement alone, at its boundary, of fillings made by hand.

Times and bytes are given by hand, too: nothing flows here, and no step of the server is between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub.server import holdings, pace
from tensorhub.server.settings import FRESH_NS, PACE_WINDOW_NS, RATES_MAX, SECOND_NS
from tensorhub.server.state import Holding
from tests.unit.server.holders import FILLING, PUBLISHED, Holders
from tests.unit.server.kit import content, root

STEP_NS = SECOND_NS // 5
STEPS_PER_S = 5
#: A shard of 800 chunks of 64 KiB.
CHUNK, SHARD = 65536, 800 * 65536
#: Bytes per second of the source, or of those before; of these what 0.2 s bring is more than four chunks.
THEIRS = 15_000_000
LEAD = THEIRS // STEPS_PER_S


@dataclass
class Race:
    """`mine`, which another reads from, behind the filling `source`, behind a trainer."""

    holders: Holders = field(default_factory=lambda: Holders(now_ns=SECOND_NS))
    now_ns: int = SECOND_NS
    trainer: Holding = field(init=False)
    source: Holding = field(init=False)
    mine: Holding = field(init=False)

    def __post_init__(self) -> None:
        self.trainer = self.holders.add("trainer", state=PUBLISHED)
        self.trainer.root = root(1)
        self.holders.slot().content = content(1, chunks=SHARD // CHUNK)
        self.source = self.filling("source", self.trainer)
        self.mine = self.filling("mine", self.source, readers=1)

    def filling(self, name: str, source: Holding, readers: int = 0) -> Holding:
        return self.holders.add(name, state=FILLING, watermark=0, reads=source, readers=readers)

    def tell(self, filling: Holding, nbytes: int, period_ns: int = STEP_NS) -> None:
        """It has so many bytes by now, and last told so long ago."""
        filling.bytes_done = nbytes
        pace.note(filling, self.now_ns, period_ns)

    def go(self, filling: Holding, rate: int, nbytes: int) -> None:
        """It has so many bytes by now, the last of them at this rate."""
        self.tell(filling, nbytes - rate // STEPS_PER_S)
        self.tell(filling, nbytes)

    def judged(self, rate: int, ahead: int = LEAD, *, at: int = 10_000_000) -> bool:
        """Whether `mine` lags that is at so many bytes at this rate, and its source so much farther at its own."""
        self.go(self.source, THEIRS, at + ahead)
        self.go(self.mine, rate, at)
        return self.is_slow()

    def is_slow(self) -> bool:
        return bool(pace.lag(self.mine, self.now_ns))

    def before(self, name: str, rate: int) -> None:
        """A filling of this shard that has ended, from another source."""
        other = self.filling(name, self.holders.add(f"{name}-source"))
        other.bytes_done = 2 * rate
        pace.finish(other, self.now_ns + 2 * SECOND_NS)


def alone(rate: int = THEIRS) -> Race:
    """`mine` reads from the trainer, as its only reader, and somebody has filled the shard at this rate."""
    race = Race()
    race.before("before", rate)
    holdings.detach(race.holders.turn, race.mine)
    holdings.detach(race.holders.turn, race.source)
    holdings.attach(race.holders.turn, race.mine, race.trainer)
    return race


# ---------------------------------------------------------------- rates


def test_the_time_before_the_first_bytes_does_not_count() -> None:
    """Plans and first reads take their time on healthy hosts, too: the clock starts with the first report of bytes."""
    race = Race()
    race.tell(race.mine, 0, 2 * SECOND_NS)
    race.tell(race.mine, CHUNK)
    assert race.mine.pace.measured_ns == 0
    race.tell(race.mine, 11 * CHUNK)
    assert (race.mine.pace.rate, race.mine.pace.measured_ns) == (10 * CHUNK * STEPS_PER_S, race.now_ns)


def test_short_periods_are_added_up_and_each_counts_once() -> None:
    """A rate is all bytes over all time of the reports since the last one, by the reader's clock; no report may take
    time back."""
    race = Race()
    race.tell(race.mine, CHUNK)
    for grown, period_ns, rate in (
        (1, PACE_WINDOW_NS - 1, 0),
        (2, 0, 0),
        (3, -SECOND_NS, 0),
        (15, 1, 15 * CHUNK * SECOND_NS // PACE_WINDOW_NS),
        (16, STEP_NS, CHUNK * STEPS_PER_S),
    ):
        race.tell(race.mine, CHUNK + grown * CHUNK, period_ns)
        assert race.mine.pace.rate == rate


def test_another_source_is_a_new_beginning() -> None:
    """What it was before says nothing, and what it has already is no bytes of the new source; but it fills since it
    began to."""
    race = Race()
    race.go(race.mine, THEIRS // 4, 10_000_000)
    pace.restart(race.mine, race.now_ns + SECOND_NS)
    assert race.mine.pace.measured_ns == 0
    for nbytes in (10_000_000, 10_000_000 + CHUNK):
        race.tell(race.mine, nbytes)
        assert race.mine.pace.measured_ns == 0
    pace.finish(race.mine, race.now_ns + 2 * SECOND_NS)
    assert pace.fastest(race.mine) == (10_000_000 + CHUNK) // 2


# ---------------------------------------------------------------- behind a filling


def test_far_slower_than_its_source_once_is_enough() -> None:
    """More than three times, and not three times."""
    assert not Race().judged(THEIRS // 3)
    assert Race().judged(THEIRS // 3 - 5)


def test_slower_than_its_source_takes_two_periods_in_a_row() -> None:
    """More than twice: once may be chance, and so may be twice with an ordinary period between."""
    race, slower = Race(), THEIRS // 2 - 5
    assert not race.judged(slower)
    race.tell(race.mine, race.mine.bytes_done + LEAD)
    race.tell(race.source, race.source.bytes_done + LEAD)
    assert not race.is_slow()
    for is_slow in (False, True):
        race.tell(race.source, race.source.bytes_done + LEAD)
        race.tell(race.mine, race.mine.bytes_done + slower // STEPS_PER_S)
        race.tell(race.source, max(race.source.bytes_done, race.mine.bytes_done + LEAD))
        assert race.is_slow() == is_slow


def test_twice_as_slow_is_not_slower() -> None:
    """At just half the rate of its source nobody is slow, however long."""
    race = Race()
    assert not race.judged(THEIRS // 2)
    for _ in range(2):
        race.tell(race.source, race.source.bytes_done + LEAD)
        race.tell(race.mine, race.mine.bytes_done + LEAD // 2)
        assert not race.is_slow()


def test_its_source_must_be_ahead_by_what_may_be_under_way() -> None:
    """What the source reads in 0.2 s, or four chunks, whichever is more."""
    assert not Race().judged(THEIRS // 4, LEAD - 1)
    assert Race().judged(THEIRS // 4, LEAD)
    for ahead in (4 * CHUNK - 1, 4 * CHUNK):
        race = Race()
        race.go(race.source, CHUNK, 100 * CHUNK + ahead)
        race.go(race.mine, CHUNK // 8, 100 * CHUNK)
        assert race.is_slow() == (ahead == 4 * CHUNK)


def test_what_its_source_gives_to_others_does_not_count_against_it() -> None:
    """With another reader there it is slow below a sixth of the rate; one that was asked to leave takes no share."""
    for rate in (THEIRS // 6, THEIRS // 6 - 5):
        race = Race()
        race.holders.add_reader(race.source, "other")
        race.holders.ask_to_leave(race.holders.add_reader(race.source, "leaves"))
        assert race.judged(rate) == (rate < THEIRS // 6)


def test_enough_must_be_left_to_read() -> None:
    """A move costs calls: it does not pay for less than half a second of what the source does."""
    left = THEIRS // 2
    assert Race().judged(THEIRS // 4, at=SHARD - left)
    assert not Race().judged(THEIRS // 4, at=SHARD - left + 1)


def test_only_what_was_measured_lately_is_compared() -> None:
    """Neither a source that has long told nothing, nor one that has not told yet at all, makes its reader slow."""
    for age_ns in (FRESH_NS, FRESH_NS + 1):
        race = Race()
        race.go(race.source, THEIRS, 10_000_000 + LEAD)
        race.now_ns += age_ns
        race.go(race.mine, THEIRS // 4, 10_000_000)
        assert race.is_slow() == (age_ns == FRESH_NS)
    race = Race()
    race.go(race.source, THEIRS, 10_000_000)
    race.tell(race.mine, CHUNK)
    assert not race.is_slow(), "it has only begun"


def test_a_source_that_was_moved_meanwhile_is_no_measure() -> None:
    """Two slow periods behind a source that has begun anew since say nothing, before that one is measured again."""
    race = Race()
    slower = THEIRS // 2 - 5
    race.judged(slower)
    race.tell(race.source, race.source.bytes_done + LEAD)
    race.tell(race.mine, race.mine.bytes_done + slower // STEPS_PER_S)
    assert race.is_slow()
    pace.restart(race.source, race.now_ns)
    assert not race.is_slow()


def test_periods_without_a_measure_are_not_slow_ones() -> None:
    """What it read while its source had told nothing, or while it had none, is not held against it afterwards."""
    for has_source in (True, False):
        race = Race()
        if not has_source:
            holdings.detach(race.holders.turn, race.mine)
        race.go(race.mine, THEIRS // 4, 10_000_000)
        race.tell(race.mine, 10_000_000 + THEIRS // 20)
        race.go(race.source, THEIRS // 4, race.mine.bytes_done + LEAD)
        assert not race.is_slow()


def test_who_holds_nobody_up_is_not_slow() -> None:
    """Without a reader, or without a source, there is nothing to be done about it."""
    race = Race()
    (reader,) = race.mine.readers.values()
    holdings.detach(race.holders.turn, reader)
    assert not race.judged(THEIRS // 4)
    race = Race()
    assert race.judged(THEIRS // 4)
    holdings.detach(race.holders.turn, race.mine)
    assert not race.is_slow()


# ---------------------------------------------------------------- behind a complete source


def periods(race: Race, rate: int, count: int = 1) -> bool:
    """Whether `mine` lags after so many more periods at this rate."""
    if not race.mine.pace.has_begun:
        race.tell(race.mine, CHUNK)
    for _ in range(count):
        race.tell(race.mine, race.mine.bytes_done + rate // STEPS_PER_S)
    return race.is_slow()


def test_alone_at_a_complete_source_others_are_the_measure() -> None:
    """More than twice as slow as somebody lately was, twice in a row."""
    race, slower = alone(), THEIRS // 2 - 5
    assert not periods(race, slower)
    assert not periods(race, THEIRS // 2)
    assert not periods(race, slower)
    assert periods(race, slower)
    assert not periods(alone(), THEIRS // 2, 2)


def test_whose_source_is_busy_slow_or_unfinished_is_not_to_blame() -> None:
    """A second reader, a source that is known to be slow, or one that still digests, explain a low rate."""
    busy, slow, digests = alone(), alone(), alone()
    busy.holders.add_reader(busy.trainer, "other")
    slow.trainer.member.slow = "it was"
    digests.trainer.root = None
    for race in (busy, slow, digests):
        assert not periods(race, THEIRS // 4, 2)


def test_where_nothing_is_known_nobody_is_slow() -> None:
    """The first filling of a shard has no measure, even when it stands still."""
    race = alone()
    race.holders.model.rates.clear()
    assert not periods(race, 0, 3)


def test_it_pays_there_too() -> None:
    """Half a second of what others did must be left."""
    for left in (THEIRS // 2, THEIRS // 2 - 1):
        race = alone()
        race.tell(race.mine, SHARD - left - 10)
        race.tell(race.mine, SHARD - left - 5)
        race.tell(race.mine, SHARD - left)
        assert race.is_slow() == (left == THEIRS // 2)


# ---------------------------------------------------------------- what is usual


def test_the_fastest_of_the_last_fillings_is_the_measure() -> None:
    """In any order; and what was long ago is forgotten."""
    race = Race()
    race.before("first", 8_000_000)
    for number in range(RATES_MAX - 1):
        race.before(f"later-{number}", 4_000_000 + number)
    assert pace.fastest(race.mine) == 8_000_000
    race.before("last", 5_000_000)
    assert pace.fastest(race.mine) == 5_000_000


def test_a_filling_is_usual_that_is_not_far_below_the_fastest() -> None:
    """From the beginning to the end, at least half as fast. One that is too short to be measured is usual, and is not
    remembered."""
    race = Race()
    race.before("first", 8_000_000)
    began_ns = race.now_ns
    for took_ns, nbytes, is_usual in (
        (SECOND_NS, 4_000_000, True),
        (SECOND_NS, 3_999_999, False),
        (PACE_WINDOW_NS, 1, False),
        (PACE_WINDOW_NS - 1, 1, True),
        (PACE_WINDOW_NS - 1, SHARD, True),
    ):
        race.source.bytes_done = nbytes
        assert pace.finish(race.source, began_ns + took_ns) == is_usual
    assert pace.fastest(race.mine) == 8_000_000
