"""One stream of bytes to a gRPC server: what its channel is like, what secures it, and what its failures mean.

Decides nothing about sessions and knows no frame. Every error of the library is translated here. Imports no more than
it must, since the process that beats starts by it. Settings of TLS come from the environment; files are read whenever
a stream opens, so that a renewed certificate needs no restart.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, Closed, ServerUnavailable, TensorHubError, Unauthorized
from tensorhub.wire.grpc_library import grpc
from tensorhub.wire.grpc_names import ACCEPTED, METHOD

#: As in `wire/codec.py`; a test holds them equal.
FRAME_BYTES_MAX = 16 * 2**20
#: A connection over which nothing comes for so long is asked whether it lives; the heartbeat notices sooner.
KEEPALIVE_MS, KEEPALIVE_ANSWER_MS = 30_000, 10_000

CA_ENV, CERT_ENV, KEY_ENV = "TENSORHUB_TLS_CA", "TENSORHUB_TLS_CERT", "TENSORHUB_TLS_KEY"
SERVER_NAME_ENV = "TENSORHUB_TLS_SERVER_NAME"

#: The process that first opened a channel here.
_opened_by: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens, and whether its connections are TLS. As users write it: `grpc://HOST:PORT`, `grpcs://…`."""

    address: Address
    tls: bool

    @classmethod
    def parse(cls, text: str) -> Target:
        """`BadRequest` for anything but `grpc://HOST:PORT` and `grpcs://HOST:PORT`."""
        scheme, _, rest = text.partition("://")
        if scheme not in {"grpc", "grpcs"}:
            raise BadRequest(f"server address {text!r} is none; write 'grpc://HOST:PORT' or 'grpcs://HOST:PORT'")
        address = Address.parse(rest)
        if address.port == 0:
            raise BadRequest(f"server address {text!r} needs the port that the server listens at")
        return cls(address, scheme == "grpcs")

    def __str__(self) -> str:
        return f"{'grpcs' if self.tls else 'grpc'}://{self.address}"


class Stream:
    """An open stream, on a connection of its own. One task writes and one reads at a time.

    Cancelling `write` or `read` ends the stream: the library has no other way to take a message back.
    """

    def __init__(self, target: Target, channel: grpc.aio.Channel) -> None:
        self._target = target
        self._channel = channel
        self._call = channel.stream_stream(METHOD)()  # of bytes: no serialisers
        #: Why it was ended here, or None: what the library then says is no news.
        self._ended: str | None = None

    @classmethod
    async def open(cls, target: Target, timeout_s: float) -> Stream:
        """A stream that the server has accepted, or `ServerUnavailable`; else as `_open_channel`."""
        stream = cls(target, _open_channel(target))
        try:
            async with asyncio.timeout(timeout_s):
                await stream._accepted()
        except TimeoutError as error:
            await stream.close()
            raise ServerUnavailable(f"{target} did not answer within {timeout_s:g} s") from error
        except BaseException:
            await stream.close()
            raise
        return stream

    async def write(self, data: bytes) -> None:
        """Returns once the connection has taken it. `ServerUnavailable` when the stream has ended."""
        try:
            await self._call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise await self._failure(error) from error

    async def read(self) -> bytes:
        """The next message; `ServerUnavailable` when there will be none."""
        try:
            data = await self._call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError) as error:
            raise await self._failure(error) from error
        if data is grpc.aio.EOF:
            raise await self._failure(None)
        return bytes(data)

    def end(self, reason: str) -> None:
        """Whoever waits in it is told; idempotent."""
        self._ended = self._ended or reason
        self._call.cancel()

    async def close(self) -> None:
        """`end`, and give the connection back."""
        self.end("closed by its owner")
        await self._channel.close()

    async def _accepted(self) -> None:
        """Returns once the server has taken the stream; raises what its refusal, or its absence, means."""
        try:
            accepted = ACCEPTED in await self._call.initial_metadata()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await self._failure(error) from error
        if not accepted:
            raise await self._failure(None)

    async def _failure(self, error: BaseException | None) -> BaseException:
        """What to raise. The library says `CancelledError` of a call that was cancelled, and so does a task's end."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            return error
        if self._ended is not None:
            return ServerUnavailable(f"{self._target}: {self._ended}")
        if isinstance(error, grpc.aio.AioRpcError):
            return unavailable(self._target, error.code(), error.details())
        return unavailable(self._target, await self._call.code(), await self._call.details())


def _open_channel(target: Target) -> grpc.aio.Channel:
    """A channel of its own connection; nothing is sent before the first call.

    `Closed` in a process forked from one that had opened channels: the library's threads are not there, calls would
    hang. `BadRequest` for TLS settings that cannot be used.
    """
    global _opened_by  # noqa: PLW0603 - one fact about this process, set once
    if _opened_by is None:
        _opened_by = os.getpid()
    elif _opened_by != os.getpid():
        raise Closed(
            f"this process was forked from process {_opened_by}, which used gRPC, and gRPC does not survive fork(); "
            "start workers by 'spawn' or 'forkserver', or open hubs only after the fork"
        )
    options: list[tuple[str, str | int]] = [
        ("grpc.max_send_message_length", FRAME_BYTES_MAX),
        ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
        # A session decides itself when to connect again, and repeats itself what is safe to repeat.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        # A reference server is on our own network, where peers reach each other too: not behind a web proxy.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    ]
    place = f"dns:///{target.address}"  # numbers, too; without it a host called 'unix' would be a scheme
    if not target.tls:
        return grpc.aio.insecure_channel(place, options)
    if name := os.environ.get(SERVER_NAME_ENV):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(place, _credentials(), options)


def _credentials() -> grpc.ChannelCredentials:
    """Roots of the user's choice, else the system's; a certificate of our own where the server asks for one."""
    chosen, cert, key = os.environ.get(CA_ENV), os.environ.get(CERT_ENV), os.environ.get(KEY_ENV)
    if bool(cert) != bool(key):
        raise BadRequest(f"{CERT_ENV} and {KEY_ENV} go together: set both, or neither")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # only to see whether the files hold what they should
    if chosen:
        try:
            context.load_verify_locations(chosen)
        except (OSError, ValueError) as error:
            raise BadRequest(f"{CA_ENV}={chosen!r} holds no certificates that can be used: {error}") from error
    if cert and key:
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise BadRequest(f"{CERT_ENV}={cert!r} and {KEY_ENV}={key!r} cannot be used: {error}") from error
    roots = chosen or ssl.get_default_verify_paths().cafile
    return grpc.ssl_channel_credentials(
        Path(roots).read_bytes() if roots else None,
        Path(key).read_bytes() if key else None,
        Path(cert).read_bytes() if cert else None,
    )


def _no_password() -> str:
    raise ValueError("the key is encrypted; a process cannot ask for its password")


def unavailable(target: Target, code: grpc.StatusCode, details: str | None) -> TensorHubError:
    """What the end of a stream means, with gRPC's own code and details. A certificate that does not convince will not
    next time either: that is `Unauthorized`, which nobody tries again; all else is `ServerUnavailable`."""
    told = " ".join((details or "no details").split())
    kind = Unauthorized if any(sign in told for sign in _CERTIFICATE_SIGNS) else ServerUnavailable
    return kind(f"{target} {_meaning(target, code, told)} ({code.name}: {told})")


def _meaning(target: Target, code: grpc.StatusCode, details: str) -> str:
    if code == grpc.StatusCode.UNAVAILABLE:
        for sign, meaning in _SIGNS:
            if sign in details:
                return meaning
        if "Socket closed" in details:
            return f"closed the connection; {_CLOSED_TLS if target.tls else _CLOSED_PLAIN}"
        return "cannot be reached, or went away"
    return _CODES.get(code, "ended the connection")


#: A server that wants TLS, or a certificate, hangs up; so does one that dies.
_CLOSED_PLAIN = "does it speak TLS? then write grpcs://"
_CLOSED_TLS = f"does it want a client's certificate? set {CERT_ENV} and {KEY_ENV}"
#: A check of ours that failed, as far as gRPC says it in details; the meanings stand below.
_CERTIFICATE_SIGNS = ("CERTIFICATE_VERIFY_FAILED", "Peer name", "Hostname Verification")
#: What gRPC says in details, and what it means; the first that is found counts.
_SIGNS = (
    ("CERTIFICATE_VERIFY_FAILED", f"shows a certificate that is not trusted here; {CA_ENV} names the CA's file"),
    ("Peer name", f"shows a certificate of another name; {SERVER_NAME_ENV} names the one to expect"),
    ("Hostname Verification", f"shows a certificate of another name; {SERVER_NAME_ENV} names the one to expect"),
    ("handshake failed", f"does not agree on TLS: is it grpcs:// at all, and does it want {CERT_ENV}?"),
    ("Handshake read failed", f"hung up in the TLS handshake; {_CLOSED_TLS}"),
    ("Connection refused", "refuses connections: nobody listens there"),
    ("errors resolving", "has a host name that is unknown here"),
    ("DNS resolution failed", "has a host name that is unknown here"),
    ("the server has stopped", "has stopped"),
)
_CODES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: "takes no more",
    grpc.StatusCode.UNIMPLEMENTED: "is no TensorHub server",
    grpc.StatusCode.DEADLINE_EXCEEDED: "does not answer",
}
