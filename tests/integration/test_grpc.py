"""The main job over a real gRPC server: exact, through restarts, stops and held interpreters; real TLS and tokens."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import tensorhub
from tensorhub import Hub
from tensorhub import messages as m
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.errors import DrainTimeout, ServerUnavailable, Unauthorized
from tests.integration.conftest import blank, same, weights
from tests.support.certificates import authority
from tests.support.grpc_servers import GrpcServer, grpc_server
from tests.support.process import child
from tests.support.servers import new_session_id
from tests.support.session_process import SessionProcess

pytestmark = pytest.mark.slow
LEASE_S = 2.0
SHORT = ("--lease-s", str(LEASE_S), "--beat-s", "0.2")


@pytest.fixture
def server() -> Iterator[GrpcServer]:
    with grpc_server("127.0.0.1:0", *SHORT) as started:
        yield started
        tensorhub.shutdown()


def open_hub(replica: str, address: str, tensors: object = None, **options: object) -> Hub:
    hub = tensorhub.open("actor", replica=replica, server=address, **options)
    if tensors is not None:
        hub.register(tensors)
    return hub


def _train(pipe: Connection, address: str) -> None:
    """Publishes a version for every seed that it is told, and takes the one before back first."""
    ours = weights(1)
    with open_hub("trainer", address, ours) as hub:
        while (seed := pipe.recv()) is not None:
            if hub.version is not None:
                hub.unpublish(timeout=20)
            for name, tensor in weights(seed).items():
                ours[name].copy_(tensor)
            hub.publish(version=seed)
            pipe.send(seed)


def test_the_main_job_is_exact(server: GrpcServer) -> None:
    """Publish in one process, replicate in another, several rounds; a second reader is served by the first."""
    mine, others = blank(weights(1)), blank(weights(1))
    with child(_train, server.address) as trainer:
        rollout, second = open_hub("rollout", server.address, mine), open_hub("second", server.address, others)
        for seed in (1, 2, 3):
            trainer.tell(seed)
            assert trainer.hear() == seed
            for hub in (rollout, second):
                assert hub.replicate("latest", timeout=20).version == seed
            assert same(mine, weights(seed))
            assert same(others, weights(seed))
        trainer.tell(None)


def test_holdings_outlive_their_server(server: GrpcServer) -> None:
    """server_recreated_same_name: killed and started again at the same port, the new, empty server hears what everybody
    holds; old readers hold, new ones pull, and the next version goes round as if nothing had been."""
    mine, others = blank(weights(1)), blank(weights(1))
    with child(_train, server.address) as trainer:
        trainer.tell(1)
        trainer.hear()
        rollout, second = open_hub("rollout", server.address, mine), open_hub("second", server.address, others)
        rollout.replicate(1, timeout=20)
        server.end()
        with grpc_server(f"127.0.0.1:{server.port}", *SHORT) as again:
            assert again.address == server.address
            assert rollout.replicate("latest", timeout=30).already_held
            assert second.replicate("latest", timeout=30).version == 1
            trainer.tell(2)
            assert trainer.hear() == 2
            assert second.replicate("latest", timeout=30).version == 2
            assert same(others, weights(2))
            trainer.tell(None)
            tensorhub.shutdown()


def test_a_dead_server_holds_up_training_no_longer_than_the_timeout(server: GrpcServer) -> None:
    """With no server to be had, unpublish ends by its timeout and stays hidden; `abandon` returns."""
    ours = weights(1, rows=8)
    trainer = open_hub("trainer", server.address, ours)
    trainer.publish(version=1, digest="now")
    server.end()
    with pytest.raises(DrainTimeout):
        trainer.unpublish(timeout=0.5)
    trainer.unpublish(timeout=0.5, abandon=True)
    ours["norm.bias"].add_(1)


def test_two_servers_and_two_jobs_do_not_mix(server: GrpcServer) -> None:
    """two_jobs_same_cluster: one name, three places: a second job on this server, and another server."""
    with grpc_server("127.0.0.1:0", *SHORT) as other:
        places = [(server.address, "one"), (server.address, "two"), (other.address, "one")]
        for number, (address, job) in enumerate(places):
            open_hub("trainer", address, weights(number), job=job).publish(version=number)
        for number, (address, job) in enumerate(places):
            mine = blank(weights(number))
            rollout = open_hub("rollout", address, mine, job=job)
            assert rollout.replicate("latest", timeout=20).version == number
            assert same(mine, weights(number))
        tensorhub.shutdown()


def _hold_the_interpreter(pipe: Connection, address: str, seconds: float) -> None:
    with open_hub("trainer", address, weights(1)) as hub:
        hub.publish(version=1, digest="now")
        pipe.send("published")
        pipe.recv()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL: the interpreter lock is held all the while
        pipe.send("back")
        pipe.recv()


def test_a_trainer_that_holds_the_interpreter_stays_alive(server: GrpcServer) -> None:
    """Heartbeats need no interpreter of the trainer's: holding its lock for twice a lease costs it nothing."""
    with child(_hold_the_interpreter, server.address, 2 * LEASE_S) as trainer:
        assert trainer.hear() == "published"
        observer = open_hub("observer", server.address)
        events = observer.watch(timeout=3 * LEASE_S)
        trainer.tell("go")
        assert trainer.hear() == "back"
        assert [view.complete for view in observer.versions()] == [("trainer",)]
        trainer.tell("end")
        kinds = []
        for event in events:
            kinds.append(event.kind)
            if event.kind == "left":
                break
        assert "expired" not in kinds


async def until_gone_or_there(address: str, session: str, *, there: bool) -> None:
    asking = Session(parse_server(address), new_session_id(), host="host", pid=os.getpid())
    await asking.open(20.0)
    async with asyncio.timeout(20.0):
        while True:
            view = await asking.call(m.Status(None), 10.0)
            if (session in {row.session.hex() for row in view.sessions}) == there:
                break
            await asyncio.sleep(0.02)
    await asking.close(5.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_silent_client_expires(server: GrpcServer, number: signal.Signals) -> None:
    """reader_killed, source_stopped: whoever is killed or stopped is forgotten within its lease, whatever beats for
    it; one that goes on knows that it lapsed, and is welcome again."""
    client = SessionProcess(server.address, "victim")
    try:
        victim = str(client.report()["session"])
        asyncio.run(until_gone_or_there(server.address, victim, there=True))
        client.process.send_signal(number)
        asyncio.run(until_gone_or_there(server.address, victim, there=False))
        if number == signal.SIGSTOP:
            client.process.send_signal(signal.SIGCONT)
            asyncio.run(until_gone_or_there(server.address, victim, there=True))
            report = client.ask()
            assert (report["lapses"], report["fenced"]) == (1, False)
    finally:
        client.end()


def test_after_the_last_hub_nothing_is_left(server: GrpcServer) -> None:
    """Opening and closing again and again leaves no process, and as many descriptors as before."""
    counts = []
    for _ in range(6):
        open_hub("one", server.address).close()
        tensorhub.shutdown()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert not any(b"grpc_beat" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[1] + 2


def connect_and_close(address: str, token: bytes = b"") -> None:
    async def main() -> None:
        session = Session(parse_server(address), new_session_id(), host="host", pid=1, token=token)
        await session.open(5.0)
        await session.close(5.0)

    asyncio.run(main())


def test_tls_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom the server's certificate does not convince does not talk to it; whom the token does not, is not let in,
    and is told at once: nothing of this is tried again."""
    token = tmp_path / "token"
    token.write_text("a secret\n")
    with authority() as ca, authority() as stranger:
        pair, elsewhere = ca.issue("server"), ca.issue("elsewhere", "DNS:elsewhere.example")
        tls = ("--tls-cert", pair.cert, "--tls-key", pair.key)
        with grpc_server("localhost:0", *tls, "--token-file", str(token)) as server:
            assert server.address.startswith("grpcs://localhost:")
            monkeypatch.setenv("TENSORHUB_TLS_CA", stranger.cert)
            with pytest.raises(Unauthorized, match="certificate that is not trusted here"):
                asyncio.run(parse_server(server.address).connect(5.0))
            monkeypatch.setenv("TENSORHUB_TLS_CA", ca.cert)
            for shown, why in ((b"", "was shown none"), (b"another", "was shown another")):
                with pytest.raises(Unauthorized, match=why):
                    connect_and_close(server.address, shown)
            with pytest.raises(ServerUnavailable, match=r"does it speak TLS.*grpcs://"):
                asyncio.run(parse_server(server.address.replace("grpcs", "grpc")).connect(5.0))
            monkeypatch.setenv("TENSORHUB_TOKEN_FILE", str(token))
            trainer = open_hub("trainer", server.address, weights(1, rows=8))
            trainer.publish(version=1)
            mine = blank(weights(1, rows=8))
            assert open_hub("rollout", server.address, mine).replicate(timeout=20).version == 1
            assert same(mine, weights(1, rows=8))
            tensorhub.shutdown()
            log = server.end(signal.SIGTERM)
            assert server.process.returncode == 0
            assert "without" not in log
            assert "secret" not in log
        monkeypatch.delenv("TENSORHUB_TOKEN_FILE")
        with grpc_server("localhost:0", "--tls-cert", elsewhere.cert, "--tls-key", elsewhere.key) as other:
            with pytest.raises(Unauthorized, match="certificate of another name"):
                asyncio.run(parse_server(other.address).connect(5.0))
            monkeypatch.setenv("TENSORHUB_TLS_SERVER_NAME", "elsewhere.example")
            connect_and_close(other.address)


def test_mutual_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CA for clients, nobody without a certificate of it gets as far as a Hello."""
    with authority() as ca, authority() as stranger:
        pair, client, other = ca.issue("server"), ca.issue("client"), stranger.issue("client")
        tls = ("--tls-cert", pair.cert, "--tls-key", pair.key, "--tls-client-ca", ca.cert)
        with grpc_server("localhost:0", *tls) as server:
            monkeypatch.setenv("TENSORHUB_TLS_CA", ca.cert)
            for shown in (None, other):
                if shown is not None:
                    monkeypatch.setenv("TENSORHUB_TLS_CERT", shown.cert)
                    monkeypatch.setenv("TENSORHUB_TLS_KEY", shown.key)
                with pytest.raises(ServerUnavailable, match=r"TENSORHUB_TLS_CERT and TENSORHUB_TLS_KEY"):
                    asyncio.run(parse_server(server.address).connect(5.0))
            monkeypatch.setenv("TENSORHUB_TLS_CERT", client.cert)
            monkeypatch.setenv("TENSORHUB_TLS_KEY", client.key)
            connect_and_close(server.address)


def test_the_command_says_where_it_serves_and_what_it_lacks() -> None:
    """`tensorhub serve`: the address comes first; beyond loopback without TLS and token there is a warning; SIGINT is a
    clean end, and sessions see it."""
    with grpc_server("0.0.0.0:0", TENSORHUB_TOKEN="x") as server:
        assert server.address.startswith("grpc://0.0.0.0:")
        with pytest.raises(Unauthorized):
            connect_and_close(f"grpc://127.0.0.1:{server.port}")
        connect_and_close(f"grpc://127.0.0.1:{server.port}", b"x")
        log = server.end(signal.SIGINT)
        assert server.process.returncode == 0
    assert "listens beyond this host without TLS: see" in log
    assert "the server has left" in log


def test_the_server_imports_no_torch_and_stops_with_open_sessions(server: GrpcServer) -> None:
    """SIGTERM with sessions connected ends in a moment: streams are closed, not waited for."""
    client = SessionProcess(server.address, "one")
    try:
        client.report()
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "cygrpc" in maps
        assert "libtorch" not in maps
        server.end(signal.SIGTERM)
        assert server.process.returncode == 0
    finally:
        client.end()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--listen", "nonsense"], "write 'nonsense:PORT'"),
        (["--listen", "203.0.113.1:0"], "cannot listen at 203.0.113.1:0"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "x"], "both --tls-cert and --tls-key"),
        (["--listen", "127.0.0.1:0", "--tls-cert", "/no", "--tls-key", "/no"], "cannot be used"),
        (["--listen", "127.0.0.1:0", "--token-file", "/nowhere"], "cannot be read"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: list[str], why: str) -> None:
    """One line that says what is wrong, exit code 2, no traceback."""
    command = [sys.executable, "-m", "tensorhub", "serve", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert "Traceback" not in done.stderr
