"""Where a token comes from: a named file, the environment, a file that the environment names; in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorhub.errors import BadRequest
from tensorhub.wire.token import TOKEN_BYTES_MAX, read_token


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORHUB_TOKEN", "TENSORHUB_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named file wins over the variable, the variable over the file it names; without any there is no token."""
    named, other = tmp_path / "named", tmp_path / "other"
    named.write_text("  from a named file\n")
    other.write_text("from another\n")
    assert read_token() == b""
    monkeypatch.setenv("TENSORHUB_TOKEN_FILE", str(other))
    assert read_token() == b"from another"
    monkeypatch.setenv("TENSORHUB_TOKEN", "from the variable ")
    assert read_token() == b"from the variable"
    assert read_token(str(named)) == b"from a named file"


@pytest.mark.parametrize(
    ("content", "why"),
    [(b" \n", "is empty"), (b"x" * (TOKEN_BYTES_MAX + 1), "is longer than"), (None, "cannot be read")],
)
def test_what_is_no_token_is_refused(tmp_path: Path, content: bytes | None, why: str) -> None:
    """An empty, endless or missing file is a mistake, told by its path: it must not mean "no token"."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadRequest, match=rf"token' {why}"):
        read_token(str(file))
