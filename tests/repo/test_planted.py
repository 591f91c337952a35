"""Every layer of tests can fail: each mistake of the catalogue is seen by the layer that is named for it."""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
from _pytest.outcomes import Failed

from tests.repo.planted import PLANTED, Caught, Layer, Planted

#: A catalogue of fewer proves too little.
MISTAKES_MIN = 20
CASES = [
    pytest.param(mistake, caught, id=f"{mistake.name}-{caught.layer.name.lower()}-{index}")
    for mistake in PLANTED
    for index, caught in enumerate(mistake.caught)
]


def said(error: BaseException) -> str:
    """What a test says when it fails: its message, and its line that did not hold."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__) if "/tests/" in frame.filename]
    return f"{lines[-1]}\n{error}"


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "caught"), CASES)
def test_a_planted_mistake_is_seen(mistake: Planted, caught: Caught, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mistake in place the run fails, and says what the catalogue says that it will."""
    mistake.plant(monkeypatch)
    with pytest.raises((AssertionError, Failed)) as failure:
        caught.run()
    assert caught.says in said(failure.value), f"it was seen, but as something else: {said(failure.value)}"


def test_the_catalogue_is_whole() -> None:
    """Enough mistakes, each once, each told, and every layer must see some of them."""
    names = Counter(mistake.name for mistake in PLANTED)
    assert len(names) >= MISTAKES_MIN
    assert [name for name, count in names.items() if count > 1] == []
    assert [mistake.name for mistake in PLANTED if not mistake.plant.__doc__ or not mistake.caught] == []
    assert {caught.layer for mistake in PLANTED for caught in mistake.caught} == set(Layer)
