"""The benchmarks' arithmetic and raw peers: what ratios are made of is right before any speed is claimed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash
from rich.console import Console

from bench import raw
from bench.measure import figure, interleave, ratio, sample
from bench.process import footprint
from bench.report import Report


def test_pairs_are_interleaved_in_turns() -> None:
    """Every function runs once per pair, in alternating order, so that drift favours none."""
    ran: list[str] = []

    def note(name: str, value: float) -> float:
        ran.append(name)
        return value

    measured = interleave({"a": lambda: note("a", 1.0), "b": lambda: note("b", 2.0)}, 3)
    assert ran == ["a", "b", "b", "a", "a", "b"]
    assert measured == {"a": [1.0] * 3, "b": [2.0] * 3}


def test_ratio_is_the_median_of_the_pairs_ratios() -> None:
    """A pair that the machine slowed on both sides changes nothing; one wild pair does not move the median."""
    found = ratio("r", [1.0, 10.0, 1.0, 1.0, 90.0], [2.0, 20.0, 2.0, 2.0, 1.0], at_most=1)
    assert (found.value, found.low, found.high, found.count) == (0.5, 0.5, 0.5, 5)
    assert found.holds


@pytest.mark.parametrize(
    ("at_least", "at_most", "holds"), [(1.0, None, True), (2.1, None, False), (None, 2.0, True), (None, 1.9, False)]
)
def test_bounds_are_inclusive(at_least: float | None, at_most: float | None, holds: bool) -> None:
    """A figure at its bound holds; beyond it, it falls short."""
    bound = 2.0 if holds and at_least else at_least
    assert figure("f", sample([2.0, 2.0]), at_least=bound, at_most=at_most).holds is holds


def test_pairs_must_match() -> None:
    """A ratio of unequal lists would pair what was not measured together."""
    with pytest.raises(ValueError, match="zip"):
        ratio("r", [1.0, 2.0], [1.0])


@pytest.mark.parametrize("threads", [1, 2])
def test_raw_read_copies_every_byte(threads: int) -> None:
    """The raw peer moves what it is timed for: two ranges, neither a multiple of a step, arrive back to back."""
    sources = [np.arange(nbytes, dtype=np.uint32).view(np.uint8) for nbytes in (raw.STEP_BYTES // 3, 777)]
    into = raw.buffer(sum(source.nbytes for source in sources))
    seconds = raw.read_process(os.getpid(), [(s.ctypes.data, s.nbytes) for s in sources], into, threads)
    assert seconds > 0
    assert np.array_equal(into, np.concatenate(sources))


def test_raw_read_checks_its_return_code() -> None:
    """A read that the kernel refuses is an error, not a fast measurement."""
    with pytest.raises(OSError, match="process_vm_readv"):
        raw.read_process(os.getpid(), [(4096, 64)], raw.buffer(64))
    with pytest.raises(ValueError, match="smaller than the ranges"):
        raw.read_process(os.getpid(), [(4096, 65)], raw.buffer(64))


def test_raw_digest_covers_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bare digest loop digests all bytes, the last short chunk, too."""
    seen: list[int] = []
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda view: seen.append(view.nbytes))
    raw.digest([np.zeros(10, np.uint8), np.zeros(4, np.uint8)], 4)
    assert seen == [4, 4, 2, 4]


def test_raw_copy_copies() -> None:
    """The memcpy peer copies."""
    source, into = np.arange(99, dtype=np.uint8), raw.buffer(99)
    assert raw.copy(source, into) > 0
    assert np.array_equal(source, into)


def test_footprint_sees_a_descriptor() -> None:
    """One more open file is one more descriptor, and gone when closed."""
    before = footprint()
    with Path("/dev/null").open("rb"):
        assert footprint().descriptors == before.descriptors + 1
    assert footprint().descriptors == before.descriptors
    assert before.peak_rss >= before.rss > 0


def test_report_is_one_document(tmp_path: Path) -> None:
    """The document carries question, machine, results with units and ratios by name; the table shows each."""
    report = Report("pull")
    report.add("pull", "GB/s", sample([1.0, 2.0, 3.0]))
    report.ratios.append(ratio("pull_over_raw", [1.0] * 7, [2.0] * 7, at_least=0.4))
    report.write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    assert set(document) == {"question", "machine", "results", "ratios"}
    assert document["results"]["pull"] == {"median": 2.0, "low": 1.5, "high": 2.5, "count": 3, "unit": "GB/s"}
    assert document["ratios"]["pull_over_raw"]["holds"] is True
    console = Console(record=True, width=140, file=(tmp_path / "table").open("w"))
    with console.file:
        report.show(console)
    shown = console.export_text()
    assert "pull_over_raw" in shown
    assert "holds" in shown
