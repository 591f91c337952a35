"""What every link promises, over every link: messages whole and in order, losses named, a heart that does not lie."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tensorhub import messages as m
from tensorhub.addresses import Address
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.errors import SeatTaken, ServerUnavailable
from tensorhub.messages import Answer, Call
from tensorhub.ports import Connection, Link
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.grpc_service import Tls
from tensorhub.server.grpc_service import serve as serve_grpc
from tensorhub.server.host import Host
from tensorhub.server.local import elect, serve
from tensorhub.server.machine import Machine
from tensorhub.server.settings import Settings
from tensorhub.types import Epoch, Latest, Location, ModelKey, ReplicaId, Seat, SessionId
from tests.support.certificates import authority
from tests.support.direct_link import direct_server
from tests.support.loop_actor import loop_server
from tests.support.ray_cluster import RayServer
from tests.support.servers import new_session_id, private_servers

MODEL = ModelKey("job", "actor")
SEAT = Seat(MODEL, ReplicaId("r"), 0)
JOIN = m.Join(SEAT, 2, "layout", False, Location())
BEAT_NS = 20_000_000
#: Another process answers, on a busy machine.
RAY_BEAT_NS = 200_000_000
#: For a server that answers at once, and for an actor that a busy machine has to start first.
PATIENCE_S = 60.0
_COUNT = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Served:
    link: Link
    #: Ends the server's life and begins another, empty one.
    restart: Callable[[], Awaitable[None]]
    #: Ends the server for good.
    end: Callable[[], Awaitable[None]]
    beat_ns: int = BEAT_NS


def make_machine() -> Machine:
    return Machine(Epoch(next(_COUNT).to_bytes(16, "big")), Settings(lease_ns=500 * BEAT_NS, beat_ns=BEAT_NS))


@asynccontextmanager
async def direct() -> AsyncIterator[Served]:
    async with direct_server(make_machine) as server:
        yield Served(server, server.restart, server.end)


@asynccontextmanager
async def local() -> AsyncIterator[Served]:
    """The real sockets and threads, the server in this loop: no process to start."""
    lives: list[tuple[Host, asyncio.Task[None]]] = []

    async def begin() -> None:
        elected = await elect("conformance")
        assert elected is not None
        host = Host(make_machine())
        lives.append((host, asyncio.create_task(serve(elected, host, 3600.0))))

    async def end() -> None:
        host, task = lives[-1]
        host.stop("ended by the test")
        await task

    async def restart() -> None:
        await end()
        await begin()

    await begin()
    try:
        yield Served(parse_server("local:conformance"), restart, end)
    finally:
        await end()


@asynccontextmanager
async def over_grpc(address: Address, tls: Tls | None = None) -> AsyncIterator[Served]:
    """A gRPC server in this loop; each later life listens where the first one did."""
    lives: list[tuple[Host, asyncio.Task[None]]] = []

    async def begin(listen: Address) -> Address:
        host = Host(make_machine())
        ready = asyncio.get_running_loop().create_future()
        lives.append((host, asyncio.create_task(serve_grpc(host, listen, tls, ready.set_result))))
        return await ready

    async def end() -> None:
        host, task = lives[-1]
        host.stop("ended by the test")
        await task

    async def restart() -> None:
        await end()
        await begin(bound)

    bound = await begin(address)
    try:
        yield Served(parse_server(f"{'grpcs' if tls else 'grpc'}://{bound}"), restart, end)
    finally:
        await end()


@asynccontextmanager
async def grpc() -> AsyncIterator[Served]:
    """ipv6_endpoint: over the IPv6 loopback."""
    async with over_grpc(Address("::1", 0)) as served:
        yield served


@asynccontextmanager
async def grpcs() -> AsyncIterator[Served]:
    """Server and client show each other certificates of one authority."""
    with authority() as ca, pytest.MonkeyPatch.context() as patch:
        server, client = ca.issue("server"), ca.issue("client")
        patch.setenv("TENSORHUB_TLS_CA", ca.cert)
        patch.setenv("TENSORHUB_TLS_CERT", client.cert)
        patch.setenv("TENSORHUB_TLS_KEY", client.key)
        async with over_grpc(Address("127.0.0.1", 0), Tls(server.cert, server.key, ca.cert)) as served:
            yield served


@asynccontextmanager
async def frames() -> AsyncIterator[Served]:
    """Plain frames over TCP; each later life listens where the first one did."""
    lives: list[tuple[Host, asyncio.Task[None]]] = []

    async def begin(port: int) -> Address:
        listener = listen("127.0.0.1", port)
        host, at = Host(make_machine()), address_of(listener)
        lives.append((host, asyncio.create_task(serve_direct(listener, host))))
        return at

    async def end() -> None:
        host, task = lives[-1]
        host.stop("ended by the test")
        await task

    async def restart() -> None:
        await end()
        await begin(bound.port)

    bound = await begin(0)
    try:
        yield Served(parse_server(f"frames://{bound}"), restart, end)
    finally:
        await end()


@asynccontextmanager
async def calls() -> AsyncIterator[Served]:
    """What is spoken by an actor's methods, without Ray between."""
    async with loop_server(make_machine) as server:
        yield Served(server, server.restart, server.end)


@asynccontextmanager
async def over_ray(server: RayServer) -> AsyncIterator[Served]:
    """The real actor in a real cluster, made by whoever connects first."""

    async def restart() -> None:
        await asyncio.to_thread(server.restart)

    async def end() -> None:
        await asyncio.to_thread(server.remove)

    yield Served(parse_server(server.address), restart, end, RAY_BEAT_NS)


IN_THIS_PROCESS = {
    "direct": direct,
    "local": local,
    "frames": frames,
    "calls": calls,
    "grpc": grpc,
    "grpcs": grpcs,
}
OVER_RAY = {"ray": "1", "ray-calls": "0"}


@pytest.fixture(params=[*IN_THIS_PROCESS, *(pytest.param(name, marks=pytest.mark.slow) for name in OVER_RAY)])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a case against a served link."""
    if request.param in OVER_RAY:
        server: RayServer = request.getfixturevalue("ray_server")
        monkeypatch.setenv("TENSORHUB_RAY_DIRECT", OVER_RAY[request.param])
        monkeypatch.setenv("TENSORHUB_BEAT_S", str(RAY_BEAT_NS / 1e9))
        make = partial(over_ray, server)
    else:
        make = IN_THIS_PROCESS[request.param]

    def run_case(case: Callable[[Served], Awaitable[None]]) -> None:
        async def main() -> None:
            async with make() as served:
                await case(served)

        with private_servers(tmp_path, monkeypatch):
            asyncio.run(main())

    return run_case


async def welcome(link: Link, session: SessionId) -> Connection:
    connection = await link.connect(PATIENCE_S)
    await connection.send(Call(1, m.Hello(m.PROTOCOL, session, b"", "host", 1, Epoch(b""))))
    answer = await connection.receive()
    assert isinstance(answer.reply, m.Welcome), answer
    return connection


async def send_many(connection: Connection) -> None:
    """Enough calls that a dead peer shows: the first may still be taken by a buffer."""
    for call_id in range(2, 100):
        await connection.send(Call(call_id, m.List(None)))


def session_over(link: Link) -> Session:
    return Session(link, new_session_id(), host="host", pid=1)


def test_calls_are_answered_whole_and_by_id(run: Callable[..., None]) -> None:
    """Pipelined calls are each answered once, under their ids, in the server's order."""

    async def case(served: Served) -> None:
        connection = await welcome(served.link, new_session_id())
        for call_id in range(2, 60):
            await connection.send(Call(call_id, m.List(MODEL)))
        answers = [await connection.receive() for _ in range(2, 60)]
        assert answers == [Answer(call_id, m.Listing(())) for call_id in range(2, 60)]
        await connection.close()

    run(case)


def test_two_sessions_do_not_hear_each_other(run: Callable[..., None]) -> None:
    """Same call ids on two connections: each session gets its own answers."""

    async def case(served: Served) -> None:
        one, two = await welcome(served.link, new_session_id()), await welcome(served.link, new_session_id())
        await one.send(Call(2, JOIN))
        assert isinstance((await one.receive()).reply, m.Joined)
        await two.send(Call(2, JOIN))
        answer = await two.receive()
        assert (answer.id, answer.reply.error) == (2, "SeatTaken")
        await one.close()
        await two.close()

    run(case)


def test_later_answers_come_when_they_are_true(run: Callable[..., None]) -> None:
    """A blocking call is answered by a later step, here its own deadline; notices come under id 0."""

    async def case(served: Served) -> None:
        connection = await welcome(served.link, new_session_id())
        await connection.send(Call(2, m.Wait(MODEL, Latest(), Location(), 1_000_000)))
        answer = await connection.receive()
        assert (answer.id, answer.reply.error) == (2, "WaitTimeout")
        await connection.close()

    run(case)


def test_closing_ends_a_waiting_receive(run: Callable[..., None]) -> None:
    """`close` is idempotent, and whoever waits in `receive` is told."""

    async def case(served: Served) -> None:
        connection = await welcome(served.link, new_session_id())
        receiving = asyncio.create_task(connection.receive())
        await asyncio.sleep(0)
        await connection.close()
        await connection.close()
        with pytest.raises(ServerUnavailable):
            await receiving

    run(case)


def test_end_of_the_server_is_told(run: Callable[..., None]) -> None:
    """Once the peer is gone, `receive` and `send` raise `ServerUnavailable`, not what the library raises."""

    async def case(served: Served) -> None:
        connection = await welcome(served.link, new_session_id())
        await served.restart()
        with pytest.raises(ServerUnavailable):
            await connection.receive()
        with pytest.raises(ServerUnavailable):
            await send_many(connection)
        await connection.close()

    run(case)


def test_heart_beats_for_a_known_session(run: Callable[..., None]) -> None:
    """While beats are answered, the time of the last acknowledged one rises, nothing failed; `stop` is idempotent."""

    async def case(served: Served) -> None:
        session = new_session_id()
        connection = await welcome(served.link, session)
        before_ns = round(asyncio.get_running_loop().time() * 1e9)
        heart = await served.link.beat(session, served.beat_ns)
        seen = {0}
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < 4:
                await asyncio.sleep(served.beat_ns / 4e9)
                seen.add(heart.acknowledged_ns())
        assert heart.failed() is None
        assert min(seen - {0}) >= before_ns
        heart.stop()
        heart.stop()
        await connection.close()

    run(case)


def test_heart_of_an_unknown_session_fails(run: Callable[..., None]) -> None:
    """A server that does not know the session does not acknowledge its beats, and the heart says so."""

    async def case(served: Served) -> None:
        heart = await served.link.beat(new_session_id(), served.beat_ns)
        async with asyncio.timeout(PATIENCE_S):
            while heart.failed() is None:
                await asyncio.sleep(served.beat_ns / 4e9)
        assert heart.acknowledged_ns() == 0
        heart.stop()

    run(case)


def test_heart_fails_with_its_server(run: Callable[..., None]) -> None:
    """A server's end is the heart's end, with a reason."""

    async def case(served: Served) -> None:
        session = new_session_id()
        connection = await welcome(served.link, session)
        heart = await served.link.beat(session, served.beat_ns)
        await served.restart()
        async with asyncio.timeout(PATIENCE_S):
            while heart.failed() is None:
                await asyncio.sleep(served.beat_ns / 4e9)
        heart.stop()
        await connection.close()

    run(case)


def test_session_survives_a_restart_of_the_server(run: Callable[..., None]) -> None:
    """server_restart_midtransfer: calls wait for the next life, seats are taken again there, other sessions see it."""

    async def case(served: Served) -> None:
        session, other = session_over(served.link), session_over(served.link)
        heard: list[object] = []
        await session.open(PATIENCE_S)
        first = session.epoch
        await session.call(JOIN, PATIENCE_S)
        session.subscribe(SEAT, heard.append, lambda: JOIN)
        await served.restart()
        assert await session.call(m.List(MODEL), PATIENCE_S) == m.Listing(())
        assert session.epoch != first
        assert [type(reply) for reply in heard] == [m.Joined]
        await other.open(PATIENCE_S)
        with pytest.raises(SeatTaken):
            await other.call(JOIN, PATIENCE_S)
        assert not session.fenced()
        await session.close(PATIENCE_S)
        await other.call(JOIN, PATIENCE_S)
        await other.close(PATIENCE_S)

    run(case)
