"""What readers say beforehand: how a filling will be shown, so that others can be sent to it with its own grant."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub import messages as m
from tensorhub.errors import BadRequest
from tensorhub.server.settings import COMPLETE_SOURCES, DEFAULTS, LOCATORS_MAX, SECOND_NS
from tests.unit.server.kit import LATEST, Cluster, Process, content


def offer(reader: Process, what: int = 1, *, serves: bool = True, locators: int = 1) -> int:
    """Ask for the latest version, expecting the content of version `what`."""
    reader.generation = reader.fresh()
    return reader.ask(
        m.Replicate(
            reader.seat,
            "a",
            reader.group,
            reader.sequence,
            LATEST,
            60 * SECOND_NS,
            reader.generation,
            serves,
            content(what).manifest,
            reader.locators() * locators,
            b"there",
        )
    )


def crowd(cluster: Cluster, count: int, **how: object) -> tuple[list[Process], list[int]]:
    readers = [cluster.process(f"roll-{at}") for at in range(count)]
    return readers, [offer(reader, **how) for reader in readers]  # type: ignore[arg-type]


def test_a_chain_of_readers_that_wait_is_made_in_one_step() -> None:
    """Sixteen ask before there is a version; its publication alone grants them all, each the one before."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    readers, calls = crowd(cluster, 16)
    trainer.publish(1)
    granted = [reader.answer(call) for reader, call in zip(readers, calls, strict=True)]
    assert [str(each.source.seat.replica) for each in granted] == ["trainer", *(f"roll-{at}" for at in range(15))]
    assert [each.begun for each in granted] == [True] + [False] * 15
    assert granted[5].source.locators == readers[4].locators()
    assert (granted[5].source.exposure, granted[5].source.generation) == (b"there", readers[4].generation)


def test_a_source_has_begun_once_it_says_how_far_it_is() -> None:
    """A later reader of a filling that has reported chunks need not wait for it to begin."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    first = cluster.process("roll-0")
    assert first.answer(offer(first)).begun
    first.progress(1)
    second = cluster.process("roll-1")
    granted = second.answer(offer(second))
    assert (str(granted.source.seat.replica), granted.begun) == ("roll-0", True)


@pytest.mark.parametrize("how", [{"what": 2}, {"serves": False}], ids=["another version", "a subset"])
def test_an_offer_of_something_else_is_none(how: dict[str, object]) -> None:
    """Who expected another version plans anew and says so with `Serve`; who fills a subset never serves."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    readers, calls = crowd(cluster, 2, **how)
    trainer.publish(1)
    cluster.wait(1)
    granted = [reader.answer(call) for reader, call in zip(readers, calls, strict=True)]
    assert [str(each.source.seat.replica) for each in granted] == ["trainer", "trainer"]


def test_without_partial_sources_an_offer_is_not_taken() -> None:
    """`sources="complete"`: a filling is nobody's source, whatever it said."""
    cluster = Cluster(replace(DEFAULTS, sources=COMPLETE_SOURCES))
    trainer = cluster.process("trainer")
    readers, calls = crowd(cluster, 3)
    trainer.publish(1)
    cluster.wait(1)
    granted = [reader.answer(call) for reader, call in zip(readers, calls, strict=True)]
    assert {str(each.source.seat.replica) for each in granted} == {"trainer"}


def test_serve_after_an_offer_replaces_it() -> None:
    """A reader that shows its filling elsewhere after all says so, and the next is sent there."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    trainer.publish(1)
    first = cluster.process("roll-0")
    first.answer(offer(first))
    first.do(m.Serve(first.seat, first.generation, first.locators(), b"elsewhere"))
    second = cluster.process("roll-1")
    granted = second.answer(offer(second))
    assert (granted.source.exposure, granted.begun) == (b"elsewhere", True)


def test_a_reader_that_ends_before_it_begins_sends_its_own_away() -> None:
    """Its readers hear at once that it is gone, and none waits for a generation that never comes."""
    cluster = Cluster()
    trainer = cluster.process("trainer")
    readers, calls = crowd(cluster, 2)
    trainer.publish(1)
    for reader, call in zip(readers, calls, strict=True):
        reader.answer(call)
    readers[0].abort("no memory")
    lost = [each.message for each in cluster.log if isinstance(each.message, m.SourceLost)]
    assert [(each.generation, each.source) for each in lost] == [(readers[1].generation, readers[0].generation)]
    again = readers[1].answer(readers[1].reroute(readers[0].generation))
    assert str(again.source.seat.replica) == "trainer"


def test_an_offer_is_checked() -> None:
    """What is too large is refused by name, and nothing of it is kept."""
    cluster = Cluster()
    reader = cluster.process("roll-0")
    answer = reader.answer(offer(reader, locators=LOCATORS_MAX + 1))
    assert isinstance(answer, m.Refused)
    assert answer.error == BadRequest.__name__
    assert reader.seat.replica not in {
        key
        for model in cluster.machine.state.models.values()
        for key in model.replicas
        if model.replicas[key].transaction is not None
    }
