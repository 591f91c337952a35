"""The engine's own decisions, over a library that does what a test says: direct landing, lateness, strangers."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import xxhash

from tensorhub.errors import Closed, EngineUnavailable, NotRegistered, SourceFailed
from tensorhub.ports import Chunks, Ranges
from tensorhub.transport import mooncake
from tensorhub.transport.mooncake import MooncakeEngine
from tensorhub.transport.mooncake_library import PROTOCOL_ENV
from tensorhub.transport.mooncake_read import Place
from tests.support.mooncake import fake_library

TIMEOUT_S = 60.0
#: Read straight into the target over RDMA: large ranges of registered memory.
NBYTES = 1 << 20


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


class Pair:
    """A reader and a source, and the bytes of each."""

    def __init__(self, stack: ExitStack, protocol: str) -> None:
        source_library, self.their_fake = stack.enter_context(fake_library(protocol))
        self.library, self.fake = stack.enter_context(fake_library(protocol))
        self.source = MooncakeEngine("127.0.0.1", source_library)
        self.engine = MooncakeEngine("127.0.0.1", self.library)
        self.data = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        self.target = np.zeros(NBYTES, dtype=np.uint8)
        self.source.register(self.data.ctypes.data, NBYTES)
        self.engine.register(self.target.ctypes.data, NBYTES)

    def ranges(self, count: int = 4) -> Ranges:
        steps = u64(*range(0, NBYTES, NBYTES // count))
        return Ranges(
            steps + np.uint64(self.data.ctypes.data),
            steps + np.uint64(self.target.ctypes.data),
            u64(*[NBYTES // count] * count),
        )

    async def read(self, timeout_s: float = TIMEOUT_S, chunks: Chunks | None = None, count: int = 4) -> None:
        await self.engine.read(self.source.locate(), self.ranges(count), timeout_s, chunks)

    def lands_in_target(self) -> bool:
        start = self.target.ctypes.data
        return any(start <= local < start + NBYTES for _, local, _, _ in self.fake.requests)


@pytest.fixture
def pair(request):
    with ExitStack() as stack:
        made = Pair(stack, getattr(request, "param", "rdma"))
        yield made
        asyncio.run(made.engine.close())
        asyncio.run(made.source.close())


both = pytest.mark.parametrize("pair", ["rdma", "tcp"], indirect=True)


@both
def test_bytes_land_where_the_protocol_allows(pair, request):
    """timeout_then_late_write: over TCP no request is given an address of the caller's; over RDMA large ones are."""
    digests = u64(0, 0)
    asyncio.run(pair.read(chunks=Chunks(u64(0, 2, 4), digests)))
    assert (pair.target == pair.data).all()
    half = NBYTES // 2
    assert digests.tolist() == [xxhash.xxh3_64_intdigest(pair.data[at : at + half].tobytes()) for at in (0, half)]
    assert pair.lands_in_target() == (pair.library.protocol == "rdma")


def test_small_ranges_and_memory_that_is_not_registered_come_through_slabs(pair):
    """A device writes only to registered memory, and many small requests cost more than a copy."""
    asyncio.run(pair.read(count=NBYTES // 4096))
    assert (pair.target == pair.data).all()
    assert not pair.lands_in_target()
    pair.engine.deregister(pair.target.ctypes.data, NBYTES)
    pair.target[:] = 0
    asyncio.run(pair.read())
    assert (pair.target == pair.data).all()
    assert not pair.lands_in_target()


async def cancelled_in_flight(pair: Pair, held_for: int) -> None:
    """A read that is cancelled once its first large request has been asked for; it stays open for so many looks."""
    loop, arrived, looks = asyncio.get_running_loop(), asyncio.Event(), itertools.count()

    def meddle(peer: str, local: int, remote: int, nbytes: int) -> str:
        if nbytes < NBYTES // 4:
            return "go"  # who the peer is
        look = next(looks)
        if look == 0:
            loop.call_soon_threadsafe(arrived.set)
        return "hold" if look < held_for else "go"

    pair.fake.meddle = meddle
    task = asyncio.create_task(pair.read())
    await asyncio.wait([asyncio.create_task(arrived.wait()), task], return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pair.target[:] = 0xEE


def test_a_direct_read_ends_only_when_its_requests_have(pair):
    """timeout_then_late_write: who gives up waits for the device, and nothing lands afterwards."""
    asyncio.run(cancelled_in_flight(pair, held_for=30))
    pair.fake.late_writes()
    assert (pair.target == 0xEE).all()
    assert not pair.library.is_revoked
    asyncio.run(pair.read())
    assert (pair.target == pair.data).all()


def test_a_device_that_never_ends_loses_all_memory(pair, monkeypatch):
    """timeout_then_late_write: the last resort is to take the memory back; the engine then says that it is over."""
    monkeypatch.setattr(mooncake, "TERMINAL_S", 0.01)
    asyncio.run(cancelled_in_flight(pair, held_for=10**9))
    assert pair.target.ctypes.data not in pair.fake.regions
    pair.fake.late_writes()
    assert (pair.target == 0xEE).all()
    with pytest.raises(EngineUnavailable, match="took all memory back"):
        asyncio.run(pair.read())
    pair.engine.deregister(pair.target.ctypes.data, NBYTES)


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_late_bytes_fall_into_quarantine(pair):
    """timeout_then_late_write: slabs of a read that gave up are not used again before Mooncake is done with them."""
    asyncio.run(cancelled_in_flight(pair, held_for=10**9))
    assert pair.library.slabs.quarantined == 1
    pair.fake.late_writes()
    assert (pair.target == 0xEE).all()
    assert pair.library.slabs.quarantined == 0
    asyncio.run(pair.read())
    assert (pair.target == pair.data).all()


@both
def test_a_refused_request_is_asked_again_range_by_range(pair):
    """A source whose registrations change fails a request once; the read goes on as long as it is the same process."""
    refused: list[int] = []

    def meddle(peer, local, remote, nbytes):
        if nbytes > 64 and not refused:
            refused.append(remote)
            return "fail"
        return "go"

    pair.fake.meddle = meddle
    asyncio.run(pair.read())
    assert refused
    assert (pair.target == pair.data).all()


@both
def test_a_range_that_is_not_served_is_named(pair):
    """A live source that refuses again and again does not serve the range: which one, and how much was done."""
    pair.source.deregister(pair.data.ctypes.data, NBYTES)
    with pytest.raises(SourceFailed, match=f"{pair.data.ctypes.data:#x}: not registered there") as caught:
        asyncio.run(pair.read())
    assert caught.value.where.bytes_done == 0
    assert not pair.target.any()


def test_registrations_across_regions_that_touch_are_served_by_one(pair):
    """Two neighbouring registrations serve one read: the library must know them as one region."""
    half = NBYTES // 2
    pair.source.deregister(pair.data.ctypes.data, NBYTES)
    pair.source.register(pair.data.ctypes.data, half)
    pair.source.register(pair.data.ctypes.data + half, half)
    asyncio.run(pair.read(count=1))
    assert (pair.target == pair.data).all()


def test_another_life_at_the_same_address_is_not_taken_for_the_old_one(pair):
    """restart_same_name_same_addr: who answers must show the incarnation that the locator names."""
    stranger = replace(Place.unpack(pair.source.locate()), incarnation=b"another process!")
    with pytest.raises(SourceFailed, match="restarted: another process"):
        asyncio.run(pair.engine.read(stranger.pack(), pair.ranges(), TIMEOUT_S))
    assert not pair.target.any()


def test_a_silent_address_is_no_peer(pair):
    """A peer that was never met and does not answer cannot be contacted: another engine may."""
    nobody = replace(Place.unpack(pair.source.locate()), address=replace(pair.library.address, port=1))
    with pytest.raises(EngineUnavailable, match=r"no answer from 127\.0\.0\.1:1: its probe says -101"):
        asyncio.run(pair.engine.read(nobody.pack(), pair.ranges(), TIMEOUT_S))


def test_who_is_out_of_reach_is_told_without_a_read(pair):
    """loopback_refused, ipv6_endpoint: another protocol, a loopback address of another host, the other IP family."""
    place = Place.unpack(pair.source.locate())
    assert pair.engine.reaches(place.pack()) is None
    elsewhere = replace(place, boot="another boot")
    for stranger, why in (
        (replace(place, protocol="tcp"), "speaks tcp, this one rdma"),
        (elsewhere, "another host, shows the loopback address 127.0.0.1:"),
        (replace(elsewhere, address=replace(place.address, host="fd00::7")), "one IP family"),
    ):
        assert why in (pair.engine.reaches(stranger.pack()) or "")
        with pytest.raises(EngineUnavailable, match=why):
            asyncio.run(pair.engine.read(stranger.pack(), pair.ranges(), TIMEOUT_S))
    assert pair.engine.reaches(replace(elsewhere, address=replace(place.address, host="10.0.0.7")).pack()) is None
    assert not pair.fake.requests


def test_kinds_follow_the_protocol():
    """Device addresses go only where Mooncake can read them."""
    for protocol, kinds in (
        ("tcp", {"host"}),
        ("rdma", {"host", "cuda"}),
        ("efa", {"host", "cuda"}),
        ("ascend", {"host", "npu"}),
    ):
        with fake_library(protocol) as (library, _):
            engine = MooncakeEngine("127.0.0.1", library)
            assert engine.kinds == kinds
            asyncio.run(engine.close())


def test_an_engine_takes_back_only_its_own(pair):
    """Engines share the library: what one registered, another cannot end, and `close` ends exactly one's own."""
    other = MooncakeEngine("127.0.0.1", pair.library)
    with pytest.raises(NotRegistered):
        other.deregister(pair.target.ctypes.data, NBYTES)
    other.register(pair.target.ctypes.data, 64)
    asyncio.run(pair.engine.close())
    assert pair.library.registered.regions() == [(pair.target.ctypes.data, 64)]
    asyncio.run(other.close())
    assert pair.library.registered.regions() == []
    with pytest.raises(Closed):
        other.locate()


def test_auto_opens_it_where_it_has_more_to_offer_than_sockets(monkeypatch):
    """'auto' opens it where a device for RDMA is, or where the user chose a protocol."""
    monkeypatch.delenv(PROTOCOL_ENV, raising=False)
    monkeypatch.setattr(mooncake.mooncake_library, "has_rdma_device", lambda: False)
    assert not mooncake.is_worth_opening()
    monkeypatch.setenv(PROTOCOL_ENV, "tcp")
    assert mooncake.is_worth_opening()
    monkeypatch.delenv(PROTOCOL_ENV)
    monkeypatch.setattr(mooncake.mooncake_library, "has_rdma_device", lambda: True)
    assert mooncake.is_worth_opening()
