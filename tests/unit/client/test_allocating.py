"""Tensors made as a version says: names, shapes, dtypes, ties; and what cannot be done before there is one."""

from __future__ import annotations

import pytest
import torch

from tensorhub.client.allocating import AsPublished, Make, allocate, plain
from tensorhub.client.registry import register
from tensorhub.errors import BadRequest, LayoutMismatch, UsageError, Where
from tensorhub.pipeline.manifest import Manifest

WHERE = Where(model="m", replica="r", shard=0)


def of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return register(tensors, name="a", where=WHERE).manifest


def test_every_dtype_and_shape_is_made_as_it_is() -> None:
    """all_dtypes, zero_dim, zero_size_tensor: what is made has the manifest that it was made from."""
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.uint16,
    ]
    tensors = {f"t{i}": torch.empty((3, i), dtype=dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.empty(0, 5), "large": torch.empty(70, 1000)}
    made = allocate(of(tensors), plain, WHERE)
    assert of(made).digest == of(tensors).digest


def test_ties_are_made_as_ties() -> None:
    """tied_once: names that share memory in the version share it here, whole or in part, whatever their dtypes."""
    whole = torch.empty(64, 100)
    tensors = {"a": whole, "b": whole, "part": whole[8:16], "bits": whole.view(torch.int32)[1], "own": torch.empty(9)}
    made = allocate(of(tensors), plain, WHERE)
    assert of(made).digest == of(tensors).digest
    made["a"].fill_(2.0)
    assert (made["b"] == 2.0).all()
    assert (made["part"] == 2.0).all()
    assert (made["bits"] == torch.tensor(2.0).view(torch.int32)).all()
    assert made["own"].data_ptr() != made["a"].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda name, shape, dtype: torch.empty(shape, dtype=torch.float64),
        lambda name, shape, dtype: torch.empty((*shape, 2), dtype=dtype),
        lambda name, shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        lambda name, shape, dtype: torch.empty(shape[::-1], dtype=dtype).t(),
        lambda name, shape, dtype: None,
    ],
    ids=["dtype", "shape", "device", "strides", "nothing"],
)
def test_a_maker_of_other_tensors_is_refused(make: Make) -> None:
    """Memory that is not what was asked for is refused by the tensor's name, before anything is written to it."""
    with pytest.raises(BadRequest, match="contiguous and in host memory") as caught:
        allocate(of({"w": torch.empty(4, 6)}), make, WHERE)
    assert (caught.value.where.tensor, caught.value.where.model) == ("w", "m")


def test_a_dtype_that_torch_does_not_have_is_named() -> None:
    """A version of a newer torch may have dtypes that this one lacks."""
    manifest = Manifest.build(["w"], ["float3_of_the_future"], [(4,)], [4])
    with pytest.raises(LayoutMismatch, match="float3_of_the_future"):
        allocate(manifest, plain, WHERE)


def test_nothing_is_published_or_chosen_from_tensors_that_do_not_exist() -> None:
    """Publishing, and a subset, are refused with what to do instead."""
    there_is_none = AsPublished.of("a", None, WHERE)
    with pytest.raises(UsageError, match=r"register\(\) tensors of your own"):
        there_is_none.check_in_place(WHERE)
    with pytest.raises(UsageError, match="replicate all"):
        there_is_none.subset(["w"], of({"w": torch.empty(4)}), WHERE)


def test_a_version_is_adopted_into_fresh_tensors() -> None:
    """Each adoption makes tensors of its own; the set keeps its name and has the version's manifest."""
    theirs = of({"w": torch.empty(70, 1000), "b": torch.empty(3)})
    there_is_none = AsPublished.of("second", None, WHERE)
    first, second = (there_is_none.adopt(theirs, WHERE) for _ in range(2))
    assert (first.name, first.manifest.digest, list(first.named())) == ("second", theirs.digest, ["b", "w"])
    assert first.named()["w"].data_ptr() != second.named()["w"].data_ptr()
