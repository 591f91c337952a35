"""The library starts whole or says what is missing, and leaves the process's environment alone."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest

from tensorhub.addresses import Address
from tensorhub.errors import EngineUnavailable
from tensorhub.transport import mooncake_library
from tensorhub.transport.mooncake_library import DEVICE_ENV, PROTOCOL_ENV, acquire, default_protocol, release, spelled
from tests.support.mooncake import FakeTransferEngine, fake_library


@pytest.fixture
def loaded(monkeypatch):
    """The library is found, as the fake; what the environment held while it was imported is recorded."""
    seen: dict[str, str] = {}

    def load(name):
        assert name == "mooncake.engine"
        seen.update({key: value for key, value in os.environ.items() if key.startswith("MC_")})
        return SimpleNamespace(TransferEngine=FakeTransferEngine)

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(mooncake_library, "_loaded_for_ipv6", None)
    monkeypatch.setattr(mooncake_library, "_libraries", {})
    for name in ("MC_LOG_LEVEL", "MC_USE_IPV6"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize("missing", ["No module named 'mooncake'", "libibverbs.so.1: cannot open shared object file"])
def test_a_missing_package_or_system_library_is_named_with_what_to_install(loaded, monkeypatch, missing):
    """register_failure_is_fatal: the error says what is missing and both things to install."""

    def load(name):
        raise ImportError(missing)

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(EngineUnavailable, match=r"mooncake-transfer-engine.*apt-get install libibverbs1") as caught:
        acquire("127.0.0.1", "tcp")
    assert missing in caught.value.message


def test_switches_are_set_for_the_import_only(loaded):
    """Processes started later inherit nothing of what was set to load it quietly, for IPv6."""
    before = dict(os.environ)
    release(acquire("::1", "tcp"))
    assert loaded == {"MC_LOG_LEVEL": "ERROR", "MC_USE_IPV6": "1"}
    assert dict(os.environ) == before


def test_the_users_log_level_counts(loaded, monkeypatch):
    """Whoever asks for Mooncake's logs gets them."""
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    release(acquire("127.0.0.1", "tcp"))
    assert loaded == {"MC_LOG_LEVEL": "INFO"}
    assert os.environ["MC_LOG_LEVEL"] == "INFO"


def test_one_family_of_addresses_per_process(loaded):
    """ipv6_endpoint: the library speaks IPv4 or IPv6, decided when it is loaded; the other is refused by name."""
    release(acquire("::1", "tcp"))
    with pytest.raises(EngineUnavailable, match="loaded for IPv6 here"):
        acquire("127.0.0.1", "tcp")


def test_engines_of_one_host_and_protocol_share_the_library_object(loaded):
    """One per process: the last user ends it, and the next starts another."""
    first = acquire("127.0.0.1", "tcp")
    assert acquire("127.0.0.1", "tcp") is first
    release(first)
    assert acquire("127.0.0.1", "tcp") is first
    release(first)
    release(first)
    with pytest.raises(Exception, match="closed"):
        first.probe("127.0.0.1:1")
    second = acquire("127.0.0.1", "tcp")
    assert second is not first
    assert second.incarnation != first.incarnation
    release(second)


def test_a_forked_child_is_refused(loaded, monkeypatch):
    """The library's threads do not survive a fork: the child is told, it does not hang."""
    library = acquire("127.0.0.1", "tcp")
    monkeypatch.setattr(library, "pid", library.pid + 1)
    with pytest.raises(EngineUnavailable, match="before the fork"):
        acquire("127.0.0.1", "tcp")
    release(library)


def test_a_failed_start_is_fatal():
    """register_failure_is_fatal: no half-alive engine; the error names protocol, host and answer."""
    engine = FakeTransferEngine()
    engine.initialize_code = -1
    with pytest.raises(
        EngineUnavailable, match=f"protocol 'rdma' as 10.0.0.7: it answers -1; {PROTOCOL_ENV} and {DEVICE_ENV}"
    ):
        mooncake_library.start(engine, "10.0.0.7", "rdma")
    assert not engine.regions


def test_a_failed_registration_names_address_bytes_and_answer():
    """register_failure_is_fatal: nothing stays registered of a call that failed."""
    with fake_library() as (library, engine):
        before = dict(engine.regions)
        engine.register_code = -202
        with pytest.raises(EngineUnavailable, match=r"register 8192 bytes at 0x1000: it answers -202"):
            library.registered.add(4096, 8192)
        assert engine.regions == before
        assert library.registered.regions() == []


def test_a_name_is_never_used_for_two_lives():
    """restart_same_name_same_addr: the library forgets no peer, so that another life at its port is spelled anew."""
    with fake_library() as (library, _):
        address = Address("10.1.2.3", 15000)
        names = [library.peer_name(address, bytes([life])) for life in range(16)]
        assert len(set(names)) == 16
        assert names[:3] == ["10.1.2.3:15000", "0xa.1.2.3:15000", "10.0x1.2.3:15000"]
        assert library.peer_name(address, bytes([1])) == names[1]
        with pytest.raises(EngineUnavailable, match="16 processes were met"):
            library.peer_name(address, b"one too many")


def test_a_protocol_without_its_device_is_refused(loaded, monkeypatch, tmp_path):
    """register_failure_is_fatal: Mooncake would start TCP in its place, and late writes would land in tensors."""
    monkeypatch.delenv(DEVICE_ENV, raising=False)
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(mooncake_library, "_RDMA_DEVICES", tmp_path)
    for protocol in ("rdma", "efa"):
        with pytest.raises(EngineUnavailable, match=f"no device for {protocol}"):
            acquire("127.0.0.1", protocol)
    (tmp_path / "mlx5_0").touch()
    release(acquire("127.0.0.1", "rdma"))
    monkeypatch.setenv(DEVICE_ENV, "mlx5_0,mlx5_7")
    with pytest.raises(EngineUnavailable, match="no device mlx5_7"):
        acquire("127.0.0.1", "rdma")
    monkeypatch.setenv(DEVICE_ENV, "mlx5_0")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(EngineUnavailable, match="MC_FORCE_TCP is set"):
        acquire("127.0.0.1", "rdma")


def test_tcp_is_forced_where_a_device_is(monkeypatch):
    """Mooncake would take the device: who asks for TCP gets it, and the switch is gone afterwards."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    seen: list[str | None] = []

    class Watched(FakeTransferEngine):
        def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
            seen.append(os.environ.get("MC_FORCE_TCP"))
            return 0

    for protocol in ("tcp", "rdma"):
        mooncake_library.start(Watched(), "127.0.0.1", protocol)
    assert seen == ["1", None]
    assert "MC_FORCE_TCP" not in os.environ


@pytest.mark.parametrize("host", ["fd00::1:2", "node7.example"])
def test_other_spellings_are_the_same_host(host):
    """ipv6_endpoint: padded and unpadded groups, small and capital letters."""
    spellings = [spelled(host, life) for life in range(20)]
    assert len(set(spellings)) == 20
    assert spellings[0] == host
    if ":" in host:
        import ipaddress

        packed = bytes.fromhex("fd00000000000000 0000000000010002")
        for text in spellings:
            groups = [group.zfill(4) for group in text.split(":")] if text != host else None
            assert groups is None or bytes.fromhex("".join(groups)) == packed
        assert ipaddress.ip_address(host).packed == packed
    else:
        assert {text.lower() for text in spellings} == {host}


def test_the_protocol_is_the_users_or_follows_the_hardware(monkeypatch, tmp_path):
    """RDMA where the host has a device for it, else TCP; an unknown name is refused with the known ones."""
    monkeypatch.delenv(PROTOCOL_ENV, raising=False)
    monkeypatch.setattr(mooncake_library, "_RDMA_DEVICES", tmp_path / "absent")
    assert default_protocol() == "tcp"
    monkeypatch.setattr(mooncake_library, "_RDMA_DEVICES", tmp_path)
    assert default_protocol() == "tcp"
    (tmp_path / "mlx5_0").touch()
    assert default_protocol() == "rdma"
    monkeypatch.setenv(PROTOCOL_ENV, "efa")
    assert default_protocol() == "efa"
    monkeypatch.setenv(PROTOCOL_ENV, "pigeon")
    with pytest.raises(EngineUnavailable, match="tcp, rdma, efa, ascend"):
        default_protocol()
