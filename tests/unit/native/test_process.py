"""Reads of a process's memory by pid: exact bytes, exact errors, deadlines. This process reads itself here."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time

import numpy as np
import pytest

from tensorhub import native
from tensorhub.errors import BadRequest, Broken

LATER = 2**62


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def holed_mapping() -> tuple[mmap.mmap, int, int]:
    """Two pages that may be read, then one that may not: the mapping, its address, the page size."""
    page = mmap.PAGESIZE
    mapping = mmap.mmap(-1, 3 * page)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 2 * page), page, 0) == 0
    return mapping, address, page


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ranges", [1, 7, 1024, 1025, 5000])
def test_every_byte_lands_however_it_is_cut(threads, ranges):
    """slice_boundary: any number of ranges, read by any number of threads, moves exactly its bytes."""
    nbytes = 9 << 20
    source, target = noise(nbytes), np.zeros(nbytes, dtype=np.uint8)
    cuts = np.linspace(0, nbytes, ranges + 1).astype(np.uint64)
    reading = native.Reading(
        os.getpid(),
        cuts[:-1] + np.uint64(source.ctypes.data),
        cuts[:-1] + np.uint64(target.ctypes.data),
        np.diff(cuts),
        LATER,
    )
    workers = [threading.Thread(target=reading.run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert reading.outcome() == native.ReadOutcome(nbytes, 0, False)
    reading.close()
    assert (target == source).all()


def test_a_hole_ends_the_read_with_efault_after_the_bytes_before_it():
    """Bytes before an unmapped page arrive, the read goes on at the exact byte and then says EFAULT."""
    mapping, address, page = holed_mapping()
    mapping[: 2 * page] = bytes(noise(2 * page))
    target = np.zeros(3 * page, dtype=np.uint8)
    outcome = native.read_process(os.getpid(), u64(address + 5), u64(target.ctypes.data), u64(2 * page), LATER)
    assert outcome == native.ReadOutcome(2 * page - 5, errno.EFAULT, False)
    assert target[: 2 * page - 5].tobytes() == mapping[5 : 2 * page]


def test_a_hole_between_ranges_spares_what_comes_before():
    """Of several ranges in one call, those before the faulty one are complete."""
    _mapping, address, page = holed_mapping()
    target = np.full(4 * page, 7, dtype=np.uint8)
    at = target.ctypes.data
    outcome = native.read_process(
        os.getpid(),
        u64(address, address + 2 * page, address + page),
        u64(at, at + page, at + 2 * page),
        u64(page, page, page),
        LATER,
    )
    assert outcome == native.ReadOutcome(page, errno.EFAULT, False)
    assert not target[:page].any()
    assert (target[page:] == 7).all()


def test_a_process_that_does_not_exist_is_esrch():
    """A pid beyond the kernel's limit says ESRCH, for a read and for a probe."""
    nobody = 2**22 + 1
    assert native.probe_process(nobody) == errno.ESRCH
    assert native.probe_process(os.getpid()) == 0
    target = noise(8)
    outcome = native.read_process(nobody, u64(target.ctypes.data), u64(target.ctypes.data), u64(8), LATER)
    assert outcome == native.ReadOutcome(0, errno.ESRCH, False)


def test_a_deadline_in_the_past_reads_nothing():
    """The deadline is looked at before the first byte."""
    source, target = noise(8), np.zeros(8, dtype=np.uint8)
    outcome = native.read_process(
        os.getpid(), u64(source.ctypes.data), u64(target.ctypes.data), u64(8), time.monotonic_ns()
    )
    assert outcome == native.ReadOutcome(0, 0, True)
    assert not target.any()


def test_a_cancelled_read_stops_before_its_next_call():
    """After `cancel`, no run starts another call."""
    source, target = noise(8), np.zeros(8, dtype=np.uint8)
    reading = native.Reading(os.getpid(), u64(source.ctypes.data), u64(target.ctypes.data), u64(8), LATER)
    reading.cancel()
    reading.run()
    assert reading.outcome() == native.ReadOutcome(0, 0, False, cancelled=True)


def test_empty_reads_are_refused():
    """zero_size_not_registered: no range, or a range of no bytes, is no read."""
    for nbytes in (u64(), u64(8, 0)):
        addresses = np.ones(len(nbytes), dtype=np.uint64)
        with pytest.raises(BadRequest, match="no range is empty"):
            native.Reading(os.getpid(), addresses, addresses, nbytes, LATER)
    with pytest.raises(BadRequest, match="process id"):
        native.Reading(0, u64(1), u64(1), u64(1), LATER)


def test_a_closed_reading_is_not_used():
    """Use after close is our own fault and says so; closing twice is none."""
    data = noise(8)
    reading = native.Reading(os.getpid(), u64(data.ctypes.data), u64(data.ctypes.data), u64(8), LATER)
    reading.close()
    reading.close()
    with pytest.raises(Broken, match="closed"):
        reading.run()


def test_priority_is_lowered_for_one_thread_only():
    """A nice background thread leaves every other thread of the process as it was."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def background() -> None:
        native.lower_priority(before + 3)
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert seen == [before + 3]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_refused_priority_is_an_error():
    """A nice value the kernel clips is reported, not ignored."""
    errors: list[OSError] = []

    def background() -> None:
        try:
            native.lower_priority(40)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert [error.errno for error in errors] == [errno.EINVAL]
