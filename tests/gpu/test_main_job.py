"""The main job with weights on a device: every byte, in place, in the order of the caller's streams."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import Accelerator
from tests.gpu.models import MIB, blank, contents, everything, plain
from tests.integration.conftest import Opener

WAIT_S = 60.0
HOST = torch.device("cpu")


@pytest.mark.parametrize(("here", "there"), [("device", "device"), ("device", "host"), ("host", "device")])
def test_every_form_and_dtype_arrives(device: Accelerator, hub: Opener, here: str, there: str) -> None:
    """all_dtypes, noncontig_src, tied_once, zero_dim, zero_size_tensor, address_stability: from and to a device."""
    places = {"device": device.place, "host": HOST}
    ours = everything(places[here], 1)
    theirs = blank(ours, places[there])
    pointers = [tensor.data_ptr() for tensor in theirs.values()]
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    assert rollout.replicate(1, timeout=WAIT_S).verified
    assert contents(ours) == contents(theirs)
    assert pointers == [tensor.data_ptr() for tensor in theirs.values()]
    trainer.unpublish(timeout=WAIT_S)


def test_strided_destinations_and_mixed_sets(device: Accelerator, hub: Opener) -> None:
    """noncontig_dst, fused_views: a destination strided on the device, beside tensors of the host."""
    ours = {name: tensor.cpu() if "int" in name else tensor for name, tensor in everything(device.place, 2).items()}
    theirs = everything(device.place, 3)
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    rollout.replicate(1, timeout=WAIT_S)
    assert contents(ours) == contents(theirs)


def test_a_publish_right_after_a_long_kernel_shows_what_the_kernel_wrote(device: Accelerator, hub: Opener) -> None:
    """Nobody synchronizes: the call returns while the kernel runs, and readers get what it writes, large and tiny."""
    ours = plain(device.place, 64 * MIB, 1)
    theirs = blank(ours, device.place)
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=0)
    rollout.replicate(0, timeout=WAIT_S)
    trainer.unpublish(timeout=WAIT_S)
    with device.beside():
        device.busy()
        for tensor in ours.values():
            tensor.fill_(42)
        behind = device.mark()
        trainer.publish(version=1)
        assert not behind.query(), "the publish call waited for the device"
        rollout.replicate(1, timeout=WAIT_S)
    assert {value for tensor in theirs.values() for value in tensor.unique().tolist()} == {42}


def test_what_is_queued_next_sees_the_new_bytes_and_what_was_queued_before_the_old(
    device: Accelerator, hub: Opener
) -> None:
    """Visibility: a kernel that still reads the old weights reads the old ones; the first one enqueued after the
    replicate, on whatever stream, reads the new ones."""
    ours = plain(device.place, 64 * MIB, 1)
    theirs = blank(ours, device.place)
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    with device.beside():
        device.busy()
        before = {name: tensor.clone() for name, tensor in theirs.items()}
        rollout.replicate(1, timeout=WAIT_S)
    with device.beside():
        after = {name: tensor.clone() for name, tensor in theirs.items()}
    device.module.synchronize()
    assert {value for tensor in before.values() for value in tensor.view(-1).view(torch.uint8).unique().tolist()} == {7}
    assert contents(after) == contents(ours)


def test_many_tiny_tensors_cross_together(device: Accelerator, hub: Opener) -> None:
    """100k_tiny_tensors: twenty thousand of them are gathered and scattered on the device."""
    flat = torch.randn(20_000, 16, device=device.place)
    ours = {f"t{i}": flat[i].clone() for i in range(len(flat))}
    theirs = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    trainer.publish(version=1)
    rollout.replicate(1, timeout=WAIT_S)
    assert torch.equal(torch.stack(list(theirs.values())), flat)


def test_a_reader_serves_on_and_rounds_are_exact(device: Accelerator, hub: Opener) -> None:
    """repeat_update_many: train, publish, replicate, unpublish, over a chain of two devices' tensors."""
    ours = plain(device.place, 16 * MIB, 1)
    readers = [blank(ours, device.place) for _ in range(2)]
    trainer = hub("trainer", ours)
    rollouts = [hub(f"rollout-{i}", tensors) for i, tensors in enumerate(readers)]
    for step in range(10):
        for tensor in ours.values():
            tensor.add_(1)
        trainer.publish(version=step)
        for rollout in rollouts:
            rollout.replicate(step, timeout=WAIT_S)
        trainer.unpublish(timeout=WAIT_S)
        assert [contents(theirs) for theirs in readers] == [contents(ours)] * 2


def test_staging_keeps_up(device: Accelerator, hub: Opener, figures: dict[str, float]) -> None:
    """Overlap: a verified pull of 1 GiB from device to device, as figures beside the copies it is made of."""
    ours = plain(device.place, 1024 * MIB, 1)
    theirs = blank(ours, device.place)
    trainer, rollout = hub("trainer", ours), hub("rollout", theirs)
    assert trainer.staged_bytes >= 1024 * MIB
    trainer.publish(version=1, digest="now", timeout=WAIT_S)
    got = rollout.replicate(1, timeout=WAIT_S)
    area = torch.empty(128 * MIB, dtype=torch.uint8, pin_memory=True)
    seconds = device.timed(lambda: area.copy_(ours["layer.0"], non_blocking=True))
    figures[f"{device.kind}_to_pinned_gb_per_s"] = area.nbytes / seconds / 1e9
    figures[f"{device.kind}_staged_pull_gb_per_s"] = got.nbytes / (got.phases["transfer"] + got.phases["install"]) / 1e9
    figures[f"{device.kind}_install_part_of_staged_pull"] = got.phases["install"] / got.seconds
    assert contents(ours) == contents(theirs)
