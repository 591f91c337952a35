"""Fixtures that several suites share; and gRPC, loaded first and as the library loads it, since some tests fork.

Ctrl-C means what it means at a terminal, also where the shell that started the tests in the background ignores it.
"""

from __future__ import annotations

import gc
import signal
from functools import cache
from pathlib import Path

import pytest

import tensorhub.wire.grpc_library  # noqa: F401 - for its effect, before Ray imports gRPC

# isort: split
from tests.support.ray_cluster import ray_head, ray_server

__all__ = ["ray_head", "ray_server"]


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
