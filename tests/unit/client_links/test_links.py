"""An address names one adapter, or says which forms there are."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tensorhub.client.links import parse_server
from tensorhub.errors import BadRequest, ServerUnavailable


@pytest.mark.parametrize("address", ["local", "local:tests-1", "local:a.b_c"])
def test_local_addresses(address: str) -> None:
    """`local` and `local:NAME` need nothing but this host; the link says what was written."""
    assert parse_server(address).address == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "locals", "local:", "local:..", "local:a/b", "local:" + "x" * 65, "http://x", "ray://", "ray:x"),
        *("frames://", "frames://h", "frames://h:0", "frames://h:x", "frames://::1:7"),
    ],
)
def test_other_addresses_are_refused(address: str) -> None:
    """What is no address is a mistake of the caller, told at once."""
    with pytest.raises(BadRequest):
        parse_server(address)


@pytest.mark.parametrize("address", ["frames://h:7", "frames://198.18.0.1:7", "frames://[2001:2::1]:7"])
def test_frames_need_nothing_but_an_address(address: str) -> None:
    """ipv6_endpoint: names and numbers of both kinds, with a port; errors repeat what was written."""
    assert parse_server(address).address == address


@pytest.mark.parametrize("scheme", ["ray", "grpc", "grpcs"])
def test_missing_adapters_are_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of a kind that this build lacks says what is missing."""
    monkeypatch.setitem(sys.modules, f"tensorhub.client.{scheme.rstrip('s')}_link", None)
    with pytest.raises(ServerUnavailable, match=f"this build has no {scheme}://"):
        parse_server(f"{scheme}://somewhere")


def test_present_adapters_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that is there gets the whole address, and whether it may start a server."""
    module = ModuleType("tensorhub.client.ray_link")
    module.ray_link = lambda address, may_start: ("link", address, may_start)
    monkeypatch.setitem(sys.modules, "tensorhub.client.ray_link", module)
    assert parse_server("ray://tensorhub") == ("link", "ray://tensorhub", True)
    assert parse_server("ray://tensorhub", may_start=False) == ("link", "ray://tensorhub", False)
