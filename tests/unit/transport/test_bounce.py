"""A slab that a library may still write to is never handed out."""

from __future__ import annotations

import pytest

from tensorhub.errors import EngineUnavailable
from tensorhub.transport import bounce
from tensorhub.transport.bounce import QUARANTINED_MAX, SLABS_MAX, Slabs


class Lander:
    """A library whose requests end when a test says so."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}
        self.running: set[int] = set()

    def give(self, address: int, nbytes: int) -> None:
        self.given[address] = nbytes

    def take_back(self, address: int) -> None:
        del self.given[address]

    def status(self, batch: int) -> int:
        return 0 if batch in self.running else -1


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bounce, "SLAB_BYTES", 4096)


def taken(slabs: Slabs):
    slab = slabs.take()
    assert slab is not None
    return slab


def test_slabs_are_registered_reused_and_bounded():
    """Bounded: so many slabs and no more; one that is free again is the next."""
    library = Lander()
    slabs = Slabs(library)
    held = [taken(slabs) for _ in range(SLABS_MAX)]
    assert slabs.take() is None
    assert library.given == {slab.address: 4096 for slab in held}
    slabs.give_back(held[3])
    assert slabs.take() is held[3]


def test_a_slab_with_a_request_under_way_waits_for_its_end():
    """timeout_then_late_write: quarantined until the library says that each of its requests has ended."""
    library = Lander()
    slabs = Slabs(library)
    slab = taken(slabs)
    library.running = {1, 2}
    slabs.give_back(slab, [1, 2])
    assert taken(slabs) is not slab
    library.running = {2}
    assert taken(slabs) is not slab
    assert slabs.quarantined == 1
    library.running = set()
    assert taken(slabs) is slab
    assert slabs.quarantined == 0


def test_a_library_that_does_not_finish_is_sick_until_it_does():
    """timeout_then_late_write: too many requests without an end are an error that says so, not a hang."""
    library = Lander()
    slabs = Slabs(library)
    held = [taken(slabs) for _ in range(QUARANTINED_MAX + 1)]
    library.running = set(range(len(held)))
    for batch, slab in enumerate(held):
        slabs.give_back(slab, [batch])
    with pytest.raises(EngineUnavailable, match=f"sick: {QUARANTINED_MAX + 1} requests"):
        slabs.take()
    library.running.remove(0)
    assert taken(slabs)
