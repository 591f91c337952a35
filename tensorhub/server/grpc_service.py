"""The reference server over gRPC: every stream is a door of one host, in the host's event loop.

It decides where it listens, who may connect (TLS; tokens are the host's), how many, and when a stream is cut off; what
an answer says is the machine's. Health (`grpc.health.v1`) says whether it serves, reflection what may be asked.
"""

from __future__ import annotations

from tensorhub.wire.grpc_library import grpc  # before all that imports it: this decides how it is loaded

# isort: split
import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, Broken, Closed
from tensorhub.server.host import Door, Host
from tensorhub.server.settings import SESSIONS_MAX
from tensorhub.server.streams import bytes_of, cut_off, submit
from tensorhub.wire import proto
from tensorhub.wire.codec import FRAME_BYTES_MAX
from tensorhub.wire.grpc_names import ACCEPTED, SERVICE

#: A stream for each session that the machine takes, and one for its heartbeat.
STREAMS_MAX = 2 * SESSIONS_MAX
#: Of those, over one connection: ours carry one; a proxy between may gather many.
STREAMS_PER_CONNECTION_MAX = 1024
#: Calls for health and reflection, besides.
OTHER_CALLS_MAX = 256
#: Connections, whatever is said over them: as many as there are streams, of clients of ours.
CONNECTIONS_MAX = STREAMS_MAX
#: For a connection to become one of HTTP/2 (and of TLS), and for one without a stream to stay: as for a Hello.
HANDSHAKE_MS, STREAMLESS_MS = 10_000, 10_000
#: For a stream without session that carries a heartbeat to say something; strangers have `host.HELLO_S` in all.
UNBOUND_IDLE_S = 60.0
#: For a peer to take one answer, before it loses its stream.
WRITE_S = 10.0
#: For queued answers to go out when the server ends, and for streams to end after that.
FLUSH_S, DRAIN_S = 1.0, 5.0
#: A connection over which nothing comes for so long is asked whether it lives.
KEEPALIVE_MS, KEEPALIVE_ANSWER_MS = 30_000, 20_000
#: Peers that ask us more often than so are cut off.
PINGS_APART_MS = 5_000

_LOG = logging.getLogger("tensorhub.server")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM form. With `client_ca`, clients must show a certificate that it signed."""

    cert: str
    key: str
    client_ca: str | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """`BadRequest` when the files are none, or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # only to see whether the files hold what they should
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise BadRequest(f"certificate {self.cert!r} with key {self.key!r} cannot be used: {error}") from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise BadRequest(f"{self.client_ca!r} holds no certificates that can be used: {error}") from error
        return grpc.ssl_server_credentials(
            [(Path(self.key).read_bytes(), Path(self.cert).read_bytes())],
            Path(self.client_ca).read_bytes() if self.client_ca is not None else None,
            require_client_auth=self.client_ca is not None,
        )


@contextlib.asynccontextmanager
async def serving(host: Host, listen: Address, tls: Tls | None = None) -> AsyncIterator[Address]:
    """Serves `host` while the block runs; gives the address that is bound, with its real port.

    `BadRequest` when it cannot be bound. Leaving the block closes the doors' streams within `DRAIN_S`.
    """
    server = grpc.aio.server(maximum_concurrent_rpcs=STREAMS_MAX + OTHER_CALLS_MAX, options=_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(_Streams(host).serve)  # bytes in, bytes out
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": handler}),))
    alive = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = _bind(server, listen, tls)
        await server.start()
        for name in ("", SERVICE):
            await alive.set(name, health_pb2.HealthCheckResponse.SERVING)
        yield Address(listen.host, port)
    finally:
        await alive.enter_graceful_shutdown()  # NOT_SERVING, whatever is set later
        await server.stop(DRAIN_S)


async def serve(host: Host, listen: Address, tls: Tls | None, ready: Callable[[Address], None]) -> None:
    """Run the host and serve it until it stops; `ready` is told the bound address. `Broken` when the machine broke."""
    broken: Broken | None = None
    async with serving(host, listen, tls) as bound:
        ready(bound)
        try:
            await host.run()
        except Broken as error:
            broken = error
    if broken is not None:
        raise broken


def _bind(server: grpc.aio.Server, listen: Address, tls: Tls | None) -> int:
    try:
        if tls is None:
            return int(server.add_insecure_port(str(listen)))
        return int(server.add_secure_port(str(listen), tls.credentials()))
    except RuntimeError as error:
        raise BadRequest(
            f"cannot listen at {listen}: another process may, or the address is not of this host ({error})"
        ) from error


_OPTIONS = (
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", STREAMLESS_MS),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PINGS_APART_MS),
    # Two servers at one port would share its clients by chance.
    ("grpc.so_reuseport", 0),
)


class _Streams:
    """Serves the streams of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def serve(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        """One stream from its first to its last byte. Whatever its peer does ends here."""
        if self._host.doors >= STREAMS_MAX:
            _LOG.warning("a stream is refused: %d are open", STREAMS_MAX)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS_MAX} streams are open")
        try:
            door = self._host.open(context.peer())
        except Closed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        await context.send_initial_metadata(((ACCEPTED, "1"),))  # the peer's connect waits for it
        reading = asyncio.create_task(_read_calls(context, door))
        try:
            while answers := await door.take():
                for answer in answers:
                    async with asyncio.timeout(FLUSH_S if door.closed is not None else WRITE_S):
                        await context.write(bytes_of(answer, proto))
        except TimeoutError:
            _LOG.warning("%s does not read: its stream is dropped", door.peer)
            door.close("does not read its answers")
        except grpc.aio.BaseError as error:
            _LOG.debug("%s is gone: %s", door.peer, error)
        except Exception:  # noqa: BLE001 - our fault, and still one stream's: the others go on
            _LOG.exception("the stream of %s broke", door.peer)
        finally:
            door.close("its stream ended")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await _end(context, door.closed or "closed")


async def _end(context: grpc.aio.ServicerContext, reason: str) -> None:
    """End a stream with its reason. Where its peer does not even take that, leave it to the library: nobody waits."""
    try:
        async with asyncio.timeout(FLUSH_S):
            await context.abort(grpc.StatusCode.UNAVAILABLE, reason)
    except TimeoutError:
        raise asyncio.CancelledError from None  # any other error would be told, too, and waited for


async def _read_calls(context: grpc.aio.ServicerContext, door: Door) -> None:
    """Calls into the door until the stream ends; closes the door with the reason."""
    silence = _Silence(door)
    reason = "its peer ended the stream"
    try:
        while door.closed is None and (data := await context.read()) is not grpc.aio.EOF:
            silence.broken()
            await submit(data, door, proto)
    except BadRequest as error:
        reason = cut_off(door, error)
    except (grpc.aio.BaseError, Closed) as error:
        reason = str(error)
    finally:
        silence.end()
        door.close(reason)


class _Silence:
    """Closes a door without session at which nothing was said for `UNBOUND_IDLE_S`; a session has its lease.

    Not a deadline on each read: the library ends a stream whose read is given up.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._loop = asyncio.get_running_loop()
        self.broken()
        self._timer = self._loop.call_later(UNBOUND_IDLE_S, self._look)

    def broken(self) -> None:
        self._since_s = self._loop.time()

    def end(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left_s = self._since_s + UNBOUND_IDLE_S - self._loop.time()
        if self._door.session is None and left_s <= 0:
            self._door.close("it was silent for too long")
        else:
            self._timer = self._loop.call_later(left_s if left_s > 0 else UNBOUND_IDLE_S, self._look)


def _no_password() -> str:
    raise ValueError("the key is encrypted; a server cannot ask for its password")
