"""Sessions that come to a new life of the server and tell of the one before."""

from __future__ import annotations

from dataclasses import replace

from tensorhub import messages as m
from tensorhub.types import Version
from tests.unit.server.kit import OTHER_LIFE, Cluster, Process, claim, content, root, undertaking

MAIN = m.LineageMark("main", 0, 1)
OLD, NEW = Version("main", 4), Version("main", 5)


def back(
    cluster: Cluster, name: str, *claims: m.Claim, shards: int = 1, location: str = "", **standing: object
) -> Process:
    """A process that was with the server that died. It was told `group` 7 and has `sequence` 3 next."""
    process = cluster.stranger(name, shards=shards, location=location)
    process.generation = process.fresh()
    assert isinstance(process.hello(OTHER_LIFE), m.Welcome)
    told = m.Standing(7, 3, lineages=(MAIN,), seen=OLD)
    told = replace(told, **{name: value(process) if callable(value) else value for name, value in standing.items()})
    assert isinstance(process.join(claims, standing=told), m.Joined)
    return process


def holder(cluster: Cluster, name: str, **change: object) -> Process:
    """A process back with a claim."""
    return back(cluster, name, claim(cluster.stranger(name), **change))


def trainer_of(cluster: Cluster, number: int, **change: object) -> Process:
    """The publisher of a version, back."""
    version = Version("main", number)
    what = {"version": version, "content": content(number), "root": root(number), "published": True}
    shown = claim(cluster.stranger("trainer"), **(what | change))
    return back(cluster, "trainer", shown, published=version, seen=None)


def reader(cluster: Cluster, name: str = "roll", *, shards: int = 1, **change: object) -> Process:
    """A process back in the middle of a transfer of version 4."""
    return back(cluster, name, shards=shards, undertaking=lambda process: undertaking(process, **change))
