"""A server over plain frames as a process: the main job, a restart at the same address, its token, its end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import tensorhub
from tensorhub.errors import Unauthorized
from tests.integration.conftest import blank, same, weights
from tests.support.grpc_servers import grpc_server

pytestmark = pytest.mark.slow
SHORT = ("--lease-s", "2.0", "--beat-s", "0.2")


def test_the_main_job_outlives_a_server_over_frames(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """server_recreated_same_name: with a token, publish and replicate; killed and started again at the same port, the
    new, empty server hears what both hold, and a third reader gets it. Who shows no token is refused; SIGTERM ends it
    by 0."""
    (tmp_path / "token").write_text("secret")
    with_token = ("--token-file", str(tmp_path / "token"), *SHORT)
    with grpc_server("127.0.0.1:0", *with_token, kind="frames") as server:
        with pytest.raises(Unauthorized):
            tensorhub.open("actor", replica="stranger", server=server.address)
        monkeypatch.setenv("TENSORHUB_TOKEN", "secret")
        trainer = tensorhub.open("actor", replica="trainer", server=server.address)
        trainer.register(weights(1))
        trainer.publish(version=1)
        rollout, first = tensorhub.open("actor", replica="rollout", server=server.address), blank(weights(1))
        rollout.register(first)
        assert rollout.replicate(timeout=20).version == 1
        server.end()
        with grpc_server(f"127.0.0.1:{server.port}", *with_token, kind="frames") as again:
            assert again.address == server.address
            late, second = tensorhub.open("actor", replica="late", server=again.address), blank(weights(1))
            late.register(second)
            assert late.replicate(timeout=20).version == 1
            assert same(first, weights(1))
            assert same(second, weights(1))
            tensorhub.shutdown()
            log = again.end(signal.SIGTERM)
            assert again.process.returncode == 0
            assert "secret" not in log
