"""The schedule of many consumers of one trainer's versions: each alone, none waited for, none waits for another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tensorhub.errors import WaitTimeout
from tensorhub.integrations.followers import TRIES, Followers

#: A hang guard.
PATIENCE_S = 20.0


class Rollouts:
    """Consumers that note what they were brought to; each is held back or fails as told."""

    def __init__(self) -> None:
        self.brought: dict[str, list[int]] = {}
        self.given_up: list[str] = []
        self.firsts: list[tuple[str, int]] = []
        self.fails: dict[str, list[BaseException]] = {}
        self.fails_to_hear: set[str] = set()
        self.at_once: dict[str, int] = {}
        self.most_at_once = 0
        self.gates: dict[str, threading.Event] = {}
        self.arrived: dict[str, threading.Event] = {}
        self.all = Followers(self.bring, self.give_up, ConnectionError)

    async def bring(self, name: str, version: int, is_first: bool) -> None:
        await asyncio.sleep(0)  # there is a loop to await on
        self.at_once[name] = self.at_once.get(name, 0) + 1
        self.most_at_once = max(self.most_at_once, self.at_once[name])
        try:
            self.bring_one(name, version, is_first)
        finally:
            self.at_once[name] -= 1

    def bring_one(self, name: str, version: int, is_first: bool) -> None:
        if name in self.arrived:
            self.arrived[name].set()
        if name in self.gates:
            assert self.gates[name].wait(PATIENCE_S)
        if self.fails.get(name):
            raise self.fails[name].pop(0)
        self.brought.setdefault(name, []).append(version)
        if is_first:
            self.firsts.append((name, version))

    def give_up(self, name: str) -> None:
        self.given_up.append(name)
        if name in self.fails_to_hear:
            raise ValueError("the manager is broken")
        self.all.remove([name])  # as a manager does that forgets it

    def hold(self, name: str) -> tuple[threading.Event, threading.Event]:
        """(has begun, may go on) of that consumer's next versions."""
        self.arrived[name], self.gates[name] = threading.Event(), threading.Event()
        return self.arrived[name], self.gates[name]


@pytest.fixture
def rollouts() -> Iterator[Rollouts]:
    made = Rollouts()
    yield made
    made.all.close()
    for gate in made.gates.values():
        gate.set()


def test_all_are_brought_to_what_is_announced(rollouts: Rollouts) -> None:
    """Every consumer uses each version, when there is time for it."""
    rollouts.all.add(["a", "b"])
    for version in (1, 2):
        rollouts.all.announce(version)
        rollouts.all.wait(PATIENCE_S)
    assert rollouts.brought == {"a": [1, 2], "b": [1, 2]}
    assert rollouts.all.lags() == {"a": 0, "b": 0}
    assert sorted(rollouts.firsts) == [("a", 1), ("b", 1)]


def test_a_slow_one_skips_and_holds_up_nobody(rollouts: Rollouts) -> None:
    """Versions that come while a consumer is busy are skipped for it; others have long had them."""
    begun, go_on = rollouts.hold("slow")
    rollouts.all.add(["slow", "quick"])
    rollouts.all.announce(1)
    assert begun.wait(PATIENCE_S)
    for version in (2, 3):
        rollouts.all.announce(version)
        while rollouts.brought.get("quick", [0])[-1] != version:
            assert rollouts.all.lags()["slow"] == version
    with pytest.raises(WaitTimeout, match="1 of 2 consumers do not use version 3"):
        rollouts.all.wait(0.01)
    go_on.set()
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.brought["slow"] == [1, 3]
    assert rollouts.brought["quick"][-1] == 3


def test_one_that_is_added_late_gets_the_newest_at_once(rollouts: Rollouts) -> None:
    """A consumer that comes in the middle of a run does not wait for the next version; one known is not added twice."""
    rollouts.all.add(["a"])
    rollouts.all.announce(7)
    rollouts.all.add(["a", "late"])
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.brought == {"a": [7], "late": [7]}


def test_a_failure_is_tried_again_with_what_is_newest_then(rollouts: Rollouts) -> None:
    """A version that went away meanwhile costs its consumer a try; the next one counts afresh."""
    begun, go_on = rollouts.hold("a")
    rollouts.fails["a"] = [RuntimeError("gone")] * (TRIES - 1)
    rollouts.all.add(["a"])
    rollouts.all.announce(1)
    assert begun.wait(PATIENCE_S)
    rollouts.all.announce(2)
    go_on.set()
    rollouts.all.wait(PATIENCE_S)
    assert (rollouts.brought["a"], rollouts.given_up) == ([2], [])
    rollouts.fails["a"] = [RuntimeError("again")] * (TRIES - 1)
    rollouts.all.announce(3)
    rollouts.all.wait(PATIENCE_S)
    assert (rollouts.brought["a"], rollouts.given_up) == ([2, 3], [])


@pytest.mark.parametrize("failures", [[ConnectionError("it died")], [RuntimeError(f"{n}") for n in range(TRIES)]])
def test_one_that_is_dead_or_broken_is_given_up_alone(rollouts: Rollouts, failures: list[Exception]) -> None:
    """reader_killed: death is final at once, other failures after `TRIES` in a row; nobody waits for it any more."""
    rollouts.fails["bad"] = list(failures)
    rollouts.all.add(["bad", "good"])
    rollouts.all.announce(1)
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.given_up == ["bad"]
    assert (rollouts.brought, rollouts.all.lags()) == ({"good": [1]}, {"good": 0})


def test_one_that_is_removed_is_left_alone(rollouts: Rollouts) -> None:
    """What is under way is finished, nothing else is begun, and it counts for nobody's wait."""
    begun, go_on = rollouts.hold("a")
    rollouts.all.add(["a"])
    rollouts.all.announce(1)
    assert begun.wait(PATIENCE_S)
    rollouts.all.remove(["a", "a stranger"])
    rollouts.all.announce(2)
    rollouts.all.wait(0)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "tensorhub-follower":
            thread.join(PATIENCE_S)
    assert rollouts.brought == {"a": [1]}


@pytest.mark.parametrize("end", [None, ConnectionError("the old one died")])
def test_one_that_comes_again_is_another_but_never_brought_at_once(rollouts: Rollouts, end: Exception | None) -> None:
    """Who is removed and added again waits until the old one's turn is over, and outlives his end."""
    begun, go_on = rollouts.hold("a")
    rollouts.fails["a"] = [end] if end is not None else []
    rollouts.all.add(["a"])
    rollouts.all.announce(1)
    assert begun.wait(PATIENCE_S)
    old = next(thread for thread in threading.enumerate() if thread.name == "tensorhub-follower" and thread.is_alive())
    begun.clear()
    rollouts.all.remove(["a"])
    rollouts.all.add(["a"])
    # Longer than a thread takes that does not wait for the old one.
    assert not begun.wait(0.1)
    go_on.set()
    old.join(PATIENCE_S)
    rollouts.all.announce(2)
    rollouts.all.wait(PATIENCE_S)
    assert (rollouts.most_at_once, rollouts.given_up, rollouts.all.lags()) == (1, [], {"a": 0})
    assert rollouts.brought["a"][-1] == 2


@pytest.mark.parametrize("end", [asyncio.CancelledError(), SystemExit(3), ConnectionError("it died")])
@pytest.mark.parametrize("is_heard", [True, False])
def test_whatever_ends_one_nobody_waits_for_it(rollouts: Rollouts, end: BaseException, is_heard: bool) -> None:
    """reader_killed: also when the one who is to be told of it fails himself, it is given up, and in the log."""
    rollouts.fails["bad"] = [end]
    rollouts.fails_to_hear |= set() if is_heard else {"bad"}
    rollouts.all.add(["bad", "good"])
    rollouts.all.announce(1)
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.given_up == ["bad"]
    assert (rollouts.brought, rollouts.all.lags()) == ({"good": [1]}, {"good": 0})
