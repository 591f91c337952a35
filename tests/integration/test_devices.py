"""The main job with tensors on devices: staged, or read by engines that take their addresses. On fake devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tensorhub.client import runtime
from tensorhub.errors import ContractBroken, EngineUnavailable, SourceFailed, TensorHubError
from tensorhub.ports import HOST_ONLY, Engine
from tensorhub.transport import router
from tensorhub.transport.memory import MemoryEngine
from tests.integration.conftest import Opener, blank, weights
from tests.support.engines import Gate, Meddler, meddled
from tests.support.fake_device import KIND, FakeDevice, fake_devices, peek, poke, to_far

pytestmark = pytest.mark.slow
WAIT_S = 20.0


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeDevice, FakeDevice]]:
    with fake_devices(monkeypatch) as opened:
        yield opened


def placed(tensors: dict[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """The same content on the host, on a device, or spread over both and a second device."""
    index = {"host": lambda i: -1, "device": lambda i: 0, "mixed": lambda i: i % 3 - 1}[where]
    places = {name: index(i) for i, name in enumerate(tensors)}
    return {name: t if places[name] < 0 else to_far(t, places[name]) for name, t in tensors.items()}


def contents(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: peek(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("engine", ["memory", "local"])
@pytest.mark.parametrize(
    ("here", "there"), [("device", "device"), ("device", "host"), ("host", "device"), ("mixed", "mixed")]
)
def test_every_byte_arrives_from_and_to_any_memory(
    hub: Opener, fakes: tuple[FakeDevice, FakeDevice], engine: str, here: str, there: str
) -> None:
    """address_stability: what is staged, on either side or on none, arrives in place, verified; staging is visible."""
    ours, theirs = placed(weights(1), here), placed(blank(weights(1)), there)
    pointers = [tensor.data_ptr() for tensor in theirs.values()]
    trainer, rollout = hub("trainer", ours, engine=engine), hub("rollout", theirs, engine=engine)
    trainer.publish(version=3)
    got = rollout.replicate(3, timeout=WAIT_S)
    assert got.verified
    assert contents(ours) == contents(theirs)
    assert pointers == [tensor.data_ptr() for tensor in theirs.values()]
    large = [trainer.staged_bytes > 1 << 17, rollout.staged_bytes > 1 << 17]
    assert large == [here != "host", there != "host"]
    trainer.unpublish(timeout=WAIT_S)


def test_rounds_over_devices_are_exact(hub: Opener, fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """repeat_update_many: kernels that write are queued, never waited for; readers serve on from staging."""
    ours = placed(weights(0, rows=8), "device")
    readers = [placed(blank(weights(0, rows=8)), "device") for _ in range(2)]
    trainer = hub("trainer", ours)
    rollouts = [hub(f"rollout-{i}", tensors) for i, tensors in enumerate(readers)]
    for step in range(6):
        for tensor in ours.values():
            data = bytes([step]) * tensor.nbytes
            fakes[0].launch(lambda tensor=tensor, data=data: poke(tensor, data))
        trainer.publish(version=step)
        for rollout in rollouts:
            assert rollout.replicate(step, timeout=WAIT_S).version == step
        trainer.unpublish(timeout=WAIT_S)
        expected = {name: bytes([step]) * tensor.nbytes for name, tensor in ours.items()}
        assert [contents(theirs) for theirs in readers] == [expected, expected]


def test_a_publish_call_does_not_wait_for_the_device(hub: Opener, fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """A training step that is still running holds up nobody but readers, and an unpublish ends the wait for it."""
    ours = placed(weights(1, rows=8), "device")
    trainer = hub("trainer", ours)
    fakes[0].launch(lambda: None)
    fakes[0].stream.is_held = True
    trainer.publish(version=1)
    assert trainer.version == 1
    trainer.unpublish(timeout=WAIT_S)
    assert fakes[0].copied == []
    fakes[0].stream.is_held = False
    trainer.publish(version=2)
    theirs = blank(weights(1, rows=8))
    hub("rollout", theirs).replicate(2, timeout=WAIT_S)
    assert contents(theirs) == contents(ours)


def test_bytes_set_out_for_the_device_while_the_rest_is_read(
    hub: Opener, fakes: tuple[FakeDevice, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies to the device overlap the transfer: the first is made before the last batch has landed."""
    ours, theirs = weights(2, rows=512), placed(blank(weights(2, rows=512)), "device")
    gate, arrived = Gate(), threading.Event()

    async def hold_the_last(ranges) -> None:
        meddler.reads.append(0)
        if len([n for n in meddler.reads if n]) > 1:
            await gate.pass_through(ranges)

    with meddled(monkeypatch, lambda engine: Meddler(engine, before=hold_the_last)) as wrapped:
        trainer = hub("trainer", ours, engine="memory")
        trainer.publish(version=1, digest="now")
        rollout = hub("rollout", theirs, engine="memory")
        meddler = wrapped[0]
        pulling = threading.Thread(target=lambda: (rollout.replicate(1, timeout=WAIT_S), arrived.set()))
        pulling.start()
        assert gate.arrived.wait(WAIT_S)
        while not any(direction == "deliver" for direction, _ in fakes[0].copied):
            assert pulling.is_alive()
        assert not arrived.is_set()
        gate.open()
        pulling.join(WAIT_S)
    assert contents(theirs) == contents(ours)


def test_a_failed_replicate_leaves_no_copy_behind(
    hub: Opener, fakes: tuple[FakeDevice, FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """timeout_then_late_write: once it has raised, nothing is queued that would still write to the device."""
    ours, theirs = weights(2, rows=512), placed(blank(weights(2, rows=512)), "device")

    async def fail_late(ranges) -> None:
        if len(meddler.reads) > 2:
            raise SourceFailed("gone")

    with meddled(monkeypatch, lambda engine: Meddler(engine, before=fail_late)) as wrapped:
        trainer, rollout = hub("trainer", ours, engine="memory"), hub("rollout", theirs, engine="memory")
        meddler = wrapped[0]
        trainer.publish(version=1, digest="now")
        with pytest.raises(TensorHubError, match="gone"):
            rollout.replicate(1, timeout=WAIT_S)
    assert [lane.queue.pending for lane in fakes[0].lanes] == [0] * len(fakes[0].lanes)
    assert rollout.version is None


def test_a_write_to_a_published_device_tensor_is_told(hub: Opener, fakes: tuple[FakeDevice, FakeDevice]) -> None:
    """mutate_during_read: torch counts writes on devices as well; the publisher hears of it."""
    ours = placed(weights(1, rows=8), "device")
    trainer = hub("trainer", ours)
    trainer.publish(version=1)
    ours["norm.bias"].add_(1)
    with pytest.raises(ContractBroken, match=r"'norm\.bias' written to while published"):
        trainer.unpublish(timeout=WAIT_S)


class Reach(MemoryEngine):
    """An engine that takes the fake device's addresses, but for those in `refused`."""

    kinds = HOST_ONLY | {KIND}
    refused: frozenset[int] = frozenset()

    def register(self, address: int, nbytes: int) -> None:
        if address in self.refused:
            raise EngineUnavailable("this allocation cannot be exported")
        super().register(address, nbytes)


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Reach:
    def open_engines(preference: tuple[str, ...], host: str) -> list[Engine]:
        return [opened]

    opened = Reach()
    opened.name = "reach"
    monkeypatch.setattr(runtime, "open_engines", open_engines)
    monkeypatch.setitem(router._ENGINES, opened.name, router.Kind(lambda _: opened))
    return opened


def test_engines_that_read_devices_need_no_staging(
    hub: Opener, fakes: tuple[FakeDevice, FakeDevice], reach: Reach
) -> None:
    """Device to device: nothing large is copied to the host; digests are computed on the device, on both sides, and the
    reader serves on from there."""
    ours, first, second = (placed(t, "device") for t in (weights(1), blank(weights(1)), blank(weights(1))))
    trainer, a, b = (hub(name, tensors) for name, tensors in (("trainer", ours), ("a", first), ("b", second)))
    assert trainer.staged_bytes < 1 << 16
    trainer.publish(version=1)
    assert a.replicate(1, timeout=WAIT_S).engine == "reach"
    trainer.unpublish(timeout=WAIT_S)
    got = b.replicate(1, timeout=WAIT_S)
    assert [use.replica for use in got.sources] == ["a"]
    assert contents(ours) == contents(first) == contents(second)
    assert {direction for direction, nbytes in fakes[0].copied if nbytes > 1 << 16} == {"digest"}


def test_a_flipped_byte_on_a_device_is_caught(
    hub: Opener, fakes: tuple[FakeDevice, FakeDevice], reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transport_lies: also where the digest of what landed is computed on the device."""
    ours, theirs = placed(weights(1), "device"), placed(blank(weights(1)), "device")
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1, digest="now")
    honest = reach.read

    async def lie(peer, ranges, timeout_s, chunks=None) -> None:
        await honest(peer, ranges, timeout_s, chunks)
        if ranges.total_bytes > 1 << 16:
            theirs["embed.weight"].as_subclass(torch.Tensor).view(torch.uint8)[5, 77] ^= 1

    monkeypatch.setattr(reach, "read", lie)
    with pytest.raises(TensorHubError, match="does not match its digest"):
        rollout.replicate(1, timeout=WAIT_S)
    assert rollout.version is None


def test_memory_that_an_engine_refuses_after_all_is_staged_visibly(
    hub: Opener, fakes: tuple[FakeDevice, FakeDevice], reach: Reach, caplog: pytest.LogCaptureFixture
) -> None:
    """register_failure_is_fatal, but for device memory there is a second way: it is told in the log, and shows."""
    ours, theirs = placed(weights(1), "device"), blank(weights(1))
    reach.refused = frozenset(tensor.untyped_storage().data_ptr() for tensor in ours.values())
    trainer = hub("trainer", ours)
    assert trainer.staged_bytes > 1 << 20
    assert "staged in host memory: this allocation cannot be exported" in caplog.text
    trainer.publish(version=1)
    hub("rollout", theirs).replicate(1, timeout=WAIT_S)
    assert contents(theirs) == contents(ours)
