"""The server of streams: serves what is registered to who knows it, and survives everybody else."""

from __future__ import annotations

import os
import random
import socket
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import BadRequest, Closed
from tensorhub.native import Limits
from tests.conformance.peer import pattern
from tests.support import streams
from tests.support.streams import INCARNATION, PATIENCE_S, RawReader, Served, at_end, greeting, receive, request

MIB = 1 << 20
#: Short enough to be met in a test; each test shortens only the one that it is about.
SOON_S = 0.05


@pytest.fixture
def served():
    with Served() as opened:
        yield opened


def test_ranges_come_in_the_order_asked_for_and_requests_may_be_ahead(served):
    """Several requests on their way, several ranges each: replies follow in order, byte for byte."""
    served.server.add(served.address, served.nbytes)
    data = pattern(1, served.nbytes).tobytes()
    with served.reader() as reader:
        reader.stream.sendall(request(1, (served.address + 500, 100), (served.address, 10)))
        reader.stream.sendall(request(2, (served.address + 999, 1)))
        assert reader.answer(1) == (streams.SERVED, 0, data[500:600] + data[:10])
        assert reader.answer(2) == (streams.SERVED, 0, data[999:])
    served.wait_for_connections(0)
    assert served.server.facts() == (0, 111)


def test_one_unregistered_byte_refuses_the_whole_request_before_any_data(served):
    """Only registered ranges: the refusal says which range; the stream stays in step and serves the next request."""
    served.server.add(served.address + 100, 100)
    good, early, late = (served.address + 100, 100), (served.address + 99, 2), (served.address + 150, 51)
    with served.reader() as reader:
        assert reader.ask(1, good, early, late) == (streams.NOT_REGISTERED, 1, b"")
        assert reader.ask(2, good, good, late) == (streams.NOT_REGISTERED, 2, b"")
        assert reader.ask(3, (2**64 - 8, 16)) == (streams.NOT_REGISTERED, 0, b"")
        assert reader.ask(4, good) == (streams.SERVED, 0, pattern(1, served.nbytes).tobytes()[100:200])


@pytest.mark.slow
def test_what_is_registered_is_the_counted_union(served):
    """register_twice, overlapping_views: a naive count per byte predicts every answer, over random changes."""
    random_ = random.Random(7)
    size = 40
    counts, live = [0] * size, []
    with served.reader() as reader:
        for step in range(60):
            if live and random_.random() < 0.45:
                start, end = live.pop(random_.randrange(len(live)))
                served.server.remove(served.address + start, end - start)
            else:
                start = random_.randrange(size)
                end = random_.randint(start + 1, size)
                live.append((start, end))
                served.server.add(served.address + start, end - start)
            counts = [sum(start <= at < end for start, end in live) for at in range(size)]
            asked = [(start, end) for start in range(size) for end in (start + 1, random_.randint(start + 1, size))]
            for start, end in asked:
                reader.stream.sendall(request(step, (served.address + start, end - start)))
            for start, end in asked:
                allowed = all(counts[start:end])
                assert reader.answer(step)[0] == (streams.SERVED if allowed else streams.NOT_REGISTERED), (step, live)


def test_removing_what_is_not_served_is_refused(served):
    """One removal too many would take away somebody else's memory: nothing changes."""
    served.server.add(served.address, 10)
    for nbytes in (0, 11, 2**64 - served.address):
        with pytest.raises(OSError, match="not served"):
            served.server.remove(served.address, nbytes)
    with served.reader() as reader:
        assert reader.ask(1, (served.address, 10))[0] == streams.SERVED


@pytest.mark.parametrize("version", [0, 1, 65535])
def test_another_version_is_told_so(served, version):
    """A reader of another version learns it, and nothing else: not even who this is."""
    with RawReader(served.place) as reader:
        reader.stream.sendall(greeting(INCARNATION, version=version))
        assert receive(reader.stream, 33) == greeting(bytes(16), word=streams.OTHER_VERSION)
    served.check_unharmed()


def test_another_incarnation_is_told_so_and_not_which_one_lives_here(served):
    """restart_same_name_same_addr: who knows only the old incarnation gets no byte, and does not learn the new one."""
    other = bytearray(INCARNATION)
    other[-1] ^= 1
    with RawReader(served.place) as reader:
        reader.stream.sendall(greeting(bytes(other)) + request(1, (served.address, 1)))
        assert receive(reader.stream, 32) in {greeting(bytes(16), word=streams.OTHER_INCARNATION), b""}
        assert at_end(reader.stream)
    served.check_unharmed()


def test_a_token_is_read_over(served):
    """The place for tokens: one of any size up to the limit is no error where none is wanted."""
    for nbytes in (1, 4096):
        with RawReader(served.place) as reader:
            reader.stream.sendall(greeting(INCARNATION, word=nbytes) + b"t" * nbytes)
            assert receive(reader.stream, 32) == greeting(INCARNATION, word=streams.SERVED)
    with RawReader(served.place) as reader:
        reader.stream.sendall(greeting(INCARNATION, word=4097))
        assert at_end(reader.stream)
    served.check_unharmed()


MALFORMED = {
    "another kind": request(1, (4096, 8), kind=3),
    "no ranges": request(1),
    "too many ranges": request(1, count=1025, total=8),
    "all the ranges there are": request(1, count=2**32 - 1, total=8),
    "an empty range": request(1, (4096, 8), (4096, 0)),
    "too many bytes": request(1, (4096, (8 << 20) + 1)),
    "all the bytes there are": request(1, (4096, 2**64 - 1)),
    "a sum that overflows": request(1, (4096, 2**63), (4096, 2**63), (4096, 8), total=8),
    "a sum too small": request(1, (4096, 8), total=9),
    "a sum too large": request(1, (4096, 8), (4096, 8), total=9),
    "nothing at all": bytes(24),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_request_ends_the_stream(served, frame):
    """No count and no size is believed: the reader is told, and its stream ends."""
    with served.reader() as reader:
        reader.stream.sendall(frame)
        assert receive(reader.stream, 25)[:4] in {streams.MALFORMED.to_bytes(4, "little"), b""}
    served.check_unharmed()


def test_random_bytes_harm_nobody(served):
    """Fuzz, seeded: noise, noise after a greeting, and good frames with bits flipped; then all is as before."""
    random_ = random.Random(11)
    served.server.add(served.address, served.nbytes)
    good = request(1, *[(served.address + i, 1) for i in range(5)])
    for turn in range(150):
        noise = bytearray(random_.randbytes(random_.randrange(200)))
        if turn % 3 == 2:
            noise = bytearray(good)
            for _ in range(random_.randint(1, 4)):
                noise[random_.randrange(len(noise))] ^= 1 << random_.randrange(8)
        with RawReader(served.place) if turn % 3 == 0 else served.reader() as reader:
            reader.stream.sendall(noise)
    served.server.remove(served.address, served.nbytes)
    served.check_unharmed()


@pytest.mark.parametrize(
    "say", [b"", greeting(INCARNATION)[:20], greeting(INCARNATION, word=9) + b"tok"], ids=["nothing", "half", "token"]
)
def test_half_a_greeting_and_silence_is_cut(say):
    """A peer that says nothing more holds a thread until its deadline, no longer."""
    with Served(Limits(greeting_s=SOON_S)) as served, RawReader(served.place) as reader:
        reader.stream.sendall(say)
        assert at_end(reader.stream)
        served.wait_for_connections(0)


@pytest.mark.parametrize("nbytes", [0, 10, 30], ids=["idle", "head", "ranges"])
def test_half_a_request_and_silence_is_cut(nbytes):
    """Slow loris, and streams that nobody uses: each phase has its deadline."""
    with Served(Limits(idle_s=SOON_S, request_s=SOON_S)) as served, served.reader() as reader:
        reader.stream.sendall(request(1, (served.address, 8), (served.address, 8))[:nbytes])
        assert at_end(reader.stream)
        served.wait_for_connections(0)


def test_a_peer_that_does_not_read_is_cut():
    """It costs one thread and what the kernel buffers, until the reply's deadline; nothing piles up behind it."""
    with Served(Limits(reply_s=SOON_S), 8 * MIB) as served, served.reader(receive_buffer_bytes=4096) as reader:
        served.server.add(served.address, 8 * MIB)
        for number in range(100):
            reader.stream.sendall(request(number, (served.address, 8 * MIB)))
        served.wait_for_connections(0)
        assert served.server.facts() == (0, 0)


def test_memory_is_untouched_once_it_is_removed():
    """A reply under way is cut, not waited for: what is written there after `remove` has returned is sent to nobody."""
    with Served(nbytes=8 * MIB) as served, served.reader(receive_buffer_bytes=4096) as reader:
        served.server.add(served.address, 8 * MIB)
        reader.stream.sendall(request(1, (served.address, 8 * MIB)))
        begun = receive(reader.stream, 1000)
        served.server.remove(served.address, 8 * MIB)
        served.memory.write(served.address, 2, 8 * MIB)
        got = begun + receive(reader.stream, 9 * MIB)
        assert len(got) < 8 * MIB
        assert got[24:] == pattern(1, 8 * MIB).tobytes()[: len(got) - 24]


@pytest.mark.slow
def test_removing_other_memory_cuts_nobody():
    """A reply goes on while ranges beside its own come and go."""
    with Served(nbytes=8 * MIB) as served, served.reader(receive_buffer_bytes=4096) as reader:
        served.server.add(served.address, 8 * MIB)
        served.server.add(served.address + 100, MIB)
        reader.stream.sendall(request(1, (served.address, 8 * MIB)))
        served.server.remove(served.address + 100, MIB)
        assert reader.answer(1) == (streams.SERVED, 0, pattern(1, 8 * MIB).tobytes())


def test_registered_memory_that_is_not_mapped_ends_the_stream(served):
    """An owner that unmaps first breaks its contract: its readers see an end, the process lives on."""
    gone = served.memory.map(MIB)
    served.server.add(gone, MIB)
    served.memory.unmap(gone)
    with served.reader() as reader:
        reader.stream.sendall(request(1, (gone, MIB)))
        assert receive(reader.stream, 1 + 24) in {b"", streams.reply(1, MIB)}
    served.server.remove(gone, MIB)
    served.check_unharmed()


def test_more_readers_than_there_is_room_for_are_turned_away():
    """Bounded threads: the one too many is told, or sees the end; a place that is free again is given again."""
    with Served(Limits(connections=2)) as served:
        with served.reader(), served.reader(), RawReader(served.place) as third:
            assert receive(third.stream, 33) in {greeting(bytes(16), word=streams.FULL), b""}
        served.check_unharmed()


def test_strangers_make_room_for_readers():
    """Whoever connects and says nothing keeps nobody out: while most connections are such, those that had time to greet
    are ended; readers that have greeted stay."""
    limits = Limits(greeting_s=2 * PATIENCE_S, crowded_s=0.0, connections=4)
    with Served(limits) as served, served.reader() as known, ExitStack() as held:
        strangers = [held.enter_context(RawReader(served.place)) for _ in range(3)]
        with RawReader(served.place):  # what becomes of this one depends on how fast the others' threads end
            assert all(at_end(stranger.stream) for stranger in strangers)
        assert known.ask(1, (served.address, 1))[0] == streams.NOT_REGISTERED


def test_stopping_ends_every_stream_and_gives_everything_back():
    """Readers see the end at once; descriptors and threads are as before; stopped is stopped."""
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    with Served() as served:
        with served.reader() as idle, RawReader(served.place) as silent:
            served.server.stop()
            assert at_end(idle.stream)
            assert at_end(silent.stream)
        served.server.stop()
        with pytest.raises(Closed):
            served.server.add(served.address, 1)
        with pytest.raises(ConnectionRefusedError):
            RawReader(served.place)
    assert len(os.listdir("/proc/self/fd")) == fds
    while len(os.listdir("/proc/self/task")) > threads:  # a joined thread is listed a moment longer
        os.sched_yield()


def test_a_forked_child_holds_neither_port_nor_streams(served):
    """Else a dead parent's port would take connections, and its readers would wait, for as long as the child lives."""
    with served.reader() as reader:
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            served.server.forget()
            os.read(told, 1)
            os._exit(0)
        served.server.stop()
        try:
            assert at_end(reader.stream)
            with pytest.raises(ConnectionRefusedError):
                RawReader(served.place)
        finally:
            os.write(tell, b".")
            assert os.waitpid(child, 0)[1] == 0
            os.close(told)
            os.close(tell)


def test_an_incarnation_has_its_length():
    """A wrong one would never match."""
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(BadRequest, match="16 bytes"):
        native.StreamServer(listener, b"short")


def test_many_at_once(served):
    """64_clients_one_host, concurrent_first_contact: streams opened at the same moment each get their own bytes."""
    served.server.add(served.address, served.nbytes)
    data = pattern(1, served.nbytes).tobytes()
    start, right = threading.Barrier(16), []

    def read(number: int) -> None:
        start.wait(streams.PATIENCE_S)
        with served.reader() as reader:
            right.append(reader.ask(number, (served.address + number, 100))[2] == data[number : number + 100])

    threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 16


def test_a_read_of_the_wrong_shape_is_refused():
    """As with every other way of reading: no empty batch, no vectors that differ in length."""
    one = np.ones(1, dtype=np.uint64)
    for remote, local, nbytes in [(one[:0], one[:0], one[:0]), (one, one, one * 0), (one, one[:0], one)]:
        with pytest.raises(BadRequest):
            native.StreamReading(remote, local, nbytes, 0)
