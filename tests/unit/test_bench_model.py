"""The model of fan-out: what it is fitted on, which graph it believes in, and which of a hop's two delays counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import model

CONSTANTS = model.Constants(
    chunk_bytes=100, packet_bytes=60, digest_bytes_per_s=10_000.0, depth_max=256, readers_per_source=4
)
FITTED = model.Fitted(bytes_per_s=1000.0, around_s=0.5, set_up_s=0.02, look_s=0.01)
SHARD = 10_000
LAG = 160 / 1000 + 100 / 10_000 + 0.01


def alone(whole: float, transfer: float, set_up: float = 0.2, look: float = 0.01) -> model.Alone:
    return model.Alone(whole, transfer, set_up, look)


def test_one_reader_is_predicted_as_it_was_fitted() -> None:
    """At N = 1 the model says what was measured, whatever the split between transfer and the rest."""
    fitted = model.Fitted.of(SHARD, [alone(12.0, 10.0), alone(11.0, 9.0, 0.1), alone(13.0, 11.0, 0.3)])
    assert (fitted.bytes_per_s, fitted.set_up_s) == (1000.0, 0.2)
    assert model.predict(CONSTANTS, fitted, SHARD, 1) == pytest.approx(12.0)


def test_a_chain_costs_one_hop_per_reader() -> None:
    """Behind one source, each further reader adds the same: nobody shares a link."""
    steps = [model.predict(CONSTANTS, FITTED, SHARD, n) for n in (1, 2, 3, 17)]
    assert steps[1] - steps[0] == pytest.approx(LAG)
    assert steps[3] - steps[0] == pytest.approx(16 * LAG)


@pytest.mark.parametrize(("set_up", "hop"), [(0.0, LAG), (LAG / 2, LAG), (3 * LAG, 3 * LAG)])
def test_the_longer_delay_of_a_hop_hides_the_other(set_up: float, hop: float) -> None:
    """Who begins later than its source by more than the lag never waits for a chunk; who begins earlier does."""
    assert model.hop_s(CONSTANTS, replace(FITTED, set_up_s=set_up)) == pytest.approx(hop)


@pytest.mark.parametrize("set_up", [0.01, 0.5])
def test_the_closed_form_is_what_stepping_through_the_chunks_gives(set_up: float) -> None:
    """docs/model.md: readers that each begin a set-up later, and have no chunk before their source has handed it on."""
    fitted = replace(FITTED, set_up_s=set_up)
    chunks, chunk_s = SHARD // CONSTANTS.chunk_bytes, CONSTANTS.chunk_bytes / fitted.bytes_per_s
    lag = model.lag_s(CONSTANTS, fitted)
    had = [0.0] * chunks  # when the source has each chunk: the publisher has all
    for reader in range(7):
        begins, mine = reader * set_up, []
        for at, there in enumerate(had):
            crossed = max(begins, mine[-1] if mine else 0.0) + chunk_s
            mine.append(crossed if reader == 0 else max(crossed, there + lag))
            assert at or mine[0] >= begins + chunk_s
        had = mine
    assert model.predict(CONSTANTS, fitted, SHARD, 7) == pytest.approx(fitted.around_s + had[-1])


def test_sources_that_are_complete_each_have_a_chain() -> None:
    """Four trainers and sixteen readers: four chains of four, three hops behind the first readers."""
    assert model.Shape.of(16, 4, 256, 4) == model.Shape(4, 1)
    assert model.predict(CONSTANTS, FITTED, SHARD, 16, sources=4) == pytest.approx(0.5 + 10.0 + 3 * LAG)


@pytest.mark.parametrize(
    ("readers", "sources", "shape"),
    [(1, 1, (1, 1)), (3, 1, (3, 1)), (4, 1, (3, 2)), (14, 1, (3, 2)), (15, 1, (3, 3)), (6, 2, (3, 1)), (7, 2, (3, 2))],
)
def test_what_no_chain_can_take_doubles_up(readers: int, sources: int, shape: tuple[int, int]) -> None:
    """At three hops, sources get a second reader only when every chain is as long as it may be; then a third."""
    assert model.Shape.of(readers, sources, 3, 4) == model.Shape(*shape)


def test_readers_of_one_source_share_its_link() -> None:
    """Without relaying beyond one hop, four readers of one source take four times as long as one."""
    star = replace(CONSTANTS, depth_max=1)
    assert model.predict(star, FITTED, SHARD, 4) == pytest.approx(0.5 + 40.0)


@pytest.mark.parametrize("given", [(5, 1, 1, 4), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_what_fits_in_no_graph_is_refused(given: tuple[int, int, int, int]) -> None:
    """More readers than depth and width allow, or none of something, are no graph."""
    with pytest.raises(ValueError, match="readers"):
        model.Shape.of(*given)


def test_an_error_is_relative_to_what_was_measured() -> None:
    """Too high and too low count alike."""
    assert model.error(1.1, 1.0) == pytest.approx(0.1)
    assert model.error(0.9, 1.0) == pytest.approx(0.1)


def test_a_chunk_within_one_packet_crosses_both_halves_of_a_link_in_turn() -> None:
    """The far half passes on what it has whole: of a small chunk all, of a large one only its first packet."""
    small = replace(CONSTANTS, packet_bytes=1000)
    assert model.lag_s(small, FITTED) - model.lag_s(CONSTANTS, FITTED) == pytest.approx(40 / 1000)
