"""The process of a server over plain frames: what it prints, warns of and refuses, and the code it leaves with."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
from typing import Any

import pytest

from tensorhub.errors import BadRequest
from tensorhub.server import frames_command
from tests.unit.server_host.ending import Ending


def run(listen: str, host: Any, *, has_token: bool = False) -> int:
    parser = argparse.ArgumentParser()
    frames_command.add_options(parser)
    return asyncio.run(frames_command.run(host, parser.parse_args(["--listen", listen]), has_token=has_token))


@pytest.mark.parametrize("number", ["127.0.0.1", "[::1]"])
def test_the_first_line_is_what_clients_write(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """ipv6_endpoint: the address as `server=` takes it, with the port that was bound; SIGTERM ends it by 0."""
    assert run(f"{number}:0", Ending()) == 0
    address, _, port = capsys.readouterr().out.splitlines()[0].rpartition(":")
    assert address == f"frames://{number}"
    assert 0 < int(port) < 65536


def test_a_broken_machine_leaves_by_1() -> None:
    """Whoever restarts servers sees that this one did not leave of its own will."""
    assert run("127.0.0.1:0", Ending(broken=True)) == 1


@pytest.mark.parametrize(
    ("listen", "has_token", "warned"),
    [
        ("127.0.0.1:0", False, ""),
        ("0.0.0.0:0", False, "without encryption and a token"),
        ("0.0.0.0:0", True, "without encryption:"),
    ],
)
def test_it_warns_of_what_it_lacks(listen: str, has_token: bool, warned: str, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond loopback, whoever can listen in reads everything, a token too: that is told at every start."""
    with caplog.at_level(logging.WARNING, "tensorhub.server"):
        run(listen, Ending(), has_token=has_token)
    assert warned in caplog.text
    assert bool(caplog.text) == bool(warned)


def test_an_address_that_cannot_be_bound_is_refused() -> None:
    """A port that another process serves at, and what is no address: told as the caller's mistake, with the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadRequest, match=f"cannot listen at 127.0.0.1:{port}: .*another process may"):
            run(f"127.0.0.1:{port}", Ending())
    with pytest.raises(BadRequest, match="write 'here:PORT'"):
        run("here", Ending())
