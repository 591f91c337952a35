"""The local server as a real process: elected once, replaced after death, gone when idle, deaf to strangers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tensorhub import messages as m
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.types import Digest, Generation, ReplicaId, Seat, Version
from tests.support.servers import LocalServers, is_server, new_session_id, private_servers, until
from tests.support.session_process import MODEL, SessionProcess, join_of

pytestmark = pytest.mark.slow
CONTENT = m.Content(Digest(b"d" * 16), 1 << 20, 16, True)
ROOT = Digest(b"r" * 16)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServers]:
    """Private servers with short leases, that leave some seconds after the last client."""
    with private_servers(tmp_path, monkeypatch, LEASE_S=1.0, BEAT_S=0.2, LOCAL_IDLE_S=5.0) as private:
        yield private


def session(name: str = "one") -> Session:
    return Session(parse_server(f"local:{name}"), new_session_id(), host="host", pid=os.getpid())


def with_session(case: Callable[[Session], Awaitable[None]], name: str = "one") -> None:
    async def main() -> None:
        opened = session(name)
        await opened.open(20.0)
        await case(opened)
        await opened.close(5.0)

    asyncio.run(main())


async def sessions_of(asking: Session) -> set[str]:
    view = await asking.call(m.Status(None), 10.0)
    assert isinstance(view, m.StatusView)
    return {row.session.hex() for row in view.sessions}


async def until_sessions(asking: Session, condition: Callable[[set[str]], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not condition(await sessions_of(asking)):
            await asyncio.sleep(0.02)


def test_eight_starters_elect_one_server(servers: LocalServers) -> None:
    """concurrent_first_contact: processes that come at once start one server, and all speak to it."""
    clients = [SessionProcess("local:one", f"replica-{number}") for number in range(8)]
    try:
        assert len({client.report()["epoch"] for client in clients}) == 1
        assert len(servers.pids("one")) == 1
    finally:
        for client in clients:
            client.end()


def test_killed_server_is_replaced_and_told_what_is_held(servers: LocalServers) -> None:
    """server_restart_midtransfer: after SIGKILL sessions start the next life themselves and claim what they hold."""
    seat = Seat(MODEL, ReplicaId("trainer"), 0)
    generation = Generation(os.urandom(16))
    version = Version("main", 7)
    claim = m.Claim("a", version, generation, CONTENT, ROOT, True, 16, (), b"")
    claiming = m.Join(seat, 1, "layout", False, join_of("trainer").location, (claim,))

    async def case(opened: Session) -> None:
        heard: list[object] = []
        await opened.call(join_of("trainer"), 5.0)
        await opened.call(m.Publish(seat, "a", version, generation, CONTENT, (), b""), 5.0)
        await opened.call(m.Seal(seat, generation, ROOT), 5.0)
        opened.subscribe(seat, heard.append, lambda: claiming)
        before = await opened.call(m.List(MODEL), 5.0)
        epoch = opened.epoch
        servers.kill("one")
        assert await opened.call(m.List(MODEL), 20.0) == before
        assert opened.epoch != epoch
        assert [type(reply) for reply in heard] == [m.Joined]
        assert not opened.fenced()

    with_session(case)
    assert len(servers.pids("one")) == 2


def test_idle_server_leaves_and_the_next_client_finds_another(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there for the idle time: the process ends, its socket is gone, and a later client starts anew."""
    monkeypatch.setenv("TENSORHUB_LOCAL_IDLE_S", "0.1")

    async def case(opened: Session) -> None:
        assert await opened.call(m.List(MODEL), 5.0) == m.Listing(())

    with_session(case)
    (pid,) = servers.pids("one")
    until(lambda: servers.left("one") == [pid] and not is_server(pid), "leaving")
    assert not (servers.root / "one" / "socket").exists()
    with_session(case)
    assert len(servers.pids("one")) == 2


def test_clients_that_come_while_the_server_leaves_are_served(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving races with nobody: whatever moment a client picks, its calls are answered."""
    monkeypatch.setenv("TENSORHUB_LOCAL_IDLE_S", "0.02")

    async def case(opened: Session) -> None:
        assert await opened.call(m.List(MODEL), 20.0) == m.Listing(())

    for pause_s in (0.0, 0.01, 0.018, 0.02, 0.022, 0.03):
        with_session(case)
        asyncio.run(asyncio.sleep(pause_s))


def test_stale_socket_is_replaced(servers: LocalServers) -> None:
    """A socket that nobody listens on, left by a killed server, is in nobody's way."""
    place = servers.root / "one"
    place.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left_over:
        left_over.bind(str(place / "socket"))

    async def case(opened: Session) -> None:
        assert await opened.call(m.List(MODEL), 5.0) == m.Listing(())

    with_session(case)


def test_directory_open_to_others_is_refused(servers: LocalServers) -> None:
    """Where others may write, nobody is trusted: the error names the directory and what to do."""
    (servers.root / "one").mkdir(mode=0o700)
    (servers.root / "one").chmod(0o755)
    with pytest.raises(BadRequest, match=r"open to others \(mode 755\); chmod it to 700"):
        with_session(lambda opened: asyncio.sleep(0))


def test_server_that_cannot_start_explains_itself(servers: LocalServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a client whose server cannot start carries the last lines of the server's log."""
    monkeypatch.setenv("TENSORHUB_LEASE_S", "soon")

    async def main() -> None:
        with pytest.raises(ServerUnavailable, match=r"cannot start(.|\n)*invalid float value: 'soon'"):
            await parse_server("local:one").connect(20.0)

    asyncio.run(main())


def test_long_directory_holds_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of 107 bytes on a socket's path is no limit on where the runtime directory lies."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()

    async def case(opened: Session) -> None:
        assert await opened.call(m.List(MODEL), 5.0) == m.Listing(())

    with private_servers(deep, monkeypatch, LOCAL_IDLE_S=1.0):
        with_session(case)


def test_namespaces_do_not_mix(servers: LocalServers) -> None:
    """two_jobs_same_cluster: servers of two names know nothing of each other; one seat may be taken in both."""

    async def case(one: Session) -> None:
        two = session("two")
        await two.open(20.0)
        assert one.epoch != two.epoch
        await one.call(join_of("r"), 5.0)
        await two.call(join_of("r"), 5.0)
        assert await sessions_of(two) == {two.id.hex()}
        await two.close(5.0)

    with_session(case)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_silent_client_expires(servers: LocalServers, number: signal.Signals) -> None:
    """reader_killed, source_stopped: a client that is killed or stopped is forgotten within its lease."""
    client = SessionProcess("local:one", "victim")
    victim = str(client.report()["session"])

    async def case(opened: Session) -> None:
        await until_sessions(opened, lambda seen: victim in seen)
        client.process.send_signal(number)
        await until_sessions(opened, lambda seen: victim not in seen)

    try:
        with_session(case)
    finally:
        client.end()


def test_stopped_client_comes_back_and_knows_that_it_lapsed(servers: LocalServers) -> None:
    """A zombie that wakes up past its lease introduces itself again, and counts the lapse for whoever held a grant."""
    client = SessionProcess("local:one", "zombie")
    zombie = str(client.report()["session"])

    async def case(opened: Session) -> None:
        client.process.send_signal(signal.SIGSTOP)
        await until_sessions(opened, lambda seen: zombie not in seen)
        client.process.send_signal(signal.SIGCONT)
        await until_sessions(opened, lambda seen: zombie in seen)
        report = await asyncio.to_thread(client.ask)
        assert report["lapses"] == 1
        assert report["fenced"] is False

    try:
        with_session(case)
    finally:
        client.end()


def test_stopped_server_declares_nobody_dead_for_its_own_silence(servers: LocalServers) -> None:
    """A server stopped past every lease hears first what was said meanwhile: a seat is still its holder's."""
    client = SessionProcess("local:one", "holder")
    holder = str(client.report()["session"])

    async def case(opened: Session) -> None:
        epoch = opened.epoch
        pid = servers.kill("one", signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        assert holder in await sessions_of(opened)
        assert opened.epoch == epoch
        report = await asyncio.to_thread(client.ask)
        assert len(set(report["groups"])) == 1, "an expired holder's group gets a new number"

    try:
        with_session(case)
    finally:
        client.end()


def test_sigterm_is_a_clean_leave(servers: LocalServers) -> None:
    """SIGTERM takes the socket away and ends the process with a line in its log."""

    async def case(opened: Session) -> None:
        pid = servers.kill("one", signal.SIGTERM)
        await asyncio.to_thread(until, lambda: not is_server(pid))
        assert servers.left("one") == [pid]

    with_session(case)


def test_server_needs_no_heavy_import(tmp_path: Path) -> None:
    """The server starts without torch, ray and numpy: the first client of a host waits for it."""
    code = "import sys, tensorhub.server.__main__; sys.exit(bool({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
