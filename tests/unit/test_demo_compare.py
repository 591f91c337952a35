"""The demo's verdict: any difference in digests, names or bytes is found, named, and turns the exit code non-zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tensorhub.cli import compare, demo, weights
from tensorhub.cli.demo_view import PlainView, outcome_lines, round_lines
from tensorhub.cli.demo_worker import (
    Command,
    Digests,
    Member,
    Publish,
    Pull,
    Pulled,
    Replicate,
    Stream,
    Unpublish,
)

BYTES = {"layers.0.weight": b"weight", "layers.0.norm": b"norm"}


class DictFleet:
    """A fleet of no processes: the trainer's bytes change per round, rollouts hold them but for what a test plants."""

    def __init__(self, digests: dict[str, str] | None = None, data: dict[str, bytes] | None = None) -> None:
        self.digests = digests or {}
        self.data = data or {}
        self.version = 0
        self.pulled_version: int | None = None
        self.asked: list[str] = []

    def ask(self, commands: Mapping[Member, Command], timeout_s: float, on_progress: Any = None) -> dict[Member, Any]:
        self.asked.append(type(next(iter(commands.values()))).__name__)
        return {member: self.answer(member, command) for member, command in commands.items()}

    def answer(self, member: Member, command: Command) -> Any:
        match command:
            case Publish(version):
                self.version = version
                return 0.001
            case Unpublish():
                return 0.001
            case Replicate():
                pulls = (Pull("trainer#0", 10, "fake", "the only one"),)
                version = self.pulled_version or self.version
                return Pulled(version, 10, 0.5, True, "fake", "", pulls, {"transfer": 0.5})
            case Digests():
                found = {name: f"{name} of {self.version}" for name in BYTES}
                return found if member.replica == demo.TRAINER else found | self.digests
            case Stream():
                return [(name, len(data)) for name, data in sorted(BYTES.items())]
        return None

    def pieces(self, member: Member, nbytes: int, timeout_s: float) -> Iterable[bytes]:
        (name,) = (name for name, data in BYTES.items() if len(data) == nbytes)
        data = BYTES[name] if member.replica == demo.TRAINER else self.data.get(name, BYTES[name])
        yield data[:2]
        yield data[2:]


def course(fleet: DictFleet, rounds: int = 2) -> demo.Outcome:
    """A demo of one rollout of one shard over `fleet`."""
    options = demo.Options(weights.synthetic(2), replicas=1, shards=1, rounds=rounds)
    return demo.run(options, fleet, PlainView(None))


def test_identical_rounds_exit_zero() -> None:
    """Equal digests in every round and equal bytes at the end: identical, exit code 0."""
    outcome = course(DictFleet())
    assert outcome.identical
    assert compare.exit_code(outcome.differences) == 0
    assert [done.version for done in outcome.rounds] == [1, 2]
    assert outcome.bytes_compared == sum(map(len, BYTES.values()))
    assert outcome_lines(outcome)[-1].startswith("identical")


def test_a_differing_digest_is_named_and_exits_nonzero() -> None:
    """One tensor's digest differs in every round: its name is reported per round, and the exit code is not 0."""
    outcome = course(DictFleet(digests={"layers.0.norm": "other"}))
    assert compare.exit_code(outcome.differences) == 1
    assert [(d.replica, d.shard, d.tensor) for d in outcome.differences] == [("rollout-0", 0, "layers.0.norm")] * 2
    assert outcome.as_json()["identical"] is False
    assert outcome_lines(outcome)[-1].startswith("DIFFERENT (2 ")
    assert "DIFFERENT" in round_lines(outcome.rounds[0])[1]


def test_bytes_that_differ_under_equal_digests_exit_nonzero() -> None:
    """The last comparison trusts no digest: one byte that differs is found, with its offset."""
    outcome = course(DictFleet(data={"layers.0.weight": b"weighT"}))
    assert [str(d) for d in outcome.differences] == [
        "rollout-0#0 layers.0.weight: first different byte at offset 5",
    ]
    assert compare.exit_code(outcome.differences) == 1


def test_a_stale_version_is_a_difference() -> None:
    """A rollout that got another version than the one just published is not identical, whatever its bytes."""
    fleet = DictFleet()
    fleet.pulled_version = 7
    outcome = course(fleet, rounds=1)
    assert [d.reason for d in outcome.differences] == ["replicate returned version 7, not 1"]


def test_a_train_step_that_changes_nothing_is_a_difference() -> None:
    """A demo whose train step leaves the weights alone would show nothing, so it fails."""

    class Frozen(DictFleet):
        def answer(self, member: Member, command: Command) -> Any:
            if isinstance(command, Digests):
                return dict.fromkeys(BYTES, "same")
            return super().answer(member, command)

    outcome = course(Frozen(), rounds=1)
    assert {(d.replica, d.tensor) for d in outcome.differences} == {("trainer", name) for name in BYTES}


def test_the_trainer_unpublishes_before_each_further_step() -> None:
    """Published weights are never written: between two train steps lies an unpublish."""
    fleet = DictFleet()
    course(fleet, rounds=3)
    between = "".join({"Step": "S", "Publish": "P", "Replicate": "R", "Unpublish": "U"}.get(n, "") for n in fleet.asked)
    assert between == "SPRU" * 3


@pytest.mark.parametrize(
    ("expected", "found", "names"),
    [
        ({}, {}, []),
        ({"a": "1"}, {"a": "1"}, []),
        ({"a": "1", "b": "2"}, {"a": "1"}, ["b"]),
        ({"a": "1"}, {"a": "1", "b": "2"}, ["b"]),
        ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, ["a", "b"]),
    ],
)
def test_every_differing_name_is_listed(expected: dict[str, str], found: dict[str, str], names: list[str]) -> None:
    """Missing, superfluous and differing names are all listed, not the first one."""
    assert [d.tensor for d in compare.compare_digests("r", 0, expected, found)] == names


@pytest.mark.parametrize(
    ("mine", "theirs", "offset"),
    [(b"", b"", None), (b"abc", b"abc", None), (b"abc", b"abd", 2), (b"ab", b"abc", 2), (b"abc", b"", 0)],
)
def test_first_different_byte(mine: bytes, theirs: bytes, offset: int | None) -> None:
    """The offset is that of the first byte that differs; a length that differs is a difference."""
    assert compare.compare_piece(mine, theirs) == offset


def test_digest_covers_dtype_and_shape() -> None:
    """Equal bytes under another dtype or shape are another tensor."""
    digests = {
        compare.digest("float32", (2,), b"12345678"),
        compare.digest("float32", (1, 2), b"12345678"),
        compare.digest("int32", (2,), b"12345678"),
        compare.digest("float32", (2,), b"12345679"),
    }
    assert len(digests) == 4
