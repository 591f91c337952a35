"""What the gRPC service adds to the host: strangers bounded, deaf and silent peers cut, health, reflection, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tensorhub import messages as m
from tensorhub.addresses import Address
from tensorhub.client.grpc_channel import Stream, Target
from tensorhub.client.links import parse_server
from tensorhub.errors import BadRequest, Broken, ServerUnavailable
from tensorhub.messages import Answer, Call
from tensorhub.server import grpc_service
from tensorhub.server import host as host_module
from tensorhub.server.grpc_service import serve
from tensorhub.server.host import Host
from tensorhub.server.streams import STRANGER_FRAME_BYTES_MAX
from tensorhub.types import Epoch, Location, ModelKey, ReplicaId, Seat, SessionId
from tensorhub.wire import reference_pb2 as pb
from tensorhub.wire import reference_pb2_grpc
from tensorhub.wire.grpc_names import SERVICE
from tensorhub.wire.proto import decode_answer, encode_call
from tests.support.fake_machine import FakeMachine

A = SessionId(b"a" * 16)
HELLO = m.Hello(m.PROTOCOL, A, b"", "host", 1, Epoch(b""))
SEAT = Seat(ModelKey("job", "actor"), ReplicaId("r"), 0)
JOIN = m.Join(SEAT, 1, "", False, Location())
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(slots=True)
class Served:
    host: Host
    bound: Address
    task: asyncio.Task[None]
    machine: FakeMachine = field(default_factory=FakeMachine)

    @property
    def target(self) -> Target:
        return Target(self.bound, tls=False)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    machine = FakeMachine()
    host = Host(machine)
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(host, Address("127.0.0.1", 0), None, ready.set_result))
    try:
        yield Served(host, await ready, task, machine)
    finally:
        host.stop("ended by the test")
        with suppress(Broken):
            await task


def serving(case: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0), served() as there:
            await case(there)

    asyncio.run(main())


async def say(stream: Stream, call_id: int, request: m.Request) -> Answer:
    await stream.write(encode_call(Call(call_id, request)))
    return decode_answer(await stream.read())


def test_any_client_made_from_the_proto_is_served() -> None:
    """What protoc makes of the proto, and nothing else of ours, gets a Welcome."""

    async def case(there: Served) -> None:
        async with grpc.aio.insecure_channel(str(there.bound)) as channel:
            session = reference_pb2_grpc.ReferenceServerStub(channel).Session()
            hello = pb.Hello(protocol=m.PROTOCOL, session=A, host="host", pid=1)
            await session.write(pb.CallFrame(id=1, hello=hello))
            answer = await session.read()
            assert (answer.id, answer.welcome.epoch) == (1, there.machine.epoch)
            session.cancel()

    serving(case)


def test_a_call_that_cannot_be_used_is_refused_to_its_caller() -> None:
    """An unreadable body under a readable id is answered by name; the stream goes on."""

    async def case(there: Served) -> None:
        stream = await Stream.open(there.target, 5.0)
        await say(stream, 1, HELLO)
        await stream.write(pb.CallFrame(id=2, join=pb.Join()).SerializeToString())
        refused = decode_answer(await stream.read())
        assert (refused.id, refused.reply.error) == (2, "BadRequest")
        assert "Join.seat" in refused.reply.message
        assert await say(stream, 3, m.List(None)) == Answer(3, m.Listing(()))
        await stream.close()

    serving(case)


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 10, encode_call(Call(1, m.Abort(SEAT, 1, 1, "x" * STRANGER_FRAME_BYTES_MAX)))],
    ids=["noise", "large"],
)
def test_strangers_that_speak_badly_are_cut_off(data: bytes) -> None:
    """Before Hello, noise and large frames end the stream, with the reason; nobody else notices."""

    async def case(there: Served) -> None:
        stream = await Stream.open(there.target, 5.0)
        await stream.write(data)
        told = decode_answer(await stream.read())
        assert (told.id, told.reply.error) == (0, "BadRequest")
        with pytest.raises(ServerUnavailable):
            await stream.read()
        await stream.close()
        assert there.machine.heard == []

    serving(case)


@pytest.mark.slow
def test_a_stream_that_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without session, silence ends the stream; with one, the lease decides."""
    monkeypatch.setattr(grpc_service, "UNBOUND_IDLE_S", 1.0)  # longer than a Hello takes here

    async def case(there: Served) -> None:
        bound, silent = await Stream.open(there.target, 5.0), await Stream.open(there.target, 5.0)
        await say(bound, 1, HELLO)
        with pytest.raises(ServerUnavailable, match="silent for too long"):
            await silent.read()
        assert await say(bound, 2, m.List(None)) == Answer(2, m.Listing(()))
        await silent.close()
        await bound.close()

    serving(case)


@pytest.mark.slow
def test_a_peer_that_does_not_read_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers that nobody takes are bounded in number and time: the machine hears of a loss, others are served,
    and the server ends by its deadline although the peer still holds on."""
    monkeypatch.setattr(grpc_service, "WRITE_S", 0.2)
    monkeypatch.setattr(grpc_service, "FLUSH_S", 0.05)
    monkeypatch.setattr(grpc_service, "DRAIN_S", 0.1)
    monkeypatch.setattr(host_module, "OUTBOX_MAX", 2**20)
    text = "x" * 2**19

    async def case(there: Served) -> None:
        deaf, good = await Stream.open(there.target, 5.0), await Stream.open(there.target, 5.0)
        await say(deaf, 1, HELLO)
        await say(deaf, 2, JOIN)
        other = replace(HELLO, session=SessionId(b"b" * 16))
        await say(good, 1, other)
        call_id = 1
        while not there.machine.lost:
            call_id += 1
            assert await say(good, call_id, m.Abort(SEAT, 1, 1, text)) == Answer(call_id, m.Ok())
        assert there.machine.lost == [A]
        assert await say(good, call_id + 1, m.List(None)) == Answer(call_id + 1, m.Listing(()))
        await good.close()
        there.host.stop("enough")
        await there.task
        await deaf.close()

    with caplog.at_level(logging.WARNING, "tensorhub.server"):
        serving(case)
    assert "does not read" in caplog.text


def test_more_streams_than_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who are served go on; one more is told why it is not."""
    monkeypatch.setattr(grpc_service, "STREAMS_MAX", 1)

    async def case(there: Served) -> None:
        first = await Stream.open(there.target, 5.0)
        await say(first, 1, HELLO)
        with pytest.raises(ServerUnavailable, match="takes no more"):
            await Stream.open(there.target, 5.0)
        assert await say(first, 2, m.List(None)) == Answer(2, m.Listing(()))
        await first.close()

    serving(case)


def test_health_tells_that_it_serves_and_that_it_leaves() -> None:
    """`grpc.health.v1`: SERVING for the server and the service while the host runs, NOT_SERVING once it has stopped."""

    async def case(there: Served) -> None:
        async with grpc.aio.insecure_channel(str(there.bound)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == SERVING
            there.host.stop("enough")
            assert (await watch.read()).status == NOT_SERVING

    serving(case)


def test_reflection_shows_the_service() -> None:
    """A tool that knows nothing of us can list what may be called."""

    async def case(there: Served) -> None:
        async with grpc.aio.insecure_channel(str(there.bound)) as channel:
            asking = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
            await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            shown = await asking.read()
            assert SERVICE in {service.name for service in shown.list_services_response.service}
            asking.cancel()

    serving(case)


def test_a_broken_machine_is_told_and_ends_the_server() -> None:
    """Its caller hears `Broken`, the stream ends, and `serve` raises: the process can say so by its exit code."""

    async def case(there: Served) -> None:
        stream = await Stream.open(there.target, 5.0)
        await say(stream, 1, HELLO)
        answer = await say(stream, 2, m.Abort(SEAT, 1, 1, "break"))
        assert answer.reply.error == "Broken"
        with pytest.raises(ServerUnavailable, match="has stopped"):
            await stream.read()
        with pytest.raises(Broken):
            await there.task
        await stream.close()

    serving(case)


def test_a_taken_port_is_refused() -> None:
    """Two servers never share a port: clients would be split between them by chance."""

    async def case(there: Served) -> None:
        ready: list[Address] = []
        with pytest.raises(BadRequest, match=f"cannot listen at {there.bound}"):
            await serve(Host(FakeMachine()), there.bound, None, ready.append)
        assert ready == []

    serving(case)


def test_another_grpc_server_is_told_apart() -> None:
    """A server that does not know the service is named as such, not as a loss of connection."""

    async def main() -> None:
        stranger = grpc.aio.server()
        port = stranger.add_insecure_port("127.0.0.1:0")
        await stranger.start()
        with pytest.raises(ServerUnavailable, match="is no TensorHub server"):
            await parse_server(f"grpc://127.0.0.1:{port}").connect(5.0)
        await stranger.stop(None)

    asyncio.run(main())
