"""What chaos calls ok: whole is right bytes of the right version, refused is by name, silence proves nothing."""

from __future__ import annotations

import dataclasses

import pytest

from tensorhub.cli.chaos.record import Outcome, Record, Seen, is_refusal, outcome, told
from tensorhub.cli.compare import Difference

CHUNK = 100
WHOLE = Seen("rollout#0", 1, 2.0, 10.0, nbytes=1000, bytes_read=1150, sources=("standby#0", "trainer#0"))
FAILED = Seen("rollout#0", 0, 2.0, 10.0, error="SourceFailed", message="trainer#0 died")
WRONG = dataclasses.replace(WHOLE, differences=(Difference("rollout", 0, "norm", "bytes differ"),))


def judged(record: Record) -> Outcome:
    return outcome("case", "did", "must", 3.0, record)


def test_a_whole_replicate_is_ok_and_counted() -> None:
    """Bytes that were found right count as verified, those read in vain as read again."""
    record = Record(CHUNK)
    record.whole(WHOLE, 1, chunks_again=1.5)
    found = judged(record)
    assert (found.ok, found.verdict, found.verified_bytes, found.bytes_again) == (True, "ok", 1000, 150)
    assert found.happened == (
        "rollout#0: version 1 from standby#0 then trainer#0 in 2.00 s, identical, 150 bytes read again",
    )


@pytest.mark.parametrize(
    ("seen", "version", "chunks_again", "complaint"),
    [
        (WHOLE, 1, 1.4, "read 1.50 chunks again"),
        (WHOLE, 2, None, "returned version 1, not 2"),
        (WRONG, 1, None, "WRONG BYTES: rollout#0 norm"),
        (FAILED, 1, None, "raised SourceFailed: trainer#0 died"),
        (dataclasses.replace(WHOLE, bytes_read=0), 1, None, "did not count"),
    ],
)
def test_what_is_not_whole_fails(seen: Seen, version: int, chunks_again: float | None, complaint: str) -> None:
    """More read again than allowed, another version, a wrong byte, an error, a data path that does not count."""
    record = Record(CHUNK)
    record.whole(seen, version, chunks_again=chunks_again)
    found = judged(record)
    assert found.verdict == "FAILED"
    assert len(found.complaints) == 1
    assert complaint in found.complaints[0]


def test_wrong_bytes_are_not_verified_ones() -> None:
    """The figure of verified bytes holds only what was found right."""
    record = Record(CHUNK)
    record.whole(WRONG, 1)
    assert judged(record).verified_bytes == 0
    assert "WRONG BYTES" in told(WRONG)


def test_success_where_a_refusal_was_due_fails() -> None:
    """A replicate that had to fail and returned is a failure, whatever it returned."""
    record = Record(CHUNK)
    record.refused(WHOLE)
    assert "although it could not be whole" in judged(record).complaints[0]


@pytest.mark.parametrize(
    ("error", "names", "holds"),
    [
        ("SourceFailed", (), True),
        ("SourceSilent", ("SourceFailed",), True),
        ("LeaseLost", ("GroupAborted",), False),
        ("ContractBroken", (), False),
        ("Broken", (), False),
        ("RuntimeError", (), False),
    ],
)
def test_a_refusal_is_told_by_name(error: str, names: tuple[str, ...], holds: bool) -> None:
    """Any `Unavailable` if none is named, else one of those or of their kind; our own mistakes never count."""
    assert is_refusal(error, names) is holds
    record = Record(CHUNK)
    record.refused(dataclasses.replace(FAILED, error=error), *names)
    assert judged(record).ok is holds


def test_an_error_must_name_what_matters() -> None:
    """An error of the right kind that does not say who is none."""
    record = Record(CHUNK)
    record.refused(FAILED, says="shard 1")
    assert "does not name 'shard 1'" in judged(record).complaints[0]


def test_untorn_is_whole_or_refused() -> None:
    """Both ends are allowed; a wrong byte under success is not."""
    record = Record(CHUNK)
    assert record.untorn(WHOLE, 1)
    assert not record.untorn(FAILED, 1)
    assert judged(record).ok
    assert record.untorn(WRONG, 1)
    assert not judged(record).ok


def test_too_late_fails() -> None:
    """What came after its limit is noted and complained of; at the limit it holds."""
    record = Record(CHUNK)
    record.whole(WHOLE, 1)
    record.within("the drain completed", 3.0, 3.0)
    assert judged(record).ok
    record.within("the drain completed", 3.1, 3.0)
    found = judged(record)
    assert found.complaints == ("the drain completed only after 3.10 s, not within 3 s",)
    assert found.happened[-1] == "the drain completed after 3.10 s"


def test_a_case_that_saw_nothing_proves_nothing() -> None:
    """Without a replicate seen to its end there is no ok."""
    assert not judged(Record(CHUNK)).ok


def test_a_skipped_case_says_so() -> None:
    """It is neither ok nor failed."""
    found = Outcome("case", "did", "must", ok=True, seconds=0.0, skipped="no way to cut")
    assert found.verdict == found.as_json()["verdict"] == "skipped"
