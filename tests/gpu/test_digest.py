"""The digest computed on a device: the host's, bit for bit, and at which part of the device's own copy rate."""

from __future__ import annotations

import pytest
import torch
import xxhash

from tensorhub.client import devices
from tensorhub.pipeline.device_digest import digest_rows
from tests.gpu.conftest import Accelerator

KIB = 1024


@pytest.mark.parametrize("nbytes", [241, 256, 257, 1024, 1025, 3 * KIB + 63, 64 * KIB, 64 * KIB + 1])
def test_equal_to_the_host_bit_for_bit(device: Accelerator, nbytes: int) -> None:
    """slice_boundary: around stripes, blocks and chunks; several chunks at once."""
    rows = torch.randint(0, 256, (5, nbytes), dtype=torch.uint8)
    found = [value & 2**64 - 1 for value in digest_rows(rows.to(device.place)).tolist()]
    assert found == [xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in rows]


def test_a_lane_digests_beside_the_callers_stream(device: Accelerator) -> None:
    """The result is in host memory once the lane's mark is done, while the caller's stream is busy."""
    rows = torch.randint(0, 256, (3, 4 * KIB), dtype=torch.uint8)
    there = rows.to(device.place)
    adapter = devices.device_of(there)
    assert adapter is not None
    lane = adapter.lane()
    device.busy()
    behind = device.mark()
    found = lane.digest(there)
    assert devices.wait([(adapter, lane.mark())], lambda: False, 60.0)
    assert not behind.query()
    expected = [xxhash.xxh3_64_intdigest(row.numpy().tobytes()) for row in rows]
    assert [value & 2**64 - 1 for value in found.tolist()] == expected


@pytest.mark.parametrize("chunks", [64, 1024])
def test_rate_beside_a_copy(device: Accelerator, figures: dict[str, float], chunks: int) -> None:
    """A figure: bytes digested per second over bytes copied within the device per second, for chunks of 1 MiB."""
    rows = torch.randint(0, 256, (chunks, KIB * KIB), dtype=torch.uint8, device=device.place)
    target = torch.empty_like(rows)
    copy_s = device.timed(lambda: target.copy_(rows))
    digest_s = device.timed(lambda: digest_rows(rows), rounds=3)
    figures[f"{device.kind}_digest_over_copy_{chunks}_chunks"] = copy_s / digest_s
    figures[f"{device.kind}_digest_gb_per_s_{chunks}_chunks"] = rows.nbytes / digest_s / 1e9
    assert len(digest_rows(rows[:2])) == 2
