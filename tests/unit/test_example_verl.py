"""What examples/verl_cpu says of a run: whether rollouts were exact, whether it learned, where the time went."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.repo.sources import ROOT


@dataclass(frozen=True)
class Example:
    """The example's modules that need no verl."""

    witness: ModuleType
    outcome: ModuleType
    recipe: ModuleType


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Example:
    """Its modules, found as verl's processes find them: their folder is on the path."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "verl_cpu"))
    return Example(*(importlib.import_module(name) for name in ("witness", "outcome", "recipe")))


@pytest.fixture
def run(example: Example, tmp_path: Path) -> Any:
    """A run of two steps with an empty folder."""
    run = example.recipe.Run(
        steps=2,
        back_end="tensorhub",
        back_end_module="",
        manager=example.recipe.Manager.STOCK,
        is_frozen=False,
        folder=tmp_path,
    )
    run.record.mkdir()
    return run


def record(
    example: Example, run: Any, monkeypatch: pytest.MonkeyPatch, writer: str, version: int, **facts: Any
) -> None:
    """Writes down as a process of the run does."""
    monkeypatch.setenv(example.witness.RECORD, str(run.record))
    example.witness.write_down(writer, version, facts)


def test_equal_digests_are_exact(example: Example, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load of every rollout is compared with what was sent under its version."""
    for version, digest in ((0, "a"), (1, "b")):
        record(example, run, monkeypatch, "trainer", version, digests={"w": digest})
        for replica in ("replica-0", "replica-1"):
            record(example, run, monkeypatch, replica, version, digests={"w": digest})
    found = example.witness.exactness(run.record)
    assert (found.loads, found.replicas, found.differing, found.is_exact) == (4, 2, (), True)


@pytest.mark.parametrize("held", [{"w": "b"}, {}, {"w": "a", "x": "a"}], ids=["differs", "lacks", "has more"])
def test_any_difference_is_not_exact(
    example: Example, run: Any, monkeypatch: pytest.MonkeyPatch, held: dict[str, str]
) -> None:
    """Another digest, a tensor that is missing, one that nobody sent: each is named."""
    record(example, run, monkeypatch, "trainer", 1, digests={"w": "a"})
    record(example, run, monkeypatch, "replica-0", 1, digests=held)
    found = example.witness.exactness(run.record)
    assert not found.is_exact
    assert [(who, version) for who, version, _ in found.differing] == [("replica-0", 1)]


def test_bytes_of_another_version_are_not_exact(example: Example, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old bytes under a new step number are what the frozen control does, and are found."""
    for version, digest in ((0, "a"), (1, "b")):
        record(example, run, monkeypatch, "trainer", version, digests={"w": digest})
        record(example, run, monkeypatch, "replica-0", version, digests={"w": "a"})
    assert example.witness.exactness(run.record).differing == (("replica-0", 1, "w"),)


def test_nothing_compared_is_not_exact(example: Example, run: Any) -> None:
    """A run whose rollouts never loaded proves nothing."""
    assert not example.witness.exactness(run.record).is_exact


def test_digest_is_of_elements_in_bfloat16(example: Example) -> None:
    """A trainer's fp32 and a rollout's bfloat16 agree, whatever the strides; other elements do not."""
    masters = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7
    digest = example.witness.digest
    assert digest(masters) == digest(masters.bfloat16()) == digest(masters.t().contiguous().t())
    assert digest(masters) != digest(masters.t())


def test_phases_are_of_the_slowest(example: Example) -> None:
    """Of each phase, the slowest process's; trainer ranks and rollouts apart; what is no phase is left out."""
    step = {
        "tensorhub/rank0/gather_s": 1.0,
        "tensorhub/rank1/gather_s": 2.0,
        "tensorhub/host-7/transfer_s": 3.0,
        "tensorhub/rank0/bytes": 4,
        "tensorhub/version": 5,
        "timing_s/step": 6.0,
    }
    found = example.outcome.phases(step, [{"pull_s": 0.5, "load_s": 0.1}, {"pull_s": 0.25, "load_s": 0.2}])
    assert found == {"trainer/gather": 2.0, "rollout/transfer": 3.0, "rollout/pull": 0.5, "rollout/load": 0.2}


def test_shares_are_of_each_side(example: Example) -> None:
    """Each side's shares add up to one; the first step, in which memory is made, does not count."""
    steps = [
        {"trainer/register": 9.0},
        {"trainer/gather": 3.0, "trainer/stage": 1.0, "rollout/pull": 2.0},
        {"trainer/gather": 3.0, "trainer/stage": 1.0, "rollout/pull": 2.0},
    ]
    assert example.outcome.shares(steps) == {"trainer/gather": 0.75, "trainer/stage": 0.25, "rollout/pull": 1.0}


def test_line_that_is_being_written_is_left_out(example: Example, run: Any) -> None:
    """Steps are read while verl writes them."""
    whole = json.dumps({"step": 1, "data": {"critic/score/mean": 0.5}})
    run.metrics.write_text(whole + "\n" + whole[:20], encoding="utf-8")
    assert example.outcome.read_steps(run.metrics) == [{"critic/score/mean": 0.5}]


EXACT, DIFFERING = (), (("replica-0", 1, "w"),)


@pytest.mark.parametrize(
    ("is_frozen", "last", "differing", "complaint"),
    [
        (False, 0.9, EXACT, None),
        (False, 0.6, EXACT, "rose by 0.10 only"),
        (False, 0.9, DIFFERING, "differ from what was published"),
        (True, 0.55, DIFFERING, None),
        (True, 0.9, DIFFERING, "were frozen"),
        (True, 0.55, EXACT, "were to be frozen"),
    ],
)
def test_judgement(
    example: Example,
    tmp_path: Path,
    is_frozen: bool,
    last: float,
    differing: tuple[tuple[str, int, str], ...],
    complaint: str | None,
) -> None:
    """A real run has to learn and to be exact; one whose rollouts keep the first version must be neither."""
    run = example.recipe.Run(40, "tensorhub", "", example.recipe.Manager.STOCK, is_frozen, tmp_path)
    exact = example.witness.Exactness(loads=82, replicas=2, differing=differing)
    nothing = [0.0] * 40
    came = example.outcome.Outcome([0.5] * 30 + [last] * 10, nothing, [{}] * 40, nothing, nothing, exact)
    assert [complaint in found for found in came.complaints(run)] == ([True] if complaint else [])
