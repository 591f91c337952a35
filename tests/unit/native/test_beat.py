"""The heartbeat beats without the interpreter, ends for a reason, and stops at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time

import pytest

from tensorhub import native
from tensorhub.errors import BadRequest
from tensorhub.native.beat import REPLY_BYTES_MAX


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


REQUEST, EXPECTED = frame(b"beat of session 7"), frame(b"ok")
SECOND = 1_000_000_000
#: Long enough that only what the test does ends a wait; short enough to fail before the test's own timeout.
NEVER = 60 * SECOND

#: Answers every beat, and prints when it came; the first line is printed once it is ready.
ECHO = """
import socket, sys, time
peer = socket.socket(fileno=int(sys.argv[1]))
request, reply = bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
print("ready", flush=True)
while got := peer.recv(len(request), socket.MSG_WAITALL):
    assert got == request
    print(time.monotonic_ns(), flush=True)
    peer.sendall(reply)
"""


@pytest.fixture
def pair():
    """A connected pair of stream sockets: the beat's end, the server's end."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(30)
    with mine, theirs:
        yield mine, theirs


def start(mine: socket.socket, interval_ns: int = NEVER, ack_timeout_ns: int = NEVER) -> native.Beat:
    return native.Beat(mine.fileno(), REQUEST, EXPECTED, interval_ns, ack_timeout_ns)


def answer(theirs: socket.socket, reply: bytes = EXPECTED) -> None:
    assert theirs.recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
    theirs.sendall(reply)


def ended(beat: native.Beat) -> str:
    """Why it ended, once it has; the test's timeout bounds the wait."""
    while (why := beat.failed()) is None:
        os.sched_yield()
    return why


def test_an_acknowledged_beat_counts_from_when_it_was_sent(pair):
    """The lease is counted from the sending of a beat that was acknowledged, not from the reply."""
    before = time.monotonic_ns()
    beat = start(pair[0])
    assert pair[1].recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
    received = time.monotonic_ns()
    assert beat.acknowledged_ns() == 0
    pair[1].sendall(EXPECTED)
    while beat.acknowledged_ns() == 0:
        os.sched_yield()
    assert before <= beat.acknowledged_ns() <= received
    assert beat.failed() is None
    beat.stop()


def test_it_beats_again_after_the_interval(pair):
    """One acknowledged beat is followed by the next, each with a later time."""
    beat = start(pair[0], interval_ns=SECOND // 1000)
    seen = []
    for _ in range(3):
        answer(pair[1])
        while beat.acknowledged_ns() in {0, *seen}:
            os.sched_yield()
        seen.append(beat.acknowledged_ns())
    assert seen == sorted(seen)
    beat.stop()


def test_a_reply_in_pieces_is_put_together(pair):
    """A stream may split frames anywhere."""
    beat = start(pair[0])
    assert pair[1].recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
    for i in range(len(EXPECTED)):
        pair[1].sendall(EXPECTED[i : i + 1])
    while beat.acknowledged_ns() == 0:
        os.sched_yield()
    beat.stop()


@pytest.mark.parametrize("reply", [b"no", b"", b"ok, but longer", b"x" * REPLY_BYTES_MAX])
def test_a_wrong_reply_ends_it_and_is_kept(pair, reply):
    """Whatever is not the expected reply ends the beat, unacknowledged; the owner can read what it was."""
    beat = start(pair[0])
    answer(pair[1], frame(reply))
    assert "another reply" in ended(beat)
    assert beat.unexpected_reply() == reply
    assert beat.acknowledged_ns() == 0
    beat.stop()
    assert "another reply" in str(beat.failed())


def test_an_oversized_reply_ends_it_without_being_read(pair):
    """A length beyond any refusal's is a broken stream."""
    beat = start(pair[0])
    answer(pair[1], (REPLY_BYTES_MAX + 1).to_bytes(4, "big"))
    assert "Message too long" in ended(beat)
    beat.stop()


def test_a_closed_connection_ends_it(pair):
    """The peer's end of file is an ending with its own reason."""
    beat = start(pair[0])
    pair[1].close()
    assert "closed" in ended(beat) or "failed" in ended(beat)
    beat.stop()


def test_a_silent_peer_ends_it_at_the_timeout(pair):
    """A beat that nobody acknowledges in time is the last one."""
    beat = start(pair[0], ack_timeout_ns=SECOND // 1000)
    assert ended(beat) == "no reply in time"
    beat.stop()


def test_a_peer_that_takes_nothing_ends_it_at_the_timeout(pair):
    """A full socket is no excuse: sending has the same deadline."""
    pair[0].setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            pair[0].send(bytes(65536))
    beat = start(pair[0], ack_timeout_ns=SECOND // 1000)
    assert ended(beat) == "no reply in time"
    beat.stop()


def test_stop_is_prompt_and_idempotent_and_gives_everything_back(pair):
    """Stopping interrupts any wait (the intervals here are a minute), joins the thread and closes the descriptors."""
    fds, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    waits_for_reply = start(pair[0])
    waits_for_reply.stop()
    answer(pair[1])
    waits_for_time = start(pair[0])
    while waits_for_time.acknowledged_ns() == 0:
        os.sched_yield()
    waits_for_time.stop()
    waits_for_time.stop()
    assert waits_for_time.failed() == "stopped"
    assert waits_for_time.acknowledged_ns() > 0
    assert len(os.listdir("/proc/self/fd")) == fds
    while len(os.listdir("/proc/self/task")) > threads:  # a joined thread is listed a moment longer
        os.sched_yield()


def test_the_thread_takes_no_signals(pair):
    """Every signal is blocked in the thread: handlers run where they were installed to run."""
    before = set(os.listdir("/proc/self/task"))
    beat = start(pair[0])
    (thread,) = set(os.listdir("/proc/self/task")) - before
    with open(f"/proc/self/task/{thread}/status", encoding="ascii") as status:
        blocked = next(int(line.split()[1], 16) for line in status if line.startswith("SigBlk"))
    # SIGKILL, SIGSTOP and the two that libc keeps for itself cannot be blocked.
    assert blocked | 1 << 8 | 1 << 18 | 1 << 31 | 1 << 32 == 2**64 - 1
    beat.stop()


def test_a_forked_child_sees_a_dead_beat(pair):
    """In a forked child the thread does not exist: the object says so, acknowledges nothing, and stops harmlessly."""
    beat = start(pair[0])
    answer(pair[1])
    while beat.acknowledged_ns() == 0:
        os.sched_yield()
    child = os.fork()
    if child == 0:
        dead = "forked" in str(beat.failed()) and beat.acknowledged_ns() == 0 and beat.unexpected_reply() == b""
        beat.stop()
        os._exit(0 if dead else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert beat.failed() is None
    beat.stop()


def test_bad_arguments_are_refused(pair):
    """A frame without its length, an interval of nothing, a datagram socket: refused before a thread starts."""
    fd = pair[0].fileno()
    with pytest.raises(BadRequest, match="whole frame"):
        native.Beat(fd, b"beat", EXPECTED, 1, 1)
    with pytest.raises(BadRequest, match="longer"):
        native.Beat(fd, REQUEST, frame(bytes(REPLY_BYTES_MAX + 1)), 1, 1)
    with pytest.raises(BadRequest, match="positive"):
        native.Beat(fd, REQUEST, EXPECTED, 0, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.Beat(-1, REQUEST, EXPECTED, 1, 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram, pytest.raises(OSError, match="wrong type"):
        native.Beat(datagram.fileno(), REQUEST, EXPECTED, 1, 1)


@pytest.mark.slow
def test_it_beats_while_the_main_thread_holds_the_gil(pair):
    """A trainer that holds the interpreter for long keeps its lease: beats go out and are acknowledged meanwhile."""
    pair[1].setblocking(True)  # the flag is shared with the child
    command = [sys.executable, "-c", ECHO, str(pair[1].fileno()), REQUEST.hex(), EXPECTED.hex()]
    with subprocess.Popen(command, pass_fds=[pair[1].fileno()], stdout=subprocess.PIPE, text=True) as echo:
        assert echo.stdout is not None
        assert echo.stdout.readline() == "ready\n"
        beat = start(pair[0], interval_ns=SECOND // 50)
        held_from = time.monotonic_ns()
        ctypes.PyDLL(None).usleep(1_500_000)
        held_to = time.monotonic_ns()
        acknowledged_ns = beat.acknowledged_ns()
        beat.stop()
        pair[0].shutdown(socket.SHUT_RDWR)
        arrived = [int(line) for line in echo.stdout]
    assert acknowledged_ns > held_from
    assert sum(held_from < at < held_to for at in arrived) >= 3
