"""A checkpoint engine as small as an honest one can be: rank 0 sends every full tensor to every rollout over plain TCP.

Frozen: what ours is measured against must not move, so it is neither improved nor repaired for speed. It does what such
an engine can do without a plan: one connection per rollout worker, a thread per connection, no copies but the sockets'
own, and buckets of which two are under way, so that gathering, sending and loading overlap. Nothing is verified.

On the wire, per bucket: length of the head (8 bytes), head (msgpack: [[name, dtype, shape], ...]), then the tensors'
bytes one after the other. An empty head ends the weights.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import struct
from collections.abc import AsyncGenerator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import prod
from typing import Any, cast

import msgpack
import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

#: Small enough that the stages overlap, large enough that a head costs nothing. The configured size caps it.
BUCKET_BYTES_MAX = 32 << 20
#: One is filled while another is sent, or loaded.
BUCKETS = 2
#: Where each tensor begins in a received bucket: no dtype has larger elements.
ALIGNMENT = 16
#: A peer that moves nothing for so long is gone.
SILENCE_SECONDS = 120.0
#: Between two looks at whether the sender of a full lane has failed.
LOOK_SECONDS = 0.2
LENGTH = struct.Struct("!Q")

Bucket = list[tuple[str, torch.Tensor]]
Lane = queue.Queue[Bucket]


@CheckpointEngineRegistry.register("tcp_baseline")
class TcpBaselineCheckpointEngine(CheckpointEngine):
    """Rank 0 of the trainer listens and sends; the other ranks drain the generator, whose gathers are collective."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_bytes = min(bucket_size, BUCKET_BYTES_MAX)
        self.is_master = is_master
        self._listener: socket.socket | None = None
        #: At rank 0 one per rollout worker, at a rollout worker one, elsewhere none; open from init to finalize.
        self._connections: list[socket.socket] = []
        self._buffers: list[torch.Tensor] = []

    def prepare(self) -> tuple[str, int] | None:
        self.finalize()  # what a step that failed has left
        if not self.is_master:
            return None
        host = str(cast(Any, ray.util).get_node_ip_address())
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(SILENCE_SECONDS)
        return host, self._listener.getsockname()[1]

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return (
            {"readers": [rollout_world_size] + [0] * (actor_wg_world_size - 1)},
            {"address": [metadata[0]] * rollout_world_size},
        )

    def init_process_group(self, readers: int = 0, address: tuple[str, int] | None = None) -> None:
        if address is not None:
            self._connections = [socket.create_connection(address, timeout=SILENCE_SECONDS)]
        for _ in range(readers):
            if self._listener is None:
                raise RuntimeError("init_process_group before prepare: nobody listens")
            self._connections.append(self._listener.accept()[0])
        for connection in self._connections:
            connection.settimeout(SILENCE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def finalize(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # its peer may have gone
                connection.shutdown(socket.SHUT_RDWR)  # wakes whoever still waits for bytes of a step that failed
            connection.close()
        if self._listener is not None:
            self._listener.close()
        self._connections, self._listener = [], None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        await asyncio.to_thread(self._send, weights)
        return {}

    def _send(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        lanes: list[Lane] = [queue.Queue(BUCKETS) for _ in self._connections]
        with ThreadPoolExecutor(max(1, len(lanes))) as pool:
            senders = [pool.submit(send_all, *pair) for pair in zip(self._connections, lanes, strict=True)]
            for bucket in self._buckets(weights):
                hand_on(bucket, lanes, senders)
            hand_on([], lanes, senders)
            for sender in senders:
                sender.result()

    def _buckets(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
        bucket: Bucket = []
        held = 0
        for name, tensor in weights:
            if bucket and held + tensor.nbytes > self.bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append((name, tensor.detach().contiguous()))
            held += tensor.nbytes
        if bucket:
            yield bucket

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Tensors that keep their bytes until the next bucket but one arrives."""
        (connection,) = self._connections
        buffer, spare = torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
        if self._buffers:
            buffer, spare = self._buffers
        arriving = asyncio.create_task(asyncio.to_thread(receive, connection, buffer))
        while True:
            buffer, bucket = await arriving
            if not bucket:
                break
            arriving = asyncio.create_task(asyncio.to_thread(receive, connection, spare))
            for name, tensor in bucket:
                yield name, tensor
            spare = buffer
        self._buffers = [buffer, spare]


def hand_on(bucket: Bucket, lanes: list[Lane], senders: list[Future[None]]) -> None:
    """To every sender; a sender that has failed takes nothing more, so its failure is ours."""
    for lane, sender in zip(lanes, senders, strict=True):
        while True:
            if sender.done():
                stop(lanes)
                sender.result()
            try:
                lane.put(bucket, timeout=LOOK_SECONDS)
                break
            except queue.Full:
                continue


def stop(lanes: list[Lane]) -> None:
    """Let every sender end at its next look, whatever waits for it."""
    for lane in lanes:
        while not lane.empty():
            lane.get_nowait()
        lane.put([])


def send_all(connection: socket.socket, lane: Lane) -> None:
    """Everything that comes down a lane, until an empty bucket has been sent."""
    bucket: Bucket | None = None
    while bucket is None or bucket:
        bucket = lane.get()
        head = msgpack.packb(
            [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in bucket]
        )
        connection.sendall(LENGTH.pack(len(head)) + head)
        for _, tensor in bucket:
            connection.sendall(tensor.reshape(-1).view(torch.uint8).numpy().data)


def receive(connection: socket.socket, buffer: torch.Tensor) -> tuple[torch.Tensor, Bucket]:
    """The next bucket, in the buffer or, where that is too small, in a larger one; the buffer, and what lies in it."""
    prefix = torch.empty(LENGTH.size, dtype=torch.uint8)
    fill(connection, prefix)
    head = torch.empty(LENGTH.unpack(prefix.numpy().data)[0], dtype=torch.uint8)
    fill(connection, head)
    layout = []
    end = 0
    for name, dtype_name, shape in msgpack.unpackb(head.numpy()):
        dtype: torch.dtype = getattr(torch, dtype_name)
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + prod(shape) * dtype.itemsize
        layout.append((name, dtype, shape, begin, end))
    if end > buffer.nbytes:
        buffer = torch.empty(end, dtype=torch.uint8)
    bucket: Bucket = []
    for name, dtype, shape, begin, stop_at in layout:
        fill(connection, buffer[begin:stop_at])
        bucket.append((name, buffer[begin:stop_at].view(dtype).view(shape)))
    return buffer, bucket


def fill(connection: socket.socket, target: torch.Tensor) -> None:
    """All bytes of the target from the socket; `ConnectionError` when the sender ends before."""
    view = target.numpy().data
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError(f"rank 0 closed the connection with {len(view)} bytes of a tensor to come")
        view = view[count:]
