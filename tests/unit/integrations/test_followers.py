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
        self.busy: dict[str, int] = {}
        self.gates: dict[str, threading.Event] = {}
        self.arrived: dict[str, threading.Event] = {}
        self.all = Followers(self.bring, self.give_up, ConnectionError)

    async def bring(self, name: str, version: int, is_first: bool) -> None:
        await asyncio.sleep(0)  # there is a loop to await on
        if name in self.arrived:
            self.arrived[name].set()
        self.busy[name] = self.busy.get(name, 0) + 1
        assert self.busy[name] == 1, "two bring it at once"
        if name in self.gates:
            assert self.gates[name].wait(PATIENCE_S)
        self.busy[name] -= 1
        if self.fails.get(name):
            raise self.fails[name].pop(0)
        self.brought.setdefault(name, []).append(version)
        if is_first:
            self.firsts.append((name, version))

    def give_up(self, name: str) -> None:
        self.all.remove([name])  # as a manager does that forgets it
        self.given_up.append(name)

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


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_added_again_is_brought_by_one_alone(rollouts: Rollouts, fails: bool) -> None:
    """A consumer that is removed and added again while it is being brought: the next begins when that is over, and what
    came of it is nothing to him."""
    begun, go_on = rollouts.hold("a")
    rollouts.fails["a"] = [ConnectionError("it died")] if fails else []
    rollouts.all.add(["a"])
    rollouts.all.announce(1)
    assert begun.wait(PATIENCE_S)
    rollouts.all.remove(["a"])
    rollouts.all.add(["a"])
    rollouts.all.announce(2)
    go_on.set()
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.given_up == []
    assert rollouts.brought["a"][-1] == 2
    assert rollouts.all.lags() == {"a": 0}


@pytest.mark.parametrize("end", [asyncio.CancelledError, SystemExit])
def test_whatever_ends_one_nobody_waits_for_it(rollouts: Rollouts, end: type[BaseException]) -> None:
    """all_errors_surface: a consumer whose thread ends otherwise than by an error is given up as any other."""
    rollouts.fails["odd"] = [end() for _ in range(TRIES)]
    rollouts.all.add(["odd", "good"])
    rollouts.all.announce(1)
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.given_up == ["odd"]
    assert rollouts.all.lags() == {"good": 0}


def test_who_cannot_be_told_of_a_loss_is_not_waited_for(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback that raises costs its own news, told in the log, and nothing else."""

    def raises(name: str) -> None:
        raise RuntimeError(f"no {name} is known")

    monkeypatch.setattr(rollouts.all, "_gave_up", raises)
    rollouts.fails["odd"] = [ConnectionError("it died")]
    rollouts.all.add(["odd", "good"])
    rollouts.all.announce(1)
    rollouts.all.wait(PATIENCE_S)
    assert rollouts.all.lags() == {"good": 0}
    assert "nobody could be told" in caplog.text
