"""The server dies under hubs: what was published or complete is served again, and training is not held up."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

import tensorhub
from tensorhub.errors import DrainTimeout, Unavailable
from tests.integration.conftest import blank, same, weights
from tests.support.servers import LocalServers

pytestmark = pytest.mark.slow
#: A version that comes after all that are published while the watch opens.
LAST = 1 << 20


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TENSORHUB_RUNTIME_DIR", str(tmp_path))
    # The first unpublish after a restart waits for a lease: whoever read from us may not have come back yet.
    monkeypatch.setenv("TENSORHUB_LEASE_S", "3")
    monkeypatch.setenv("TENSORHUB_BEAT_S", "0.3")
    started = LocalServers(tmp_path)
    yield started
    tensorhub.shutdown()
    started.end_all()


def test_holdings_outlive_their_server(servers: LocalServers) -> None:
    """server_recreated_same_name: a new, empty server hears what everybody holds; old readers hold, new ones pull."""
    ours, first, second = weights(1), blank(weights(1)), blank(weights(1))
    trainer = tensorhub.open("actor", replica="trainer", server="local:one")
    a = tensorhub.open("actor", replica="a", server="local:one")
    b = tensorhub.open("actor", replica="b", server="local:one")
    for hub, tensors in ((trainer, ours), (a, first), (b, second)):
        hub.register(tensors)
    trainer.publish(version=1)
    a.replicate(1, timeout=20)
    servers.kill("one")
    assert a.replicate("latest", timeout=20).already_held
    assert b.replicate("latest", timeout=20).version == 1
    assert same(second, ours)
    trainer.unpublish(timeout=20)
    for tensor in ours.values():
        tensor.add_(1)
    trainer.publish(version=2)
    assert b.replicate("latest", timeout=20).version == 2
    assert same(second, ours)
    assert len(servers.pids("one")) == 2


def test_a_dead_server_holds_up_training_no_longer_than_the_timeout(
    servers: LocalServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no server to be had, unpublish ends by its timeout and stays hidden; `abandon` returns, and the tensors are
    the trainer's again."""
    ours = weights(1, rows=8)
    trainer = tensorhub.open("actor", replica="trainer", server="local:one")
    trainer.register(ours)
    trainer.publish(version=1, digest="now")
    # The next life cannot start: its settings make no sense.
    monkeypatch.setenv("TENSORHUB_LEASE_S", "nonsense")
    servers.kill("one")
    with pytest.raises(DrainTimeout):
        trainer.unpublish(timeout=0.5)
    assert trainer.state == {"a": "hidden published 1"}
    trainer.unpublish(timeout=0.5, abandon=True)
    ours["norm.bias"].add_(1)
    with pytest.raises(Unavailable):
        trainer.publish(version=2, timeout=0.5)
    assert trainer.version is None
    monkeypatch.setenv("TENSORHUB_LEASE_S", "3")
    trainer.publish(version=3, timeout=30)
    assert trainer.version == 3


def test_a_publish_whose_answer_is_lost_leaves_nothing_behind(servers: LocalServers) -> None:
    """The server is stopped while a publish is asked: the error is named, and once the server goes on, the hub is as
    good as new and nobody is sent to what was taken back. The same for an abandon that the server did not hear."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    trainer = tensorhub.open("actor", replica="trainer", server="local:one")
    trainer.register(ours)
    servers.kill("one", signal.SIGSTOP)
    with pytest.raises(Unavailable):
        trainer.publish(version=1, timeout=0.3)
    servers.kill("one", signal.SIGCONT)
    trainer.publish(version=2, timeout=20)
    servers.kill("one", signal.SIGSTOP)
    trainer.unpublish(abandon=True, timeout=0.3)
    ours["norm.bias"].add_(1)
    servers.kill("one", signal.SIGCONT)
    trainer.publish(version=3, timeout=20)
    rollout = tensorhub.open("actor", replica="rollout", server="local:one")
    rollout.register(theirs)
    assert rollout.replicate(timeout=20).version == 3
    assert same(theirs, ours)


def test_watch_shows_what_happens(servers: LocalServers) -> None:
    """`watch` yields the changes of its model, in order, and ends when none comes for its timeout."""
    ours = weights(1, rows=8)
    observer = tensorhub.open("actor", replica="observer", server="local:one")
    trainer = tensorhub.open("actor", replica="trainer", server="local:one")
    rollout = tensorhub.open("actor", replica="rollout", server="local:one")
    trainer.register(ours)
    rollout.register(blank(ours))
    seen = threading.Event()

    def act() -> None:
        version = 0
        while not seen.is_set():
            version += 1
            trainer.publish(version=version)
            trainer.unpublish(timeout=20)
        trainer.publish(version=LAST)
        rollout.replicate(LAST, timeout=20)

    actor = threading.Thread(target=act)
    actor.start()
    kinds = []
    for event in observer.watch(timeout=30):
        seen.set()
        if event.version is not None and event.version.number == LAST:
            kinds.append(event.kind)
        if kinds[-1:] == ["committed"]:
            break
    actor.join()
    assert [kind for kind in kinds if kind != "sealed"] == ["published", "readable", "granted", "committed"]
    assert list(observer.watch(timeout=0.1)) == []
