"""The fault catalogue through the public surface: contracts broken, sources that lie or die, siblings that fail."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub.client.session import Session
from tensorhub.errors import (
    ContractBroken,
    DrainTimeout,
    GroupAborted,
    ServerUnavailable,
    SourceFailed,
    TensorHubError,
    Unavailable,
    UsageError,
    VersionUnavailable,
)
from tensorhub.ports import Chunks, Ranges
from tests.integration.conftest import LEASE_S, Opener, blank, same, until_waiting, weights
from tests.support.engines import Gate, Meddler, meddled
from tests.support.process import child

ROOT = Path(__file__).parents[2]


def test_mutate_during_read_by_torch(hub: Opener) -> None:
    """mutate_during_read: a publisher that writes while published learns it at unpublish, with names."""
    ours = weights(1, rows=8)
    trainer = hub("trainer", ours)
    trainer.publish(version=1, digest="now")
    assert hub("rollout", blank(ours)).replicate(timeout=20).verified
    ours["norm.bias"].add_(1)
    ours["embed.weight"].mul_(2)
    with pytest.raises(ContractBroken) as caught:
        trainer.unpublish(timeout=20)
    for name in ("norm.bias", "embed.weight", "rollout", "trainer", "version 1"):
        assert name in str(caught.value)
    trainer.publish(version=2)
    assert trainer.version == 2, "the hub is usable again"


def test_mutate_during_read_behind_torchs_back(hub: Opener) -> None:
    """mutate_during_read: a write after a chunk's digest never reaches a reader as success."""
    ours, theirs = weights(1), blank(weights(1))
    trainer = hub("trainer", ours)
    trainer.publish(version=1, digest="now")
    ctypes.memset(ours["embed.weight"].data_ptr() + 12345, 0xFF, 3)
    rollout = hub("rollout", theirs)
    with pytest.raises(Unavailable, match="digest"):
        rollout.replicate(1, timeout=20)
    assert rollout.version is None
    assert rollout.state == {"a": "torn(target 1, previous None)"}


def test_contract_broken_before_the_digest_is_never_readable(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that torch counts, before its chunk is digested: the watermark stays below it, readers are sent away."""
    from tensorhub import native

    ours = weights(1)
    trainer, rollout = hub("trainer", ours), hub("rollout", blank(ours))
    real, writing = native.digest_runs, threading.Event()

    def write_first(*arguments: object) -> None:
        if not writing.is_set():
            writing.set()
            ours["head.weight"].add_(1)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(native, "digest_runs", write_first)
    trainer.publish(version=1)
    with pytest.raises(Unavailable):
        rollout.replicate(1, timeout=3)
    with pytest.raises(ContractBroken, match=r"head\.weight"):
        trainer.unpublish(timeout=20)


def test_reader_fetched_before_unpublish_holds_the_drain(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """reader_fetched_before_unpublish: unpublish waits for a reader that learned its source before."""
    ours, theirs = weights(1), blank(weights(1))
    expected = {name: tensor.clone() for name, tensor in ours.items()}
    gate = Gate()
    with meddled(monkeypatch, lambda engine: Meddler(engine, before=gate.pass_through)), ThreadPoolExecutor(2) as pool:
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1)
        reading = pool.submit(rollout.replicate, timeout=30)
        try:
            assert gate.arrived.wait(20)
            with pytest.raises(DrainTimeout, match="rollout"):
                trainer.unpublish(timeout=0.3)
            assert trainer.state == {"a": "hidden published 1"}
            draining = pool.submit(trainer.unpublish, timeout=30)
        finally:
            gate.open()
        assert reading.result(30).version == 1
        draining.result(30)
    for tensor in ours.values():
        tensor.zero_()
    assert same(theirs, expected)


def test_abandoned_readers_fail_untorn(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """reader_fetched_before_unpublish: `abandon` does not wait, and the overlapping reader never returns success."""
    ours, theirs = weights(1), blank(weights(1))
    gate = Gate()
    with meddled(monkeypatch, lambda engine: Meddler(engine, before=gate.pass_through)), ThreadPoolExecutor(1) as pool:
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1)
        reading = pool.submit(rollout.replicate, timeout=10)
        try:
            assert gate.arrived.wait(20)
            trainer.unpublish(abandon=True)
            for tensor in ours.values():
                tensor.zero_()
        finally:
            gate.open()
        with pytest.raises(Unavailable):
            reading.result(30)
    assert rollout.version is None


def test_an_abandoned_unverified_reader_fails_by_generation(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untorn without digests: the look after the last byte finds the granted generation gone."""
    ours, theirs = weights(1), blank(weights(1))
    gate = Gate()
    with meddled(monkeypatch, lambda engine: Meddler(engine, before=gate.pass_through)), ThreadPoolExecutor(1) as pool:
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1, digest="off")
        reading = pool.submit(rollout.replicate, timeout=10)
        try:
            assert gate.arrived.wait(20)
            trainer.unpublish(abandon=True)
        finally:
            gate.open()
        with pytest.raises(Unavailable):
            reading.result(30)
    assert rollout.version is None


def _truncate(ranges: Ranges) -> None:
    ctypes.memset(int(ranges.local[0]) + int(ranges.nbytes[0]) - 8, 0, 8)


def _flip(ranges: Ranges) -> None:
    ctypes.memset(int(ranges.local[0]) + 100, 0xA5, 1)


def _swap(ranges: Ranges) -> None:
    half = int(ranges.nbytes[0]) // 2
    first = ctypes.string_at(int(ranges.local[0]), half)
    ctypes.memmove(int(ranges.local[0]), int(ranges.local[0]) + half, half)
    ctypes.memmove(int(ranges.local[0]) + half, first, half)


def _wipe(ranges: Ranges) -> None:
    for address, nbytes in zip(ranges.local.tolist(), ranges.nbytes.tolist(), strict=True):
        ctypes.memset(address, 7, nbytes)


@pytest.mark.parametrize("lie", [_truncate, _flip, _swap, _wipe])
def test_transport_lies(hub: Opener, monkeypatch: pytest.MonkeyPatch, lie: object) -> None:
    """transport_lies: an engine that spoils bytes and reports success is caught; a later honest pull heals."""
    ours, theirs = weights(1), blank(weights(1))
    with meddled(monkeypatch, lambda engine: Meddler(engine, after=lie)) as engines:  # type: ignore[arg-type]
        trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
        trainer.publish(version=1)
        with pytest.raises(Unavailable, match="wrong bytes"):
            rollout.replicate(timeout=20)
        assert rollout.version is None
        assert "torn" in rollout.state["a"]
        for engine in engines:
            engine.after = None
        assert rollout.replicate(timeout=20).version == 1
    assert same(ours, theirs)


def test_no_advance_on_failure(hub: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """no_advance_on_failure: torn(target, previous) after a failed pull, served to nobody, healed by the next."""
    old, new, theirs = weights(1), weights(2), blank(weights(1))
    with meddled(monkeypatch, Meddler) as engines:
        trainer, rollout = hub("trainer", old), hub("rollout", theirs)
        trainer.publish(version=1)
        rollout.replicate(timeout=20)
        trainer.unpublish(timeout=20)
        for name, tensor in old.items():
            tensor.copy_(new[name])
        trainer.publish(version=2)
        for engine in engines:
            engine.after = _flip
        with pytest.raises(Unavailable):
            rollout.replicate(2, timeout=20)
        assert rollout.version is None
        assert rollout.state == {"a": "torn(target 2, previous 1)"}
        assert not any("rollout" in (*view.complete, *view.partial) for view in trainer.versions())
        for engine in engines:
            engine.after = None
        assert rollout.replicate(timeout=20).version == 2
    assert same(new, theirs)


def test_slept_source_withdrawn(hub: Opener) -> None:
    """slept_source_withdrawn: suspend leaves the pool; use after it is an error; waking needs a fresh replicate."""
    ours, theirs, others = weights(1, rows=8), blank(weights(1, rows=8)), blank(weights(1, rows=8))
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    rollout.replicate(timeout=20)
    rollout.suspend(timeout=20)
    assert [view.complete for view in trainer.versions()] == [("trainer",)]
    for call in (lambda: rollout.replicate(timeout=5), lambda: rollout.publish(version=2), rollout.unpublish):
        with pytest.raises(UsageError, match="suspended"):
            call()
    rollout.resume(others)
    assert rollout.version is None
    assert rollout.replicate(timeout=20).version == 1
    assert same(others, ours)


def test_sibling_fails_and_all_errors_surface(hub: Opener) -> None:
    """all_errors_surface: two shards fail to fit; the third is told, by name, and nobody returns success."""
    shards = 3
    ours = [weights(i, rows=8) for i in range(shards)]
    theirs = [blank(tensors) for tensors in ours]
    for i in (0, 2):
        theirs[i]["extra"] = torch.zeros(1)
    trainers = [hub("trainer", ours[i], shard=i, shards=shards) for i in range(shards)]
    rollouts = [hub("rollout", theirs[i], shard=i, shards=shards) for i in range(shards)]
    with ThreadPoolExecutor(shards) as pool:
        futures = [pool.submit(rollout.replicate, timeout=20) for rollout in rollouts]
        until_waiting(trainers[0], shards)
        for trainer in trainers:
            trainer.publish(version=1)
        errors = [future.exception(30) for future in futures]
    assert all(isinstance(error, TensorHubError) for error in errors)
    assert isinstance(errors[1], GroupAborted)
    assert "extra" in str(errors[1])
    assert [rollout.version for rollout in rollouts] == [None] * shards


def _run_sibling(pipe: Connection, server: str, model: str, shard: int, shards: int) -> None:
    tensors = blank(weights(shard, rows=8))
    with tensorhub.open(model, replica="rollout", shard=shard, shards=shards, server=server) as hub:
        hub.register(tensors)
        pipe.send("ready")
        pipe.recv()
        pipe.send(hub.replicate(timeout=60).version)
        pipe.recv()


@pytest.mark.slow
def test_sibling_dies(hub: Opener, server: str, model: str) -> None:
    """sibling_dies: a shard's process is killed before its part; the other's replicate ends with its name."""
    trainer = [hub("trainer", weights(i, rows=8), shard=i, shards=2) for i in range(2)]
    for one in trainer:
        one.publish(version=1)
    with child(_run_sibling, server, model, 1, 2) as sibling, ThreadPoolExecutor(1) as pool:
        assert sibling.hear() == "ready"
        survivor = hub("rollout", blank(weights(0, rows=8)), shard=0, shards=2)
        waiting = pool.submit(survivor.replicate, timeout=60)
        sibling.kill()
        with pytest.raises(GroupAborted, match="1"):
            waiting.result(60)
    assert survivor.version is None
    for one in trainer:
        one.unpublish(timeout=20)


def _read_until_killed(pipe: Connection, server: str, model: str) -> None:
    from tensorhub.client import runtime

    real = runtime.open_engines

    class Stuck(Meddler):
        async def read(self, peer: bytes, ranges: Ranges, timeout_s: float, chunks: Chunks | None = None) -> None:
            if ranges.total_bytes > 4096:
                pipe.send("reading")
                import asyncio

                await asyncio.Event().wait()
            await self.inner.read(peer, ranges, timeout_s, chunks)

    runtime.open_engines = lambda *named: [Stuck(engine) for engine in real(*named)]  # type: ignore[assignment]
    with tensorhub.open(model, replica="rollout", server=server) as hub:
        hub.register(blank(weights(1)))
        hub.replicate(timeout=60)


@pytest.mark.slow
def test_reader_killed(hub: Opener, server: str, model: str) -> None:
    """reader_killed: the drain completes once the dead reader's lease is over, and nothing leaks."""
    trainer = hub("trainer", weights(1))
    trainer.publish(version=1)
    with child(_read_until_killed, server, model) as reader:
        assert reader.hear() == "reading"
        reader.kill()
        trainer.unpublish(timeout=30)
    assert trainer.versions() == []
    assert [view.seat.replica for view in trainer.status().holdings] == []


def _publish_and_hold(pipe: Connection, server: str, model: str, replica: str) -> None:
    tensors = weights(1)
    with tensorhub.open(model, replica=replica, server=server) as hub:
        hub.register(tensors)
        hub.publish(version=1, digest="now")
        pipe.send(os.getpid())
        pipe.recv()


@pytest.mark.slow
def test_source_killed_and_no_other_left(hub: Opener, server: str, model: str) -> None:
    """A source that dies with nobody else holding the version: an error that names it, and a torn replica."""
    gate = Gate()
    theirs = blank(weights(1))
    patch = pytest.MonkeyPatch()
    with (
        child(_publish_and_hold, server, model, "trainer") as trainer,
        meddled(patch, lambda engine: Meddler(engine, before=gate.pass_through)),
        ThreadPoolExecutor(1) as pool,
    ):
        trainer.hear()
        rollout = hub("rollout", theirs)
        reading = pool.submit(rollout.replicate, timeout=30)
        assert gate.arrived.wait(30)
        trainer.kill()
        gate.open()
        with pytest.raises((VersionUnavailable, SourceFailed), match="trainer"):
            reading.result(60)
    assert rollout.version is None


@pytest.mark.slow
def test_source_killed_midchunk(hub: Opener, server: str, model: str) -> None:
    """source_killed_midchunk: the reader goes on elsewhere from its watermark; at most two chunks are read again."""
    ours, theirs = weights(1, rows=512), blank(weights(1, rows=512))
    with child(_publish_rows, server, model, 512) as trainer:
        trainer.hear()
        other = hub("standby", blank(ours))
        other.replicate(timeout=30)
        patch = pytest.MonkeyPatch()
        kills: list[int] = []

        def kill_first(ranges: Ranges) -> None:
            if not kills:
                kills.append(1)
                trainer.kill()

        with meddled(patch, lambda engine: Meddler(engine, after=kill_first)):
            # The only engine-wrapped hub is this reader: it starts at whichever source it is given.
            rollout = hub("rollout", theirs, engine="local")
            got = rollout.replicate(timeout=60)
        assert got.version == 1
        assert same(theirs, weights(1, rows=512))
    assert got.nbytes <= sum(t.nbytes for t in ours.values()) + 4096


def _publish_rows(pipe: Connection, server: str, model: str, rows: int) -> None:
    tensors = weights(1, rows=rows)
    with tensorhub.open(model, replica="trainer", server=server) as hub:
        hub.register(tensors)
        hub.publish(version=1, digest="now")
        pipe.send(os.getpid())
        pipe.recv()


def _hold_the_interpreter(pipe: Connection, server: str, model: str, seconds: float) -> None:
    tensors = weights(1)
    with tensorhub.open(model, replica="trainer", server=server) as hub:
        hub.register(tensors)
        hub.publish(version=1, digest="now")
        pipe.send("published")
        pipe.recv()
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL: the interpreter lock is held all the while
        pipe.send("back")
        pipe.recv()


@pytest.mark.slow
def test_a_trainer_that_holds_the_interpreter_stays_alive(hub: Opener, server: str, model: str) -> None:
    """Heartbeats need no interpreter: a trainer that holds its lock for longer than a lease keeps serving."""
    with child(_hold_the_interpreter, server, model, 1.5 * LEASE_S) as trainer, ThreadPoolExecutor(1) as pool:
        assert trainer.hear() == "published"
        observer = hub("observer")
        trainer.tell("go")
        assert trainer.hear() == "back"
        assert [view.complete for view in observer.versions()] == [("trainer",)]
        theirs = blank(weights(1))
        assert pool.submit(hub("rollout", theirs).replicate, timeout=20).result(30).version == 1
        assert same(theirs, weights(1))


@pytest.mark.slow
def test_a_stopped_source_is_still_read(hub: Opener, server: str, model: str) -> None:
    """source_stopped: one-sided reads on one host need nothing of the source; its lease alone decides."""
    with child(_publish_and_hold, server, model, "trainer") as trainer:
        trainer.hear()
        theirs = blank(weights(1))
        rollout = hub("rollout", theirs)
        trainer.signal(signal.SIGSTOP)
        assert rollout.replicate(timeout=20).version == 1
        assert same(theirs, weights(1))


def test_aba_same_pointer(hub: Opener) -> None:
    """aba_same_pointer: memory that was registered and replaced is noticed, whatever now lies at its address."""
    ours = weights(1, rows=8)
    trainer = hub("trainer", ours)
    ours["embed.weight"].data = torch.zeros_like(ours["embed.weight"])
    with pytest.raises(UsageError, match=r"embed\.weight"):
        trainer.publish(version=1)
    trainer.register(ours)
    trainer.publish(version=1)
    theirs = blank(ours)
    hub("rollout", theirs).replicate(timeout=20)
    assert same(theirs, ours)


def test_what_was_written_to_is_pulled_again(hub: Opener) -> None:
    """Exact: a held version that its holder has written to is that version no more; nobody is told or served so."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    rollout.replicate(timeout=20)
    for name in ("norm.bias", "embed.weight"):
        theirs[name].add_(1)
        assert not rollout.replicate(timeout=20).already_held
        assert same(ours, theirs)
    assert rollout.replicate(timeout=20).already_held


def test_memory_replaced_while_a_replicate_waits(hub: Opener) -> None:
    """aba_same_pointer: a parameter that gets other memory during the call is named; no other memory is written."""
    ours = {"w": torch.ones(20_000), "b": torch.ones(5)}
    for name in ours:
        theirs = {"w": torch.nn.Parameter(torch.zeros(20_000)), "b": torch.nn.Parameter(torch.zeros(5))}
        trainer, rollout = hub(f"trainer-{name}", ours, job=name), hub("rollout", theirs, job=name)
        before = {key: tensor.detach() for key, tensor in theirs.items()}  # alive, so that addresses stay taken
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(rollout.replicate, 1, timeout=20)
            until_waiting(trainer)
            theirs[name].data = torch.zeros_like(theirs[name])
            trainer.publish(version=1)
            with pytest.raises(ContractBroken, match=f"'{name}'"):
                waiting.result(30)
        assert rollout.version is None
        assert not theirs[name].any()
        assert before


def test_an_interrupted_replicate_is_over(hub: Opener) -> None:
    """Ctrl-C ends the call and all that it had started: the next one is not refused as a second."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)

    def interrupt() -> None:
        until_waiting(trainer)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            rollout.replicate(1, timeout=30)
        interrupting.result(30)
    trainer.publish(version=1)
    assert rollout.replicate(1, timeout=20).version == 1
    assert same(ours, theirs)


_EXIT = """
import sys, torch, tensorhub
hub = tensorhub.publish({"w": torch.randn(8 << 20)}, model=sys.argv[2], version=1, replica="t", server=sys.argv[1])
sys.exit(7)
"""


@pytest.mark.slow
def test_a_process_that_just_ends_is_silent(server: str, model: str) -> None:
    """The interpreter ends while digests run and hubs are open: its exit code is kept, nothing is printed."""
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, server, model], capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_publish_without_an_answer_says_of_what(
    hub: Opener, model: str, monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    """Model, version and replica are in the error, also when the seat has to be told of first."""
    trainer = hub("trainer", weights(1))

    async def silence(self: Session, request: object, timeout_s: float) -> None:
        raise ServerUnavailable(f"{type(request).__name__} has no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Session, "call", silence)
        trainer._member.unsettled = not is_settled
        with pytest.raises(ServerUnavailable, match="Publish has" if is_settled else "Join has") as caught:
            trainer.publish(version=3, timeout=5)
    for part in (f"model {model!r}", "version 3", "replica 'trainer'"):
        assert part in str(caught.value)


def test_alias_changes_between_versions(hub: Opener) -> None:
    """alias_changes_between_versions, tied_once: ties are taken from each registration, and fill both names."""
    weight = torch.randn(64, 1024)
    tied = {"embed": weight, "head": weight}
    theirs = {"embed": torch.zeros(64, 1024), "head": torch.zeros(64, 1024)}
    trainer, rollout = hub("trainer", tied), hub("rollout", theirs)
    trainer.publish(version=1)
    got = rollout.replicate(timeout=20)
    assert got.nbytes == weight.nbytes
    assert torch.equal(theirs["embed"], weight)
    assert torch.equal(theirs["head"], weight)
    trainer.unpublish(timeout=20)
    untied = {"embed": torch.randn(64, 1024), "head": torch.randn(64, 1024)}
    trainer.register(untied)
    trainer.publish(version=2)
    assert rollout.replicate(timeout=20).nbytes == 2 * weight.nbytes
    assert same(theirs, untied)


def test_relay_between_different_layouts(hub: Opener) -> None:
    """tied_once, fused_views, noncontig_dst: a chain of holders with different memory ends bit-identical."""
    source = {"a": torch.randn(96, 2048), "b": torch.randn(32, 2048), "t": torch.randn(9)}
    fused = torch.zeros(128, 2048)
    middle = {"a": fused[:96], "b": fused[96:], "t": torch.zeros(18)[::2]}
    last = {"t": torch.zeros(9), "b": torch.zeros(32, 4096)[:, ::2], "a": torch.zeros(2048, 96).t()}
    trainer, relay, end = hub("trainer", source), hub("relay", middle), hub("end", last)
    trainer.publish(version=1)
    relay.replicate(timeout=20)
    trainer.unpublish(timeout=20)
    assert [use.replica for use in end.replicate(timeout=20).sources] == ["relay"]
    assert all(torch.equal(source[name], last[name]) for name in source)


def test_empty_rank(hub: Opener) -> None:
    """empty_rank: a shard without tensors is legal and completes at once, with its group."""
    ours, theirs = weights(1, rows=8), blank(weights(1, rows=8))
    hub("trainer", ours, shard=0, shards=2).publish(version=1)
    hub("trainer", {}, shard=1, shards=2).publish(version=1)
    rollouts = [hub("rollout", theirs, shard=0, shards=2), hub("rollout", {}, shard=1, shards=2)]
    with ThreadPoolExecutor(2) as pool:
        got = [future.result(30) for future in [pool.submit(one.replicate, timeout=20) for one in rollouts]]
    assert [replication.nbytes > 0 for replication in got] == [True, False]
    assert same(ours, theirs)


def test_draft_vs_target_namespace(hub: Opener, model: str) -> None:
    """draft_vs_target_namespace: two models with the same tensor names and ranks are never mixed."""
    target, draft = weights(1, rows=8), weights(2, rows=8)
    hub("trainer", target, model=f"{model}-target").publish(version=1)
    hub("trainer", draft, model=f"{model}-draft").publish(version=1)
    theirs = blank(draft)
    hub("rollout", theirs, model=f"{model}-draft").replicate(timeout=20)
    assert same(theirs, draft)


@pytest.mark.slow
def test_offset_past_4GiB(hub: Opener) -> None:  # noqa: N802  the catalogue's id
    """offset_past_4GiB, tensor_larger_than_chunk: bytes past 2^31 and 2^32 arrive where they belong."""
    nbytes = (4 << 30) + (3 << 20) + 5
    source = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    for offset in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, nbytes - 1):
        source[offset] = offset % 251 + 1
    target = torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    trainer, rollout = hub("trainer", {"big": source}), hub("rollout", {"big": target})
    trainer.publish(version=1)
    assert rollout.replicate(timeout=100).nbytes == nbytes
    for offset in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, nbytes - 1):
        assert target[offset] == offset % 251 + 1
    assert int(target.count_nonzero()) == 6
