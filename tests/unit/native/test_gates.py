"""The server of streams, asked for what it may not have yet: it holds back, says why not, and survives everybody."""

from __future__ import annotations

import os
import random
import select
import socket
import struct
import threading

import pytest

from tensorhub import native
from tensorhub.native import Limits
from tensorhub.pipeline.exposure import HEADER_BYTES, Header, block_bytes
from tensorhub.types import NO_GENERATION, Digest, Generation, SessionId
from tests.conformance.peer import pattern
from tests.support import streams
from tests.support.streams import RawReader, Served, at_end, gated_request, receive, reply, request

MIB = 1 << 20
GENERATION = Generation(bytes(range(16)))
CHUNKS = 100
#: Short enough to be met in a test.
SOON_S = 0.05


class Gated(Served):
    """A server whose memory lies behind a progress block; chunks are of ten bytes, if anybody asks."""

    def __init__(self, limits: Limits | None = None, nbytes: int = 1000) -> None:
        super().__init__(limits, nbytes)
        self.block = self.memory.map(block_bytes(CHUNKS))
        self.data = pattern(1, nbytes).tobytes()
        self.server.add(self.address, nbytes)
        self.server.add(self.block, block_bytes(CHUNKS))
        self.show(0)

    def show(self, watermark: int, generation: Generation = GENERATION) -> None:
        native.store(self.block, self.header(watermark, generation))

    def header(self, watermark: int, generation: Generation = GENERATION) -> bytes:
        return Header(SessionId(bytes(16)), generation, CHUNKS, watermark, Digest(bytes(16)), True).pack()

    def asks(self, number: int, *ranges: tuple[int, int, int]) -> bytes:
        """Ranges of our memory, by offset."""
        return gated_request(
            number, self.block, GENERATION, *((self.address + at, nbytes, mark) for at, nbytes, mark in ranges)
        )

    def check_is_quiet(self, reader: RawReader) -> None:
        """Nothing has come, as far as one can tell: an answer to somebody else came meanwhile."""
        with self.reader() as other:
            assert other.ask(1, (self.address, 1)) == (streams.SERVED, 0, self.data[:1])
        assert select.select([reader.stream], [], [], 0)[0] == []

    def check_serves(self) -> None:
        """Nobody is connected any more, and a good reader gets its bytes, gated and not."""
        self.wait_for_connections(0)
        self.show(1)
        with self.reader() as reader:
            reader.stream.sendall(self.asks(1, (0, 10, 1)) + request(2, (self.address, self.nbytes)))
            assert reader.answer(1) == (streams.SERVED, 0, self.data[:10])
            assert reader.answer(2) == (streams.SERVED, 0, self.data)


@pytest.fixture
def gated():
    with Gated() as opened:
        yield opened


def test_ranges_leave_as_the_watermark_passes_their_marks(gated):
    """One request, one reply, in as many pieces as the source takes steps; nothing leaves before its mark."""
    with gated.reader() as reader:
        reader.stream.sendall(gated.asks(5, (0, 10, 1), (10, 10, 2), (20, 10, 2), (30, 10, 7)))
        gated.check_is_quiet(reader)
        gated.show(1)
        assert receive(reader.stream, 34) == reply(5, 40) + gated.data[:10]
        gated.check_is_quiet(reader)
        gated.show(6)
        assert receive(reader.stream, 20) == gated.data[10:30]
        gated.check_is_quiet(reader)
        gated.show(CHUNKS)
        assert receive(reader.stream, 10) == gated.data[30:40]
    gated.check_serves()


def test_what_is_shown_already_leaves_at_once(gated):
    """A mark of 0 asks for nothing; one at the watermark has been passed."""
    gated.show(3)
    with gated.reader() as reader:
        reader.stream.sendall(gated.asks(1, (0, 5, 0), (5, 5, 3)))
        assert reader.answer(1) == (streams.SERVED, 0, gated.data[:10])


def test_two_requests_ahead_are_answered_in_order(gated):
    """The second is not looked at before the first has left, even if its ranges may; requests of both kinds mix."""
    gated.show(1)
    with gated.reader() as reader:
        frames = gated.asks(1, (0, 10, 2)) + gated.asks(2, (10, 10, 1)) + request(3, (gated.address, 4))
        reader.stream.sendall(frames)
        gated.check_is_quiet(reader)
        gated.show(2)
        assert reader.answer(1) == (streams.SERVED, 0, gated.data[:10])
        assert reader.answer(2) == (streams.SERVED, 0, gated.data[10:20])
        assert reader.answer(3) == (streams.SERVED, 0, gated.data[:4])


def test_a_gate_that_is_not_registered_refuses_the_request(gated):
    """Headers are read from registered memory only, all of the header; the stream stays in step."""
    gated.show(CHUNKS)
    one = (gated.address, 10, 1)
    with gated.reader() as reader:
        for number, block in enumerate((gated.memory.map(4096), gated.block + block_bytes(CHUNKS) - 88, 8, 2**64 - 8)):
            reader.stream.sendall(gated_request(number, block, GENERATION, one))
            assert reader.answer(number) == (streams.NOT_REGISTERED, 0, b"")
        reader.stream.sendall(gated.asks(9, (0, 10, 1)))
        assert reader.answer(9) == (streams.SERVED, 0, gated.data[:10])


def test_a_range_that_is_not_registered_is_refused_before_it_may_leave(gated):
    """The refusal names the range, and does not wait for the watermark; no byte of the request is sent."""
    with gated.reader() as reader:
        reader.stream.sendall(gated.asks(1, (0, 10, 0), (10, 10, 5), (gated.nbytes - 1, 2, 50)))
        assert reader.answer(1) == (streams.NOT_REGISTERED, 2, b"")
        reader.stream.sendall(gated.asks(2, (0, 10, 0)))
        assert reader.answer(2) == (streams.SERVED, 0, gated.data[:10])


def test_no_digest_leaves_after_its_source_was_taken_back():
    """relay_does_not_propagate_corruption: taken back and published anew while the bytes of a chunk leave, a source has
    digests that match the new bytes: they do not follow the old ones. There are more of
    those than both ends buffer."""
    with Gated(nbytes=7 * MIB) as gated, gated.reader(receive_buffer_bytes=4096) as reader:
        gated.show(1)
        digest = (gated.block + HEADER_BYTES, 8, 1)
        nbytes = gated.nbytes - 1
        reader.stream.sendall(
            gated_request(
                1, gated.block, GENERATION, (gated.address, nbytes, 1), digest, (gated.address + nbytes, 1, 2)
            )
        )
        assert receive(reader.stream, 24 + 1000) == reply(1, nbytes + 9) + gated.data[:1000]
        gated.show(0, NO_GENERATION)
        gated.show(2, Generation(bytes(reversed(range(16)))))
        assert receive(reader.stream, nbytes - 1000) == gated.data[1000:nbytes]
        assert at_end(reader.stream)
        gated.check_serves()


def test_digests_leave_one_look_after_their_bytes(gated):
    """Of a source that stays, each digest follows at once, and the next bytes with it: nobody waits for a change."""
    gated.show(CHUNKS)
    slot = gated.block + HEADER_BYTES
    native.store(slot, struct.pack("<2Q", 7, 8))
    with gated.reader() as reader:
        ranges = [(gated.address, 10, 1), (slot, 8, 1), (gated.address + 10, 10, 2), (slot + 8, 8, 2)]
        reader.stream.sendall(gated_request(1, gated.block, GENERATION, *ranges))
        whole = gated.data[:10] + struct.pack("<Q", 7) + gated.data[10:20] + struct.pack("<Q", 8)
        assert reader.answer(1) == (streams.SERVED, 0, whole)


@pytest.mark.parametrize("what", ["withdrawn", "another"])
def test_another_generation_ends_the_stream(gated, what):
    """Untorn: a reader that waits learns it at once, one that asks later gets no byte."""
    with gated.reader() as waiting:
        waiting.stream.sendall(gated.asks(1, (0, 10, 1), (10, 10, 2)))
        gated.show(1)
        assert receive(waiting.stream, 34) == reply(1, 20) + gated.data[:10]
        gated.show(CHUNKS, NO_GENERATION if what == "withdrawn" else Generation(bytes(16 * [9])))
        assert at_end(waiting.stream)
        with gated.reader() as late:
            late.stream.sendall(gated.asks(1, (0, 10, 1)))
            assert at_end(late.stream)
    gated.check_serves()


def test_a_header_caught_half_written_is_looked_at_again(gated):
    """Neither believed nor a failure."""
    with gated.reader() as reader:
        native.store(gated.block, gated.header(CHUNKS)[:88] + bytes(40))
        reader.stream.sendall(gated.asks(1, (0, 10, 1)))
        gated.check_is_quiet(reader)
        native.store(gated.block, gated.header(1))
        assert reader.answer(1) == (streams.SERVED, 0, gated.data[:10])


def test_a_watermark_beyond_its_chunks_is_not_believed(gated):
    """A header that contradicts itself is not whole, whatever its check says."""
    with gated.reader() as reader:
        reader.stream.sendall(gated.asks(1, (0, 10, 1)))
        native.store(gated.block, gated.header(CHUNKS + 1))
        gated.check_is_quiet(reader)
        gated.show(1)
        assert reader.answer(1)[0] == streams.SERVED


def malformed() -> dict[str, bytes]:
    def frame(*ranges: tuple[int, int, int], block: int = 4096, **lies: int) -> bytes:
        return gated_request(1, block, GENERATION, *ranges, **lies)

    return {
        "marks that fall": frame((4096, 8, 2), (4096, 8, 1)),
        "marks that fall to zero": frame((4096, 8, 2**64 - 1), (4096, 8, 0)),
        "a block that is not aligned": frame((4096, 8, 1), block=4097),
        "no ranges": frame(),
        "too many ranges": frame(count=1025, total=8),
        "all the ranges there are": frame(count=2**32 - 1, total=8),
        "an empty range": frame((4096, 8, 1), (4096, 0, 1)),
        "too many bytes": frame((4096, (8 << 20) + 1, 1)),
        "a sum that overflows": frame((4096, 2**63, 1), (4096, 2**63, 1), (4096, 8, 1), total=8),
        "a sum too small": frame((4096, 8, 1), total=9),
        "a sum too large": frame((4096, 8, 1), (4096, 8, 1), total=9),
    }


@pytest.mark.parametrize("frame", malformed().values(), ids=malformed().keys())
def test_a_malformed_request_ends_the_stream(gated, frame):
    """No count, size or mark is believed: the reader is told, and its stream ends."""
    with gated.reader() as reader:
        reader.stream.sendall(frame)
        assert receive(reader.stream, 25)[:4] in {streams.MALFORMED.to_bytes(4, "little"), b""}
    gated.check_serves()


@pytest.mark.parametrize("left", [1, 23, 24, 47, 48 + 23])
def test_a_body_cut_short_is_cut_off(left):
    """Slow loris: a request whose gate or ranges never come holds a thread until its deadline."""
    with Gated(Limits(request_s=SOON_S)) as gated, gated.reader() as reader:
        whole = gated.asks(1, (0, 10, 1), (10, 10, 1))
        reader.stream.sendall(whole[:-left])
        assert at_end(reader.stream)
        gated.wait_for_connections(0)


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_a_reader_that_hangs_up_while_it_waits_gives_its_thread_back(gated, how):
    """reader_killed: the source notices by itself, long before the idle limit, with other readers at its gate."""
    threads = len(os.listdir("/proc/self/task"))
    with gated.reader() as staying:
        staying.stream.sendall(gated.asks(1, (0, 10, 1)))
        reader = gated.reader()
        reader.stream.sendall(gated.asks(1, (0, 10, 1)))
        gated.wait_for_connections(2)
        if how == "resets":
            reader.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.stream.close()
        gated.wait_for_connections(1)
        gated.show(1)
        assert staying.answer(1) == (streams.SERVED, 0, gated.data[:10])
    gated.wait_for_connections(0)
    while len(os.listdir("/proc/self/task")) > threads:  # a joined thread is listed a moment longer
        os.sched_yield()


def test_stopping_ends_those_who_wait(gated):
    """A server with readers at its gate stops, and joins their threads; they see the end."""
    readers = [gated.reader() for _ in range(4)]
    try:
        for reader in readers:
            reader.stream.sendall(gated.asks(1, (0, 10, 1)))
        gated.wait_for_connections(4)
        gated.server.stop()
        assert all(at_end(reader.stream) for reader in readers)
    finally:
        for reader in readers:
            reader.stream.close()


@pytest.mark.slow
def test_a_source_with_nothing_new_for_too_long_ends_the_stream():
    """Nobody holds a thread for ever; each step that the watermark takes begins the time anew."""
    with Gated(Limits(idle_s=10 * SOON_S)) as gated, gated.reader() as reader:
        reader.stream.sendall(gated.asks(1, *((10 * i, 10, i + 1) for i in range(20))))
        for i in range(4):
            gated.show(i + 1)
            assert receive(reader.stream, 10 + 24 * (i == 0))[-10:] == gated.data[10 * i : 10 * i + 10]
        assert at_end(reader.stream)
        gated.wait_for_connections(0)


@pytest.mark.parametrize("what", ["range", "gate"])
def test_memory_that_is_removed_while_a_reader_waits_is_not_touched(gated, what):
    """Neither the ranges nor the block: both may be unmapped once `remove` has returned."""
    block = gated.memory.map(4096)
    native.store(block, gated.header(0))
    gated.server.add(block, 4096)
    with gated.reader() as reader:
        reader.stream.sendall(gated_request(1, block, GENERATION, (gated.address, 10, 1)))
        gated.check_is_quiet(reader)
        if what == "range":
            gated.server.remove(gated.address, gated.nbytes)
        else:
            gated.server.remove(block, 4096)
            gated.memory.unmap(block)
        gated.show(1)  # wakes whoever waits, for whichever block
        # One that waited ends with its stream; one that the server came to only after the memory had gone is refused.
        answer = receive(reader.stream, 24)
        assert not answer or struct.unpack_from("<I", answer)[0] == streams.NOT_REGISTERED
    if what == "range":
        gated.server.add(gated.address, gated.nbytes)
    gated.check_serves()


def test_a_peer_that_does_not_read_is_cut():
    """What its mark has passed must be taken within the reply's time, which begins when the gate opens."""
    with Gated(Limits(reply_s=SOON_S), 8 * MIB) as gated, gated.reader(receive_buffer_bytes=4096) as reader:
        reader.stream.sendall(gated.asks(1, (0, 10, 1), (10, 8 * MIB - 10, 2)))
        gated.show(1)
        assert receive(reader.stream, 34)[24:] == gated.data[:10]
        gated.show(2)
        gated.wait_for_connections(0)


@pytest.mark.slow
def test_random_bodies_harm_nobody(gated):
    """Fuzz, seeded: noise behind a good head, and good frames with bits flipped, while the watermark moves; then all is
    as before."""
    random_ = random.Random(13)
    good = gated.asks(1, *((10 * i, 10, i) for i in range(9)))
    for turn in range(200):
        if turn % 2:
            noise = bytearray(good)
            for _ in range(random_.randint(1, 6)):
                noise[random_.randrange(len(noise))] ^= 1 << random_.randrange(8)
        else:
            count = random_.randint(1, 8)
            noise = bytearray(struct.pack("<IIQQ", 2, count, turn, random_.choice([8 * count, 1 << 20, 2**64 - 1])))
            noise += random_.randbytes(random_.randrange(24 + 24 * count + 1))
        with gated.reader() as reader:
            reader.stream.sendall(noise)
            gated.show(random_.randint(0, CHUNKS))
    gated.check_serves()


def test_many_readers_at_one_gate(gated):
    """64_clients_one_host: each step wakes all of them, and each gets its bytes."""
    readers = 16
    start, right = threading.Barrier(readers + 1), []

    def read(number: int) -> None:
        with gated.reader() as reader:
            reader.stream.sendall(gated.asks(number, *((number + 10 * i, 10, i + 1) for i in range(50))))
            start.wait(streams.PATIENCE_S)
            right.append(reader.answer(number)[2] == gated.data[number : number + 500])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    start.wait(streams.PATIENCE_S)
    for watermark in range(51):
        gated.show(watermark)
    for thread in threads:
        thread.join()
    assert right == [True] * readers
