"""Fixtures that several suites share; and gRPC, loaded first and as the library loads it, since some tests fork."""

from __future__ import annotations

import tensorhub.wire.grpc_library  # noqa: F401 - for its effect, before Ray imports gRPC

# isort: split
from tests.support.ray_cluster import ray_head, ray_server

__all__ = ["ray_head", "ray_server"]
