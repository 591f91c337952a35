"""What chaos acts with: a way that can be cut, connections that the kernel paces, workers heard and signalled."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

import pytest

from tensorhub.addresses import Address
from tensorhub.cli import demo, pace, weights
from tensorhub.cli.chaos.partition import Partition
from tensorhub.cli.demo_worker import Member, Open, Publish, Replicate, Result
from tensorhub.cli.fleet import ProcessFleet, WorkerFailed
from tests.unit import fake_hub

#: A hang guard; loopback takes microseconds.
PATIENCE_S = 20.0


@pytest.fixture
def ends():
    """A client through a partition, and the end of the server that it reached."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Partition(Address(*server.getsockname())) as partition,
        socket.create_connection((partition.at.host, partition.at.port), PATIENCE_S) as client,
    ):
        server.settimeout(PATIENCE_S)
        served, _ = server.accept()
        served.settimeout(PATIENCE_S)
        with served:
            yield client, served, partition


def test_a_whole_way_forwards_both_ways_and_the_end(ends: tuple[socket.socket, socket.socket, Partition]) -> None:
    """Bytes cross in order in both directions, and a connection that one end closes is closed at the other."""
    client, served, _ = ends
    client.sendall(b"there")
    assert served.recv(100) == b"there"
    served.sendall(b"and back")
    assert client.recv(100) == b"and back"
    served.close()
    assert client.recv(100) == b""


def test_a_cut_way_is_silent_and_loses_nothing(ends: tuple[socket.socket, socket.socket, Partition]) -> None:
    """While it is cut nothing arrives and nothing breaks; mended, what was sent meanwhile arrives."""
    client, served, partition = ends
    client.sendall(b"before")
    assert served.recv(100) == b"before"
    partition.cut()
    client.sendall(b"meanwhile")
    served.settimeout(0.1)
    with pytest.raises(TimeoutError):
        served.recv(100)
    served.settimeout(PATIENCE_S)
    partition.mend()
    assert served.recv(100) == b"meanwhile"


def test_a_way_to_nobody_ends_the_connection() -> None:
    """Where the server is dead, whoever comes sees a closed connection, not a silent one."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        at = Address(*gone.getsockname())
    with (
        Partition(at) as partition,
        socket.create_connection((partition.at.host, partition.at.port), PATIENCE_S) as one,
        contextlib.suppress(ConnectionResetError),
    ):
        assert one.recv(1) == b""


def test_pacing_reaches_connections_old_and_new() -> None:
    """A listener hands its pace to whom it accepts; open connections are paced, too; 0 ends it."""

    def rate(sock: socket.socket) -> int:
        return sock.getsockopt(socket.SOL_SOCKET, pace.SO_MAX_PACING_RATE)

    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as before,
    ):
        pace.slow_down(1_000_000)
        with socket.create_connection(server.getsockname()), server.accept()[0] as after:
            assert [rate(sock) for sock in (client, before, after)] == [1_000_000] * 3
            pace.slow_down(0)
            assert rate(after) not in (0, 1_000_000)


@pytest.mark.slow
def test_workers_are_heard_one_by_one_and_signalled(tmp_path) -> None:
    """A command is begun and its answer heard later; a stopped worker is silent, a killed one is named as dead."""
    trainer, rollout = Member("trainer", 0), Member("rollout-0", 0)
    asked = demo.Options(weights.synthetic(1), replicas=1, shards=1, rounds=1, server=str(tmp_path))
    with ProcessFleet(demo.setups(asked), fake_hub.main) as fleet:
        fleet.ask({trainer: Open(), rollout: Open()}, 100.0)
        fleet.begin(trainer, Publish(3))
        assert isinstance(fleet.hear(trainer, 60.0), Result)
        fleet.signal(rollout, signal.SIGSTOP)
        fleet.begin(rollout, Replicate())
        with pytest.raises(WorkerFailed, match=r"rollout-0#0: said nothing for 0\.1 s"):
            fleet.hear(rollout, 0.1)
        fleet.signal(rollout, signal.SIGCONT)
        answer = fleet.hear(rollout, 60.0)
        while not isinstance(answer, Result):
            answer = fleet.hear(rollout, 60.0)
        assert answer.value.version == 3
        assert answer.at_s <= time.monotonic()
        fleet.signal(trainer, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="died of signal 9"):
            fleet.signal(trainer, signal.SIGSTOP)
