"""Chains of real processes, trainer to r1 to r2 to r3, whose first relay is lost or wrong while the others read."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import pytest

import tensorhub
from tensorhub import Hub, native
from tensorhub.errors import TensorHubError
from tensorhub.ports import U64
from tensorhub.views import HoldingView
from tests.integration.conftest import Opener, blank, same, weights
from tests.support.process import Child, child

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

#: Some tens of chunks: what is being read is not over at once.
ROWS = 1024
STALL_S = 2.0
TIMEOUT_S = 90.0
CHAIN = ("r1", "r2", "r3")
ENGINES = ("local", "tcp")


def _relay(pipe: Connection, server: str, model: str, replica: str, engine: str) -> None:
    """Replicates when told, says how that ended, and does as it is told until it is let go."""
    tensors = blank(weights(1, rows=ROWS))
    with tensorhub.open(model, replica=replica, server=server, engine=engine) as hub:
        hub.register(tensors)
        pipe.send("ready")
        while (word := pipe.recv()) != "end":
            match word:
                case "replicate":
                    try:
                        got = hub.replicate(1, timeout=TIMEOUT_S)
                    except TensorHubError as error:
                        pipe.send((str(error), []))
                    else:
                        right = same(tensors, weights(1, rows=ROWS))
                        pipe.send(("right" if right else "wrong", [use.replica for use in got.sources]))
                case "spoil":
                    weight = tensors["head.weight"]
                    ctypes.memset(weight.data_ptr() + weight.nbytes // 2, 0xA5, 64)
                    pipe.send("spoiled")


@contextmanager
def relays(server: str, model: str, engine: str) -> Iterator[dict[str, Child]]:
    """One process for each of the chain, registered and idle."""
    with ExitStack() as stack:
        found = {name: stack.enter_context(child(_relay, server, model, name, engine)) for name in CHAIN}
        for one in found.values():
            assert one.hear() == "ready"
        yield found


class HalfDigested:
    """A publisher's digests, held back behind the first half until told: all its readers are in the midst."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, self._real = threading.Event(), native.digest_runs
        patch.setattr(native, "digest_runs", self._digest)

    def release(self) -> None:
        self._open.set()

    def _digest(self, addresses: U64, nbytes: U64, firsts: U64, out: U64, progress: U64) -> None:
        half = len(out) // 2
        runs = int(firsts[half])
        self._real(addresses[:runs], nbytes[:runs], firsts[: half + 1], out[:half], progress)
        self._open.wait(TIMEOUT_S)
        self._real(addresses, nbytes, firsts, out, progress)


def until(observer: Hub, replica: str, seen: Callable[[HoldingView], bool]) -> None:
    """Block until the server shows so of a replica; as long as a stalled source takes to be given up, and longer."""
    for _ in range(3000):
        if any(seen(row) for row in observer.status().holdings if row.seat.replica == replica):
            return
    raise AssertionError(f"{replica} never came to that: {observer.status().holdings}")


def begin(trainer: Hub, chain: dict[str, Child]) -> None:
    """Publish, and let each of the chain read from the one before it, until all have a part."""
    trainer.publish(version=1)
    for name, source in zip(CHAIN, ("trainer", *CHAIN), strict=False):
        chain[name].tell("replicate")
        until(trainer, name, lambda row, source=source: row.upstream == f"{source}#0" and row.watermark > 0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_first_relay_of_a_chain_is_lost(
    hub: Opener, server: str, model: str, monkeypatch: pytest.MonkeyPatch, engine: str, number: signal.Signals
) -> None:
    """source_killed_midchunk, source_stopped: r1 dies, or stands still, when all have a part. r2 goes on from another
    source; r3 keeps r2, of which it has nothing to complain; both end with the right bytes."""
    monkeypatch.setenv("TENSORHUB_STALL_S", str(STALL_S))
    with relays(server, model, engine) as chain:
        half = HalfDigested(monkeypatch)
        try:
            trainer = hub("trainer", weights(1, rows=ROWS), engine=engine)
            begin(trainer, chain)
            chain["r1"].signal(number)
        finally:
            half.release()
        outcomes = {name: chain[name].hear() for name in CHAIN[1:]}
        assert {name: outcome[0] for name, outcome in outcomes.items()} == {"r2": "right", "r3": "right"}
        assert outcomes["r2"][1][0] == "r1"
        assert outcomes["r2"][1][-1] != "r1"
        assert outcomes["r3"][1] == ["r2"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_relay_whose_memory_changed_is_left(hub: Opener, server: str, model: str, engine: str) -> None:
    """relay_does_not_propagate_corruption: r1 is complete, then something writes to its memory behind everybody's
    back. r2 refuses it and ends with the right bytes from elsewhere, and so does r3 behind it."""
    with relays(server, model, engine) as chain:
        trainer = hub("trainer", weights(1, rows=ROWS), engine=engine)
        trainer.publish(version=1, digest="now")
        chain["r1"].tell("replicate")
        assert chain["r1"].hear() == ("right", ["trainer"])
        chain["r1"].tell("spoil")
        assert chain["r1"].hear() == "spoiled"
        for name in CHAIN[1:]:
            chain[name].tell("replicate")
            outcome, sources = chain[name].hear()
            assert outcome == "right"
            assert sources[-1] != "r1"
            assert name != "r2" or sources[0] == "r1"


@pytest.mark.parametrize("engine", ENGINES)
def test_two_relays_of_a_chain_are_lost_one_after_the_other(
    hub: Opener, server: str, model: str, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """source_killed_midchunk: r1 dies, then r2, which has just gone on from another source and got nothing new from
    it yet. r3 may be sent to r2 once more; it ends with the right bytes from another."""
    monkeypatch.setenv("TENSORHUB_STALL_S", str(STALL_S))
    with relays(server, model, engine) as chain:
        half = HalfDigested(monkeypatch)
        try:
            trainer = hub("trainer", weights(1, rows=ROWS), engine=engine)
            begin(trainer, chain)
            chain["r1"].kill()
            until(trainer, "r2", lambda row: row.upstream == "trainer#0")
            chain["r2"].kill()
            until(trainer, "r3", lambda row: row.upstream == "trainer#0")
        finally:
            half.release()
        outcome, sources = chain["r3"].hear()
        assert outcome == "right"
        assert sources[0] == "r2"
        assert sources[-1] == "trainer"
