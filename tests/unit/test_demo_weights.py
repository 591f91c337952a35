"""The demo's weights: a deterministic balanced split, train steps that change every floating tensor, clear errors."""

from __future__ import annotations

import importlib.metadata
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorhub.cli import compare, weights
from tensorhub.errors import BadRequest

SPECS = st.lists(st.integers(0, 1 << 20).map(lambda n: n * 4), min_size=0, max_size=40).map(
    lambda sizes: [weights.TensorSpec(f"t{i}", "float32", (n // 4,), n) for i, n in enumerate(sizes)]
)


@given(SPECS, st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_split_is_a_deterministic_balanced_partition(
    specs: list[weights.TensorSpec], shards: int, random: object
) -> None:
    """Each tensor on exactly one shard, whatever the order given; loads differ by at most the largest tensor."""
    parts = weights.split(specs, shards)
    shuffled = list(specs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert weights.split(shuffled, shards) == parts
    assert sorted(spec.name for part in parts for spec in part) == sorted(spec.name for spec in specs)
    loads = [sum(spec.nbytes for spec in part) for part in parts]
    assert max(loads) - min(loads) <= max((spec.nbytes for spec in specs), default=0)


@pytest.mark.parametrize("dtype", weights.TRAINED)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-3, 200.0])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_step_changes_every_floating_tensor(dtype: str, value: float, shape: tuple[int, ...]) -> None:
    """Ten steps in a row change every element's tensor, in every trained dtype, also where rounding is coarse."""
    tensor = torch.full(shape, value).to(getattr(torch, dtype))
    address = tensor.data_ptr()
    for round_number in range(10):
        before = bytes(weights.raw_bytes(tensor))
        weights.step({"w": tensor}, round_number)
        assert bytes(weights.raw_bytes(tensor)) != before
        assert torch.isfinite(tensor.float()).all()
    assert tensor.data_ptr() == address


def test_step_leaves_integers_alone_and_is_seeded() -> None:
    """Integers keep their bytes; the same seed gives the same floats."""
    first = {"w": torch.ones(7), "ids": torch.arange(7), "none": torch.empty(0)}
    second = {name: tensor.clone() for name, tensor in first.items()}
    weights.step(first, 3)
    weights.step(second, 3)
    assert torch.equal(first["w"], second["w"])
    assert torch.equal(first["ids"], torch.arange(7))


def test_a_file_round_trips(tmp_path: Path) -> None:
    """Specs come from the header alone, tensors from the file; the blank ones differ in every non-empty tensor."""
    from safetensors.torch import save_file

    tensors = {"b": torch.randn(3, 4).to(torch.bfloat16), "a": torch.arange(5), "zero": torch.empty(0, 3)}
    tensors["scalar"] = torch.tensor(2.5)
    save_file(tensors, tmp_path / "w.safetensors")
    model = weights.choose(tmp_path / "w.safetensors", None)
    assert [spec.name for spec in model.specs] == ["a", "b", "scalar", "zero"]
    assert model.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    loaded = weights.load(model.file, model.specs, 0)
    blank = weights.blank(model.specs)
    for spec in model.specs:
        assert torch.equal(loaded[spec.name], tensors[spec.name])
        assert (blank[spec.name].dtype, blank[spec.name].shape) == (loaded[spec.name].dtype, loaded[spec.name].shape)
        if spec.nbytes:
            assert bytes(weights.raw_bytes(blank[spec.name])) != bytes(weights.raw_bytes(loaded[spec.name]))


def test_synthetic_weights_are_seeded_and_of_their_size() -> None:
    """`--model-mib N` gives about N MiB, the same for the same seed."""
    model = weights.synthetic(3)
    assert 3 <= model.nbytes / weights.MIB < 3.1
    assert all(spec.nbytes == math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in model.specs)
    first, second = (weights.load(None, model.specs, 5) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (40).to_bytes(8, "little") + b'{"a":{"dtype":"F4"}}'],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    """What is no safetensors file is refused by name."""
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=r"broken\.safetensors is no safetensors file"):
        weights.from_file(path)


def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path) -> None:
    """A dtype that the demo does not know is named with its tensor."""
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadRequest, match=r"'a' has dtype 'F4'"):
        weights.from_file(path)


def test_missing_default_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the demo names it, and both ways around it."""

    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(BadRequest, match=rf"{weights.DEFAULT_PACKAGE}.*--weights.*--model-mib"):
        weights.choose(None, None)


def test_two_sources_of_weights_are_refused(tmp_path: Path) -> None:
    """`--weights` and `--model-mib` together are a mistake, not a preference."""
    with pytest.raises(BadRequest, match="exclude each other"):
        weights.choose(tmp_path / "w.safetensors", 4)


def test_raw_bytes_feed_the_digest_for_every_shape() -> None:
    """Scalars and empty tensors have bytes to digest, too."""
    for tensor in (torch.tensor(1.5), torch.empty(0, 4), torch.ones(2, 2, dtype=torch.bool)):
        assert compare.digest(str(tensor.dtype), tuple(tensor.shape), weights.raw_bytes(tensor))
