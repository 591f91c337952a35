"""Deadlines: one per key, due in order, forgotten without a trace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensorhub.server.deadlines import STALE_MAX, Deadlines, Key

KEYS = st.sampled_from([("a",), ("b",), ("c", 1), ("c", 2)])
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 9)),
    st.tuples(st.just("cancel"), KEYS, st.just(0)),
    st.tuples(st.just("pop"), st.just(()), st.integers(0, 9)),
)


@given(st.lists(STEPS, max_size=30))
def test_it_is_a_dict_of_times(steps: list[tuple[str, Key, int]]) -> None:
    """Whatever is set, moved and cancelled: the next is the earliest of those that stand, and only what is due is
    taken."""
    deadlines, twin = Deadlines(), dict[Key, int]()
    for what, key, at_ns in steps:
        match what:
            case "set":
                deadlines.set(key, at_ns)
                twin[key] = at_ns
            case "cancel":
                deadlines.cancel(key)
                twin.pop(key, None)
            case _:
                taken, earliest = deadlines.pop(at_ns), min(twin.values(), default=None)
                assert (taken is not None) == (earliest is not None and earliest <= at_ns)
                if taken is not None:
                    assert twin.pop(taken) == earliest
        assert deadlines.next_ns() == min(twin.values(), default=None)


def test_equal_times_come_as_they_were_set() -> None:
    """No order of keys, which may be of any kind, is ever asked for."""
    deadlines = Deadlines()
    for key in (("z",), (1,), (b"a",)):
        deadlines.set(key, 5)
    assert [deadlines.pop(5) for _ in range(4)] == [("z",), (1,), (b"a",), None]


def test_a_later_time_costs_nothing_until_it_surfaces() -> None:
    """A lease is renewed a thousand times for one entry."""
    deadlines = Deadlines()
    for number in range(1998):
        deadlines.set(("lease",), (number + 1) // 2)
    assert len(deadlines.heap) == 1
    assert deadlines.pop(998) is None
    assert deadlines.pop(999) == ("lease",)


def test_what_was_cancelled_is_not_kept() -> None:
    """Entries of deadlines that are no more are at most STALE_MAX, and as many as the live ones; order stays."""
    deadlines = Deadlines()
    for number in range(10):
        deadlines.set(("kept", number), 20 - number // 2)
    longest = 0
    for number in range(1000):
        deadlines.set(("gone", number), number)
        deadlines.cancel(("gone", number))
        longest = max(longest, len(deadlines.heap))
    assert longest == 2 * 10 + STALE_MAX, "it is rebuilt when it must, not for each"
    taken = [deadlines.pop(99) for _ in range(10)]
    assert taken == [("kept", number) for number in (8, 9, 6, 7, 4, 5, 2, 3, 0, 1)]
