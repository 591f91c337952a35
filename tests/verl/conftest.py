"""One Ray for all tests here, and one trainer with two replicas for those that break neither.

Without `scripts/test-verl`, which says that verl is there, what takes a Ray and minutes is not collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from bench.verl.environment import environment

if TYPE_CHECKING:
    from bench.verl.rig import Rig

BACKENDS = ("tcp_baseline", "tensorhub")

if "TENSORHUB_TEST_VERL" in os.environ:
    os.environ.update(environment())  # before anything imports verl
else:
    collect_ignore = ["test_failures.py", "test_manager.py", "test_sync.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    from bench.verl.rig import ray_cluster

    with ray_cluster():
        yield


@pytest.fixture(scope="session")
def shared(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    from bench.verl import models, rig

    return rig.Rig.start(models.make(tmp_path_factory.mktemp("tiny"), models.TINY), replicas=2)


@pytest.fixture
def tiny(shared: Rig) -> Iterator[Rig]:
    """A trainer of two ranks and two replicas with a tiny model. What a test adds is gone after it."""
    before = list(shared.replicas)
    yield shared
    shared.drop([replica for replica in shared.replicas if replica not in before])


@pytest.fixture(params=BACKENDS)
def either(request: pytest.FixtureRequest, tiny: Rig) -> Rig:
    """The same, on each back end in turn: what holds for the baseline, too, is verl's promise and our harness's."""
    tiny.use(request.param)
    return tiny


@pytest.fixture
def hub(tiny: Rig) -> Rig:
    """The same, on back end `tensorhub`."""
    tiny.use("tensorhub")
    return tiny


@pytest.fixture
def large(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A trainer of two ranks and two replicas of its own with a model of 325 MB."""
    from bench.verl import models, rig

    found = rig.Rig.start(models.make(tmp_path_factory.mktemp("large"), models.LARGE), replicas=2)
    yield found
    found.close()


@pytest.fixture
def doomed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A tiny one whose trainer a test may kill."""
    from bench.verl import models, rig

    found = rig.Rig.start(models.make(tmp_path_factory.mktemp("doomed"), models.TINY), replicas=1)
    yield found
    found.close()
