"""`open` has one deadline for everything it waits for, and leaves nothing behind when it passes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import tensorhub
from tensorhub.client import runtime
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.ports import Connection, Heart


class Silent:
    """A link that never comes to an end by itself, whatever it is told."""

    address = "silent"

    async def own_host(self) -> str:
        return "127.0.0.1"

    async def connect(self, timeout_s: float) -> Connection:
        await asyncio.Event().wait()
        raise AssertionError

    async def beat(self, session: bytes, interval_ns: int) -> Heart:
        raise AssertionError


def test_several_opens_end_by_their_own_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One waits for the server, the other for the first: both are told in time, and the background thread ends."""
    monkeypatch.setattr(runtime, "parse_server", lambda _, may_start: Silent())

    def open_one(replica: str) -> str:
        with pytest.raises(ServerUnavailable, match="silent gave no session in time") as caught:
            tensorhub.open("actor", replica=replica, server="silent", timeout=0.1)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(open_one, ["a", "b"]))) == 2
    assert "tensorhub" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ({"engine": 5}, "engine must be a str or several, not 5"),
        ({"engine": ["local", 5]}, "engine must be a str or several, not "),
        ({"location": 5}, "location must be a str as 'dc/rack/host', not 5"),
        ({"location": "dc//host"}, "has an empty part"),
    ],
)
def test_options_of_another_kind_are_refused(option: dict[str, object], allowed: str) -> None:
    """The error says what is allowed, before anything is started."""
    with pytest.raises(BadRequest, match=allowed):
        tensorhub.open("actor", replica="a", server="silent", **option)  # type: ignore[arg-type]
    assert "tensorhub" not in [thread.name for thread in threading.enumerate()]
