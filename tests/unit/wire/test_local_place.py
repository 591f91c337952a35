"""The local server's directory is private, its locks exclude, and only this user is served."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tensorhub.errors import BadRequest, Unauthorized
from tensorhub.wire import local_place
from tensorhub.wire.local_place import LOG, SERVER_LOCK, LocalPlace, check_peer, runtime_dir, unlock

ANOTHER_USER = os.geteuid() + 1


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPlace:
    tmp_path.chmod(0o700)
    monkeypatch.setenv(local_place.RUNTIME_DIR_ENV, str(tmp_path))
    opened = LocalPlace.open("one")
    yield opened
    opened.close()
    opened.close()


def test_runtime_dir_prefers_the_explicit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen directory, else the login session's, else one in /tmp that carries the user's number."""
    monkeypatch.setenv(local_place.RUNTIME_DIR_ENV, "/chosen")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_dir() == "/chosen"
    monkeypatch.delenv(local_place.RUNTIME_DIR_ENV)
    assert runtime_dir() == "/run/user/7/tensorhub"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_dir() == f"/tmp/tensorhub-{os.geteuid()}"


def test_foreign_directory_is_refused(place: LocalPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that somebody else made first is not used, whatever its mode."""
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
    with pytest.raises(BadRequest, match="belongs to user"):
        LocalPlace.open("one")


def test_symbolic_link_is_refused(place: LocalPlace, tmp_path: Path) -> None:
    """A link in the directory's place leads nobody elsewhere."""
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(BadRequest, match="cannot use"):
        LocalPlace.open("two")


def test_a_directory_that_cannot_be_made_is_no_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session asks again for what is unavailable, until its deadline; below a file nothing can be made."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TENSORHUB_RUNTIME_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(BadRequest, match=r"cannot use .* set TENSORHUB_RUNTIME_DIR"):
        LocalPlace.open("one")


def test_lock_excludes_until_unlocked(place: LocalPlace) -> None:
    """One holder at a time; `unlock` frees it even while a forked child holds a copy of the descriptor."""
    held = place.lock(SERVER_LOCK)
    assert held is not None
    assert place.lock(SERVER_LOCK) is None
    copy = os.dup(held)
    unlock(held)
    again = place.lock(SERVER_LOCK)
    assert again is not None
    unlock(again)
    os.close(copy)


def test_lock_of_a_removed_file_is_no_lock(place: LocalPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner that removes the file between open and lock does not make two holders."""
    real_flock = local_place.fcntl.flock

    def remove_then_lock(fd: int, operation: int) -> None:
        (tmp_path / "one" / SERVER_LOCK).unlink()
        real_flock(fd, operation)

    monkeypatch.setattr(local_place.fcntl, "flock", remove_then_lock)
    assert place.lock(SERVER_LOCK) is None


def test_strangers_are_refused_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer of this user is known by its pid; one of another user is `Unauthorized`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert check_peer(ours) == os.getpid()
        monkeypatch.setattr(os, "geteuid", lambda: ANOTHER_USER)
        with pytest.raises(Unauthorized, match="serves user"):
            check_peer(ours)


def test_nobody_listens(place: LocalPlace) -> None:
    """No socket, or one left behind: no connection, and no error either."""
    assert place.connect() is None
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(place.socket_path)
    assert place.connect() is None


def test_log_tail_is_short(place: LocalPlace, tmp_path: Path) -> None:
    """Errors carry the last lines of a log of any size, or nothing."""
    assert place.log_tail() == ""
    (tmp_path / "one" / LOG).write_text("\n".join(f"line {number}" for number in range(10_000)))
    assert place.log_tail(2) == "line 9998\nline 9999"
