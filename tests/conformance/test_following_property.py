"""Fillings over real engines, whatever the layout, the steps that sources take, and the sources that fail in turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorhub.errors import SourceFailed
from tensorhub.pipeline.manifest import Manifest
from tensorhub.ports import Engine
from tests.conformance.sources import FOLLOWERS, SourceHere, SourceProcess
from tests.support.courses import PATIENCE_S, Place, Shard, Vessel, plain

#: Of a source that is to be found silent; nothing depends on how soon.
STALL_S = 0.02
CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Voyage:
    """One source: how its memory is cut, the watermarks that it shows, turns of the loop between them, and its end."""

    cuts: int
    steps: tuple[tuple[int, int], ...]
    ending: str


@dataclass(frozen=True)
class Passage:
    """A reader's memory, and one to three sources, of which only the last is good."""

    nbytes: int
    cuts: int
    voyages: tuple[Voyage, ...]


@st.composite
def passages(draw: st.DrawFn) -> Passage:
    nbytes = draw(st.integers(1, 12 * CHUNK_BYTES))
    watermarks = st.integers(0, len(plain(nbytes)[1]))
    steps = st.lists(st.tuples(watermarks, st.integers(0, 30)), max_size=4).map(sorted).map(tuple)
    failing = st.builds(
        Voyage, st.integers(1, 3), steps, st.sampled_from(["withdrawn", "wrong bytes", "wrong digest", "silent"])
    )
    good = st.builds(Voyage, st.integers(1, 3), steps, st.just("good"))
    return Passage(nbytes, draw(st.integers(1, 3)), (*draw(st.lists(failing, max_size=2)), draw(good)))


async def sail(voyage: Voyage, shard: Shard) -> None:
    """What the source does, beside the reader."""
    for step, turns in voyage.steps:
        shard.reveal(step)
        for _ in range(turns):
            await asyncio.sleep(0)
    wrong = shard.placed
    match voyage.ending:
        case "good":
            shard.reveal(shard.whole)
        case "wrong bytes" | "wrong digest" if wrong < shard.whole:
            shard.put(shard.whole)
            shard.spoil(wrong, voyage.ending.removeprefix("wrong "))
            shard.show(shard.whole)
        case "silent":
            return
        case _:
            shard.withdraw()


@pytest.fixture(scope="module", params=list(FOLLOWERS))
def ends(request):
    """The reader's engine and the source's memory, for many readers in turn."""
    case = FOLLOWERS[request.param]
    engine, source = case.open_engine(), case.open_source()
    yield engine, source
    asyncio.run(engine.close())
    source.end()


async def fill(
    vessel: Vessel, passage: Passage, manifest: Manifest, engine: Engine, memory: SourceHere | SourceProcess
) -> int:
    """From one source after the other; how many failed."""
    failures = 0
    for voyage in passage.voyages:
        shard = Shard(memory, vessel.place.sizes, cuts=voyage.cuts, manifest=manifest.digest)
        vessel.filling.stall_s = STALL_S if voyage.ending == "silent" else PATIENCE_S
        sailing = asyncio.ensure_future(sail(voyage, shard))
        try:
            await vessel.fill(shard, engine)
            return failures
        except SourceFailed:
            assert voyage.ending != "good"
            failures += 1
        finally:
            await sailing
    return failures


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(passage=passages())
def test_whatever_sources_do_the_reader_ends_with_the_right_bytes(ends, passage: Passage) -> None:
    """source_killed_midchunk, chunk_size_invariance: a reader goes from source to source, keeps what was verified, and
    ends with every byte; what it read is what there is, and more only where a source failed."""
    engine, memory = ends
    manifest, sizes = plain(passage.nbytes)
    place = Place(sizes, cuts=passage.cuts)
    vessel = Vessel(manifest, place, stall_s=PATIENCE_S)
    failures = asyncio.run(fill(vessel, passage, manifest, engine, memory))
    data = b"".join(place.chunk(chunk) for chunk in range(len(sizes)))
    assert data == b"".join(Shard(memory, sizes).chunks)
    assert place.gaps_are_untouched()
    assert (vessel.filling.counter.is_complete, place.look()) == (True, len(sizes))
    assert vessel.shown == sorted(vessel.shown)
    assert vessel.filling.bytes_read >= sum(sizes)
    assert failures or vessel.filling.bytes_read == sum(sizes)
