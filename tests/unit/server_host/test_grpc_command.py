"""The process of a gRPC server: what it prints, warns of and refuses, and the code it leaves with."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from typing import Any

import pytest

from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.server import grpc_command
from tensorhub.server.__main__ import main
from tests.unit.server_host.ending import Ending


def run(*arguments: str, host: Any, has_token: bool = False) -> int:
    parser = argparse.ArgumentParser()
    grpc_command.add_options(parser)
    options = parser.parse_args(arguments)
    return asyncio.run(grpc_command.run(host, options, has_token=has_token))


def test_the_first_line_is_the_bound_address(capsys: pytest.CaptureFixture[str]) -> None:
    """A script reads where it serves from the first line; SIGTERM ends it by 0."""
    assert run("--listen", "127.0.0.1:0", host=Ending()) == 0
    scheme, _, port = capsys.readouterr().out.splitlines()[0].rpartition(":")
    assert scheme == "grpc://127.0.0.1"
    assert 0 < int(port) < 65536


def test_a_broken_machine_leaves_by_1() -> None:
    """Whoever restarts servers sees that this one did not leave of its own will."""
    assert run("--listen", "127.0.0.1:0", host=Ending(broken=True)) == 1


@pytest.mark.parametrize(
    ("listen", "has_token", "warned"),
    [("127.0.0.1:0", False, ""), ("0.0.0.0:0", False, "without TLS and a token"), ("0.0.0.0:0", True, "without TLS:")],
)
def test_it_warns_of_what_it_lacks(listen: str, has_token: bool, warned: str, caplog: pytest.LogCaptureFixture) -> None:
    """Beyond loopback, everybody who can connect is trusted unless TLS and a token say otherwise: that is told."""
    with caplog.at_level(logging.WARNING, "tensorhub.server"):
        run("--listen", listen, host=Ending(), has_token=has_token)
    assert warned in caplog.text
    assert bool(caplog.text) == bool(warned)


def test_default_is_all_addresses_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """ipv6_endpoint: both kinds of IP where there are both, else IPv4 alone."""
    assert str(grpc_command.default_listen()) == "[::]:50051"

    def no_ipv6(family: int, kind: int) -> None:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr(socket, "socket", no_ipv6)
    assert str(grpc_command.default_listen()) == "0.0.0.0:50051"


def test_options_that_do_not_belong_together_are_refused() -> None:
    """Half of TLS is no TLS, and must not be taken for it."""
    for half in (["--tls-cert", "x"], ["--tls-key", "x"], ["--tls-client-ca", "x"]):
        with pytest.raises(BadRequest, match="both --tls-cert and --tls-key"):
            run("--listen", "127.0.0.1:0", *half, host=Ending())


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tensorhub serve` without grpc names the extra, and no traceback."""
    monkeypatch.delitem(sys.modules, "tensorhub.server.grpc_service", raising=False)
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    with pytest.raises(ServerUnavailable, match=r"pip install '\.\[grpc\]'"):
        run("--listen", "127.0.0.1:0", host=Ending())
    log = logging.getLogger("tensorhub")  # `main` sets it up: put back afterwards
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", log.level)
    assert main(["grpc", "--listen", "127.0.0.1:0"]) == 1
    assert "ServerUnavailable: a server over gRPC needs the module" in capsys.readouterr().err
