"""Bare peers of the reference server: they send back what they get, over the same transports, and know nothing else.

Frames of msgpack over a Unix socket under asyncio; one gRPC stream per client; a Ray actor. Each server is a process of
its own; each client waits for its answer before it asks again, as a session does within one pull.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from typing import Any

from bench.peers.pair import load
from bench.remote import State

#: A Replicate's frame has about this size.
PAYLOAD = bytes(160)
HEADER = struct.Struct("<I")
METHOD = "/bench.Echo/Stream"
#: The Ray actor's.
NAME = "echo"
GRPC, RAY, MSGPACK = "pip install grpcio", "pip install 'ray[default]'", "pip install msgpack"


def serve(state: State, kind: str, folder: str) -> str:
    """Start the echo server of a kind; its address. It answers while `run` runs."""
    state["runner"] = asyncio.Runner()
    starter = {"frames": _serve_frames, "grpc": _serve_grpc}[kind]
    address, state["serving"] = state["runner"].run(starter(folder))
    return str(address)


def run(state: State) -> None:
    """Answer until this process is killed."""
    state["runner"].run(asyncio.Event().wait())


async def _serve_frames(folder: str) -> tuple[str, Any]:
    msgpack: Any = load("msgpack", MSGPACK)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                (nbytes,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                data = msgpack.packb(msgpack.unpackb(await reader.readexactly(nbytes)))
                writer.write(HEADER.pack(len(data)) + data)
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()

    path = os.path.join(folder, "echo")
    return path, await asyncio.start_unix_server(answer, path)


async def _serve_grpc(_: str) -> tuple[str, Any]:
    grpc: Any = load("grpc", GRPC)
    aio: Any = load("grpc.aio", GRPC)

    async def answer(_: object, context: Any) -> None:
        while (data := await context.read()) is not aio.EOF:
            await context.write(data)

    server = aio.server()
    service, method = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return f"127.0.0.1:{port}", server


class Actor:
    """Ray's echo."""

    def echo(self, data: bytes) -> bytes:
        return data


def start_actor(state: State) -> None:
    """In a driver's process: the actor, answering."""
    ray: Any = load("ray", RAY)
    state["echo"] = ray.remote(num_cpus=0)(Actor).options(name=NAME).remote()
    ray.get(state["echo"].echo.remote(PAYLOAD))


class Frames:
    """A client of frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._msgpack: Any = load("msgpack", MSGPACK)

    @classmethod
    async def open(cls, address: str, _: str) -> Frames:
        return cls(*await asyncio.open_unix_connection(address))

    async def cycle(self) -> tuple[int, float]:
        began = time.perf_counter()
        data = self._msgpack.packb(PAYLOAD)
        self._writer.write(HEADER.pack(len(data)) + data)
        await self._writer.drain()
        (nbytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        check(self._msgpack.unpackb(await self._reader.readexactly(nbytes)))
        return 1, time.perf_counter() - began

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class Grpc:
    """A client of the gRPC stream."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._stream = channel.stream_stream(METHOD)()

    @classmethod
    async def open(cls, address: str, _: str) -> Grpc:
        aio: Any = load("grpc.aio", GRPC)
        # A connection each, as clients on different hosts have: channels of a process share one otherwise.
        return cls(aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]))

    async def cycle(self) -> tuple[int, float]:
        began = time.perf_counter()
        await self._stream.write(PAYLOAD)
        check(await self._stream.read())
        return 1, time.perf_counter() - began

    async def close(self) -> None:
        await self._channel.close()


class Ray:
    """A client of the actor; `address` is the cluster's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    async def open(cls, address: str, _: str) -> Ray:
        ray: Any = load("ray", RAY)
        if not ray.is_initialized():
            ray.init(address=address, namespace="bench", log_to_driver=False, logging_level="ERROR")
        return cls(ray.get_actor(NAME))

    async def cycle(self) -> tuple[int, float]:
        began = time.perf_counter()
        check(await self._actor.echo.remote(PAYLOAD))
        return 1, time.perf_counter() - began

    async def close(self) -> None:
        """The connection to the cluster is the process's, and ends with it."""


def check(answer: object) -> None:
    """An echo of something else is no echo."""
    if answer != PAYLOAD:
        raise RuntimeError(f"the echo is {answer!r}")
