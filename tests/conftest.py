"""Fixtures that several suites share."""

from __future__ import annotations

from tests.support.ray_cluster import ray_head, ray_server

__all__ = ["ray_head", "ray_server"]
