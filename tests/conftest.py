"""Fixtures that several suites share; and gRPC, loaded first and as the library loads it, since some tests fork."""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path

import pytest

import tensorhub.wire.grpc_library  # noqa: F401 - for its effect, before Ray imports gRPC

# isort: split
from tests.support.ray_cluster import ray_head, ray_server

__all__ = ["ray_head", "ray_server"]


@pytest.fixture(autouse=True)
def _nothing_left_of_others(request: pytest.FixtureRequest) -> None:
    """What earlier tests left in cycles (an event loop, say) is collected before a test counts descriptors or threads,
    not while it does."""
    if _counts(request.path):
        gc.collect()


@cache
def _counts(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    return "/proc/self/" in text or "footprint" in text
