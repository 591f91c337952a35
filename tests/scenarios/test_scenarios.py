"""Every transcript beside this file is what the server says. `pytest tests/scenarios --rewrite` regenerates them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.runner import Player

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, rewrite: bool) -> None:
    """The machine tells the transcript again, word for word."""
    text = path.read_text(encoding="utf-8")
    told = Player().play(text)
    if rewrite:
        path.write_text(told, encoding="utf-8")
    else:
        assert told == text


def test_there_are_transcripts() -> None:
    """A runner that finds nothing proves nothing."""
    assert len(TRANSCRIPTS) >= 10
