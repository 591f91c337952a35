"""Sources that readers report: kept from all new readers once enough differ, for a time, and no healthy one is."""

from __future__ import annotations

import pytest

from tensorhub import messages as m
from tensorhub.server.settings import DEFAULTS, SECOND_NS, SICK_REPORTS
from tests.unit.server.kit import Cluster, Process

#: A reader waits at most so long for a source that is there: placement may prefer one that is idle soon.
PATIENCE_S = 4
QUARANTINE_S = DEFAULTS.quarantine_ns // SECOND_NS
TIMEOUT_S = 60.0


def everybody(cluster: Cluster) -> list[Process]:
    return list(cluster.processes.values())


def asked(cluster: Cluster, name: str) -> tuple[Process, int]:
    """A new process that asks for the version."""
    reader = cluster.process(name)
    return reader, reader.replicate(timeout_s=TIMEOUT_S)


def given(cluster: Cluster, reader: Process, call: int) -> str:
    """Whom it gets within the patience of placement; "" for nobody."""
    for _ in range(PATIENCE_S):
        answer = reader.answer(call)
        if answer is not None:
            assert isinstance(answer, m.Granted), answer
            return str(answer.source.seat.replica)
        cluster.alive(1, *everybody(cluster))
    return ""


def published(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        process = cluster.process(name)
        process.publish(1)
        process.seal(1)
    return cluster


def report(cluster: Cluster, source: Process, readers: list[Process]) -> list[int]:
    """Each of these, which were granted the source, says that it failed."""
    return [reader.reroute(source.published, timeout_s=TIMEOUT_S) for reader in readers]


def crowd(cluster: Cluster, source: str, count: int) -> list[Process]:
    """So many readers that read from the one source there is."""
    readers = [asked(cluster, f"roll-{number}") for number in range(count)]
    assert [given(cluster, reader, call) for reader, call in readers] == [source] * count
    return [reader for reader, _ in readers]


def test_enough_different_readers_keep_a_source_from_new_ones_for_a_while() -> None:
    """sick_source_quarantined: after SICK_REPORTS reports nobody new is given the source, for `quarantine_ns` and no
    longer; then one reader probes it, and its report alone keeps it out again."""
    cluster = published("sick")
    sick = cluster.processes["sick"]
    report(cluster, sick, crowd(cluster, "sick", SICK_REPORTS))
    late, call = asked(cluster, "late")
    cluster.alive(QUARANTINE_S - 1, *everybody(cluster))
    assert late.answer(call) is None
    cluster.alive(1, *everybody(cluster))
    assert given(cluster, late, call) == "sick"
    report(cluster, sick, [late])
    later, call = asked(cluster, "later")
    cluster.alive(QUARANTINE_S - 1, *everybody(cluster))
    assert later.answer(call) is None


def test_those_who_do_read_from_a_reported_source_go_on() -> None:
    """sick_source_quarantined: quarantine keeps new readers away; it takes the source from nobody."""
    cluster = published("sick")
    sick = cluster.processes["sick"]
    readers = crowd(cluster, "sick", SICK_REPORTS + 1)
    report(cluster, sick, readers[:SICK_REPORTS])
    assert readers[-1].notices(m.SourceLost) == []
    assert isinstance(readers[-1].answer(readers[-1].done(1)), m.Committed)


def test_progress_clears_a_name_at_once() -> None:
    """sick_source_quarantined: whoever still progresses proves the source: it is offered again, and earlier reports
    count no more."""
    cluster = published("source")
    source = cluster.processes["source"]
    readers = crowd(cluster, "source", SICK_REPORTS + 1)
    report(cluster, source, readers[:SICK_REPORTS])
    early, call = asked(cluster, "early")
    assert early.answer(call) is None
    readers[-1].progress(1)
    assert given(cluster, early, call) == "source"
    report(cluster, source, [early])
    late, call = asked(cluster, "late")
    assert given(cluster, late, call) == "source", "one report after the progress is one report"


@pytest.mark.parametrize("fillings", [SICK_REPORTS, 3 * SICK_REPORTS])
def test_one_sick_reader_gets_no_healthy_source_quarantined(fillings: int) -> None:
    """sick_source_quarantined: however often one reader reports whatever it is given, that is one report: everybody
    else is still given every source."""
    names = ("well-0", "well-1")
    cluster = published(*names)
    sick = cluster.process("sick-reader")
    for _ in range(fillings):
        call = sick.replicate(timeout_s=TIMEOUT_S)
        for _ in names:
            name = given(cluster, sick, call)
            call = sick.reroute(cluster.processes[name].published, timeout_s=TIMEOUT_S)
        refused = sick.answer(call)
        assert isinstance(refused, m.Refused)
        assert refused.error == "VersionUnavailable"
        sick.sequence += 1
    # It serves nobody, so these two get one source each, or one of them the other.
    given_to = {given(cluster, *asked(cluster, f"roll-{number}")) for number in range(2)}
    assert given_to == set(names)
