"""Small clusters for the tests of graphs: views as a server gives them, and trees of any size drawn from a seed."""

from __future__ import annotations

import random

from tensorhub.cli.graph import Graph, Holder, Origin, build
from tensorhub.messages import HoldingView, StatusView, VersionView
from tensorhub.types import Epoch, Location, ModelKey, ReplicaId, Seat, Version
from tensorhub.views import PulledView

ACTOR = ModelKey("default", "actor")
MB = 1_000_000
SECOND_NS = 1_000_000_000
Pulls = tuple[tuple[str, int], ...]


def seat(name: str, model: ModelKey = ACTOR) -> Seat:
    """`roll-0#1`"""
    replica, _, shard = name.partition("#")
    return Seat(model, ReplicaId(replica), int(shard or 0))


def holding(
    name: str,
    *pulls: tuple[str, int],
    state: str = "complete",
    watermark: int = 10,
    number: int = 7,
    where: str = "",
    model: ModelKey = ACTOR,
) -> HoldingView:
    """A holding of 50 MB; the last of `pulls` (source, MB) is its upstream while it fills."""
    upstream = str(seat(pulls[-1][0])) if pulls and state == "filling" else ""
    return HoldingView(
        seat(name, model),
        1,
        "a",
        Version("main", number),
        state,
        watermark,
        10,
        50 * MB,
        upstream,
        (),
        name.startswith("spot"),
        Location.parse(where),
        "tcp" if pulls else "",
        tuple(
            PulledView(seat(source, model), mb * MB, "tcp (fastest)", (9 - index) * SECOND_NS, 2 * SECOND_NS)
            for index, (source, mb) in enumerate(pulls)
        ),
    )


def status(*holdings: HoldingView) -> StatusView:
    """A view of these holdings, newest version of each model first."""
    keys = sorted({(row.seat.model, row.version) for row in holdings}, key=lambda key: (key[0], -key[1].number))
    versions = tuple(VersionView(model, version, "readable", 1, 50 * MB, (), (), 0, True) for model, version in keys)
    return StatusView(Epoch(bytes(16)), (), versions, holdings, ())


#: A trainer that is gone by now, a reader that changed its source, one that fills, two places, one without any.
SMALL = status(
    holding("roll-0", ("trainer", 50), where="dc1/r1/h1"),
    holding("roll-1", ("trainer", 50), where="dc1/r2/h2"),
    holding("roll-2", ("trainer", 12), ("roll-0", 38), where="dc2/r1/h3"),
    holding("spot-3", ("roll-1", 10), state="filling", watermark=2, where="dc2/r1/h4"),
    holding("roll-10", ("roll-0", 50)),
)


def tree(readers: int, seed: int, *, fan: int = 4, places: int = 3) -> Graph:
    """A random tree of that many readers; every fifth had another source before."""
    chance = random.Random(seed)
    holders = [Holder("trainer", 0, "published", 1.0, MB, ("dc0", "r0", "h"))]
    served = {"trainer": 0}
    for index in range(readers):
        name = f"roll-{index}"
        source = chance.choice([each for each, count in served.items() if count < fan])
        origins = [Origin(source, MB, "tcp")]
        if index % 5 == 4:
            origins.insert(0, Origin(f"roll-{chance.randrange(readers)}", 1, "tcp"))
        served[source] += 1
        served[name] = 0
        place = ("dc" + str(chance.randrange(2)), "r" + str(chance.randrange(places)))[: chance.randrange(3)]
        holders.append(Holder(name, 0, "complete", 1.0, MB, place, origins=tuple(origins)))
    return build("actor", "7", holders)
