"""What happens to verified bytes on their way to devices, while the rest of a replicate still arrives.

It decides when copies start: whenever the watermark has risen and none is being started. Which bytes, `on_device.py`
says. Does nothing for tensors in host memory: there, bytes land where they belong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from tensorhub.errors import EngineUnavailable
from tensorhub.pipeline.follow import SAMPLE_S
from tensorhub.ports import U64, Offload

if TYPE_CHECKING:
    from tensorhub.client.on_device import Delivery, Mark, OnDevice

#: At least so much is read at once into a device, if it is ready: some milliseconds between devices of one host, and
#: well within a read's deadline over a network.
DIRECT_BATCH_BYTES = 1 << 30
#: A device copies tens of MiB in this time, and starting a copy takes a fraction of it.
DELIVERY_SAMPLE_S = 0.005


class Arrival:
    """The deliveries of one replicate. `finish` after the last verified byte, or `close`; nothing is under way then."""

    def __init__(
        self, on_device: OnDevice | None, mark: Mark | None, offload: Offload, left_s: Callable[[], float]
    ) -> None:
        self._offload = offload
        self._delivery: Delivery | None = None
        if on_device is not None:
            self._delivery = on_device.delivery(mark or on_device.mark(gather=False), left_s)
        self._is_direct = on_device is not None and bool(on_device.kinds)
        self._watermark = 0
        self._bringing: asyncio.Future[None] | None = None

    @property
    def digest_landed(self) -> Callable[[int, int, U64], Awaitable[None]] | None:
        """How chunks that landed are digested; None where the engine does it, in host memory."""
        return self._digest if self._is_direct else None

    @property
    def sample_s(self) -> float:
        """How often to look at what an engine that follows by itself has verified: copies wait for it."""
        return SAMPLE_S if self._delivery is None else DELIVERY_SAMPLE_S

    @property
    def batch_bytes_min(self) -> int:
        """A digest on a device takes about as long for few chunks as for many."""
        return DIRECT_BATCH_BYTES if self._is_direct else 1

    async def begin(self) -> None:
        """Before the first byte lands: no copy of an earlier operation is under way, and none of the caller's kernels
        uses memory that engines write to."""
        if self._delivery is not None:
            await self._offload.run(self._delivery.close)
            if self._is_direct:
                await self._offload.run(self._delivery.begin)

    def reach(self, watermark: int) -> None:
        """Chunks below `watermark` are verified."""
        self._watermark = watermark
        if self._delivery is not None and self._bringing is None:
            self._bringing = asyncio.ensure_future(self._bring())

    async def finish(self) -> None:
        """Return when all bytes are where they belong, to be seen by every stream of the caller."""
        if self._delivery is None:
            return
        if self._bringing is not None:
            await self._bringing
        await self._offload.run(self._delivery.finish)

    async def close(self) -> None:
        """After a failure: return when nothing is being written any more."""
        if self._delivery is None:
            return
        if self._bringing is not None:
            await asyncio.gather(self._bringing, return_exceptions=True)
        with suppress(EngineUnavailable):  # the failure that is being reported comes first
            await self._offload.run(self._delivery.close)

    async def _bring(self) -> None:
        delivery, done = self._delivery, -1
        while delivery is not None and done != self._watermark:
            done = self._watermark
            await self._offload.run(partial(delivery.reach, done))
        self._bringing = None

    async def _digest(self, first: int, stop: int, out: U64) -> None:
        delivery = self._delivery
        if delivery is not None:
            await self._offload.run(lambda: delivery.digest(first, stop, out))
