"""What may be registered, what is found out about it, and what is refused by name."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorhub.client import aliases
from tensorhub.client.registry import BufferSet, register
from tensorhub.errors import ContractBroken, EngineUnavailable, LayoutMismatch, UnsupportedTensor, UsageError, Where
from tensorhub.pipeline.manifest import Manifest

HERE = Where(model="actor", replica="trainer-0", shard=0)


def reg(tensors: Any) -> BufferSet:
    return register(tensors, name="a", where=HERE)


class Tied(nn.Module):
    """An embedding tied to a head, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(8), persistent=False)


def test_a_module_contributes_what_its_state_dict_does() -> None:
    """tied_once: parameters and persistent buffers under every name, in the module's own memory, ties as aliases."""
    module = Tied()
    held = reg(module)
    assert held.manifest.names == ["embed.weight", "head.weight", "mean"]
    assert held.manifest.parent.tolist() == [-1, 0, -1]
    assert held.tensors[0] is module.embed.weight
    assert held.manifest.digest == reg(module.state_dict()).manifest.digest


def test_aliases_are_found_anew_each_time() -> None:
    """alias_changes_between_versions: untying between two registrations changes the manifest; nothing is remembered."""
    module = Tied()
    assert reg(module).manifest.parent.tolist() == [-1, 0, -1]
    module.head.weight = nn.Parameter(module.embed.weight.detach().clone())
    assert reg(module).manifest.parent.tolist() == [-1, -1, -1]


def test_an_address_used_again_is_another_tensor() -> None:
    """aba_same_pointer: memory that moved to another tensor is seen as that tensor's; the set that held it before
    says which of its tensors is gone."""
    storage = torch.zeros(4096)
    first = storage[:2048]
    held = reg({"w": first, "v": torch.zeros(3)})
    held.check_in_place(HERE)
    first.data = torch.zeros(2048)
    again = reg({"w": storage[:2000].view(40, 50)})
    assert int(again.memory.addresses[0]) == int(held.held.addresses[1])
    assert again.manifest.shapes == [(40, 50)]
    with pytest.raises(ContractBroken, match=r"'w' moved from 0x"):
        held.check_in_place(HERE)


def test_memory_freed_under_a_set_is_noticed() -> None:
    """aba_same_pointer: a storage resized to nothing, and a transpose in place, are named."""
    gone, turned = torch.zeros(3000), torch.zeros(40, 60)
    held = reg({"gone": gone, "turned": turned})
    gone.untyped_storage().resize_(0)
    turned.t_()
    with pytest.raises(ContractBroken, match=r"'gone' moved.*'turned' changed its shape"):
        held.check_in_place(HERE)
    with pytest.raises(UnsupportedTensor, match=r"'gone': without memory"):
        reg({"gone": gone})


def test_memory_in_use_outlives_the_tensor_that_left_it() -> None:
    """aba_same_pointer: a tensor given other memory does not free what is read and written in place, strided ones
    included: that lives as long as the set."""
    arrays = [np.ones(3000), np.ones((8, 4096))]
    gone = [weakref.ref(array) for array in arrays]
    plain, rows = map(torch.from_numpy, arrays)
    tensors = {"plain": plain, "rows": rows[:, :2048]}
    held = reg(tensors)
    del arrays, plain, rows
    for tensor in tensors.values():
        tensor.data = torch.zeros(tensor.shape)
    gc.collect()
    assert [ref() is not None for ref in gone] == [True, True]
    for check in (held.check_large_in_place, held.check_in_place):
        with pytest.raises(ContractBroken, match=r"'plain' moved.*'rows' moved") as caught:
            check(HERE)
        assert caught.value.where.tensor == "plain"


def test_tiny_tensors_are_not_asked_where_they_are_at_each_step() -> None:
    """aba_same_pointer: the cheap check passes over tiny ones, and nothing is installed where one has been."""
    tiny, large = torch.zeros(4), torch.zeros(3000)
    held = reg({"tiny": tiny, "large": large})
    held.snapshot()
    left = tiny.detach()
    tiny.data = torch.ones(4)
    left.fill_(3)
    held.check_large_in_place(HERE)
    with pytest.raises(ContractBroken, match="'tiny' moved"):
        held.install()
    assert left.tolist() == [3] * 4


def test_registering_twice_gives_the_same_regions_and_digest() -> None:
    """register_twice: the same tensors, in any order, are the same version in the same allocations."""
    tensors = {f"w{i}": torch.zeros(5000 + i) for i in range(4)}
    a, b = reg(tensors), reg(dict(reversed(tensors.items())))
    assert a.manifest.digest == b.manifest.digest
    assert a.regions == b.regions
    assert len(a.regions) == 4


def test_views_of_one_storage_are_one_region() -> None:
    """overlapping_views: aliases, neighbours and overlaps in one allocation register it once, whole."""
    flat = torch.zeros(10_000)
    held = reg({"a": flat[:5000], "b": flat[5000:], "c": flat[2000:7000], "d": flat[100:200]})
    assert held.regions == [(flat.data_ptr(), flat.nbytes)]
    foreign = bytearray(40_000)
    low = torch.frombuffer(foreign, dtype=torch.float32, count=6000)
    high = torch.frombuffer(foreign, dtype=torch.float32, offset=16_000)
    assert reg({"low": low, "high": high}).regions == [(low.data_ptr(), len(foreign))]


def test_tiny_and_zero_size_tensors_are_served_from_staging_only() -> None:
    """zero_size_not_registered: the regions of tiny tensors are one staging buffer, and none has no bytes."""
    held = reg({"a": torch.zeros(3), "b": torch.zeros(0), "c": torch.zeros(5, dtype=torch.int8)})
    assert [nbytes for _, nbytes in held.regions] == [32]
    assert held.staged_bytes == 32


@pytest.mark.slow
def test_nothing_is_held_alive_by_module_state() -> None:
    """aba_same_pointer: dropping a buffer set frees its tensors' memory; no cache keeps them."""
    tensor = torch.zeros(100_000)
    gone = weakref.ref(tensor)
    held = reg({"w": tensor})
    assert held.regions
    del tensor, held
    gc.collect()
    assert gone() is None


class Wrapper(torch.Tensor):
    """A tensor that stands for others, as a DTensor does."""

    def to_local(self) -> torch.Tensor:
        return torch.zeros(2)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("never asked")


def _wrapper() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Wrapper, (2,))  # type: ignore[attr-defined, no-any-return]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3.0, "a float, not a tensor"),
    "array": (lambda: np.zeros(3), "a ndarray, not a tensor"),
    "meta": (lambda: torch.zeros(3, device="meta"), "on the meta device"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "of layout torch.sparse_coo"),
    "conj": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
    "neg": (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "not initialized yet"),
    "wrapper": (_wrapper, r"a Wrapper, which wraps other tensors.*register its `.to_local\(\)`"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_bytes_is_refused_by_name(kind: str) -> None:
    """Tensors without bytes of their own, or whose bytes are not their values, are never copied silently."""
    make, reason = REFUSED[kind]
    with pytest.raises(UnsupportedTensor, match=reason) as caught:
        reg({"fine": torch.zeros(2), f"bad.{kind}": make()})
    assert caught.value.where.tensor == f"bad.{kind}"
    assert caught.value.where.model == "actor"
    assert "'fine'" not in caught.value.message


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_and_nested_tensors_are_refused() -> None:
    """The two kinds that torch itself warns about."""
    quantized = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(UnsupportedTensor, match=r"'n': nested.*'q': quantized"):
        reg({"n": nested, "q": quantized})


def test_every_offender_is_named_not_only_the_first() -> None:
    """One refusal lists them all."""
    bad = {f"bad{i}": make() for i, (make, _) in enumerate(REFUSED.values())}
    with pytest.raises(UnsupportedTensor) as caught:
        reg({"fine": torch.zeros(2), **bad})
    assert all(repr(name) in caught.value.message for name in bad)


def test_names_must_differ_as_text() -> None:
    """Keys 1 and "1" would be one name; what is no mapping, and names that are no text, are refused too."""
    with pytest.raises(UnsupportedTensor, match=r"\['1'\]"):
        reg({1: torch.zeros(1), "1": torch.zeros(2)})
    with pytest.raises(UsageError, match="not list"):
        reg([torch.zeros(1)])


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["\ud800" * 100_000], "no text"),
        (["\ud800" + str(i) for i in range(5000)], "no text"),
        (["n" * 100_000], "longer than 1024 bytes"),
        (["é" * 600], "longer than 1024 bytes"),
        ([f"{i:0>2000}" for i in range(1000)], "longer than 1024 bytes"),
    ],
    ids=["surrogates", "many surrogates", "long", "long in bytes", "many long"],
)
def test_a_name_that_cannot_be_used_is_refused_in_few_words(names: list[str], reason: str) -> None:
    """Each error shows the start of a name and the first of many, never all of 100 kB."""
    tensor = torch.zeros(1)
    with pytest.raises(UnsupportedTensor, match=reason) as caught:
        reg(dict.fromkeys(names, tensor))
    assert repr(names[0][:5])[1:-1] in caught.value.message
    assert len(str(caught.value)) < 20_000
    assert caught.value.where.model == "actor"


def test_refusals_of_tensors_with_long_names_are_short_too() -> None:
    """Names of refused tensors, and those equal as text, are shortened alike."""
    with pytest.raises(UnsupportedTensor, match=r"'n{80}'\.\.\.: a float, not a tensor") as caught:
        reg({"n" * 100_000: 1.0})
    assert len(str(caught.value)) < 1000

    class Key:
        def __str__(self) -> str:
            return "k" * 100_000

    with pytest.raises(UnsupportedTensor, match=r"equal as text: \['k{80}'\.\.\.") as caught:
        reg({Key(): torch.zeros(1), Key(): torch.zeros(1)})
    assert len(str(caught.value)) < 1000


def test_a_subset_asked_for_by_a_wrong_name_says_so() -> None:
    """subset_selection_exact: a name that is not registered is told as that, and whether the version has it."""
    held = reg({"a": torch.zeros(2000)})
    theirs = reg({"a": torch.zeros(2000), "theirs": torch.zeros(5)}).manifest
    with pytest.raises(LayoutMismatch) as caught:
        held.subset(["nope", "theirs", "x" * 100_000], theirs, HERE)
    assert caught.value.message.endswith(
        "'nope': not registered here, and not in the version either; "
        "'theirs': not registered here, but in the version; "
        f"'{'x' * 80}'...: not registered here, and not in the version either"
    )
    assert "missing" not in caught.value.message


def test_a_subset_is_named_as_tensors_are_registered() -> None:
    """subset_selection_exact: keys that are no text select what they registered, exactly, once."""
    held = reg({1: torch.zeros(2000), 2: torch.zeros(2000)})
    part = held.subset([1, "1"], held.manifest, HERE)  # type: ignore[list-item]
    assert [tensor is held.tensors[0] for tensor in part.tensors] == [True]
    with pytest.raises(LayoutMismatch, match="'3': not registered here"):
        held.subset([3], held.manifest, HERE)  # type: ignore[list-item]


def _overlapping(kind: str) -> dict[str, torch.Tensor]:
    flat, square = torch.zeros(900), torch.zeros(60, 60)
    return {
        "expanded": {"w": torch.zeros(1, 2000).expand(50, 2000)},
        "shifted": {"w": flat[:600], "v": flat[300:]},
        "transposed": {"w": square, "v": square.t()},
        "column": {"w": square, "v": square[:, 3]},
    }[kind]


@pytest.mark.parametrize("kind", ["expanded", "shifted", "transposed", "column"])
def test_overlaps_can_be_published_but_not_written(kind: str) -> None:
    """overlapping_views, every_byte_written_once: memory that two tensors share in part is a fine source, staged where
    it must be, and never a destination."""
    tensors = _overlapping(kind)
    held = reg(tensors)
    held.snapshot()
    held.stage()
    copies = {name: torch.ones(tensor.shape) for name, tensor in tensors.items()}
    reg(copies).adopt(held.manifest, HERE)
    with pytest.raises(UnsupportedTensor, match=r"'w' overlaps itself|'w' and 'v' overlap|'v' and 'w' overlap"):
        held.adopt(held.manifest, HERE)


def test_a_map_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a descriptor left nobody can tell what may be written: a named error, and a new look the next time."""
    held = reg({"w": torch.zeros(4)})
    with monkeypatch.context() as patched:
        patched.setattr(aliases, "MAPS", tmp_path / "none")
        with pytest.raises(EngineUnavailable, match="cannot see which of its memory may be written"):
            held.check_writable(HERE)
    held.check_writable(HERE)


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
def test_read_only_memory_is_no_destination(tmp_path: Path) -> None:
    """Read-only mappings can be published; as a destination each tensor in one is refused by name, tiny, strided and
    large ones alike, where a write would kill the process. A private mapping and its neighbours are fine."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=torch.float32)
    tensors = {
        "frozen.tiny": mapped[:4],
        "frozen.strided": mapped[5000:9000:3],
        "frozen.large": mapped[9000:],
        "frozen.numpy": torch.from_numpy(np.memmap(path, np.int64, "r")),
        "private": torch.from_numpy(np.memmap(path, np.int64, "c")),
        "empty": mapped[:0],
        "usual": torch.zeros(4),
        "big": torch.zeros(5000),
    }
    held = reg(tensors)
    with pytest.raises(UnsupportedTensor) as caught:
        held.check_writable(HERE)
    assert sorted(re.findall(r"'([a-z.]+)' lies in read-only memory", caught.value.message)) == [
        "frozen.large",
        "frozen.numpy",
        "frozen.strided",
        "frozen.tiny",
    ]
    reg({name: tensor for name, tensor in tensors.items() if "frozen" not in name}).check_writable(HERE)


def test_interleaved_views_do_not_overlap() -> None:
    """fused_views: columns and odd and even rows of one storage share no byte, though their outer bounds do."""
    fused, rows = torch.zeros(64, 300), torch.zeros(64, 20)
    held = reg({"q": fused[:, :100], "k": fused[:, 100:200], "v": fused[:, 200:], "odd": rows[1::2], "even": rows[::2]})
    assert held.adopt(held.manifest, HERE) is held


def test_long_rows_are_read_in_place_and_short_ones_staged() -> None:
    """noncontig_src: inner runs of 4096 bytes and more are runs of the map; shorter ones cost visible staging."""
    in_place = reg({"w": torch.zeros(8, 2048)[:, :1024]})
    assert in_place.staged_bytes == 0
    assert in_place.memory.nbytes.tolist() == [4096] * 8
    staged = reg({"w": torch.zeros(8, 2048)[:, :1023]})
    assert staged.staged_bytes == 8 * 1023 * 4
    assert len(staged.memory.nbytes) == 1


def test_writes_are_told_by_counters_and_by_snapshots() -> None:
    """mutate_during_read: large tensors by torch's counters, tiny ones by their bytes, also behind torch's back."""
    with torch.inference_mode():
        silent = torch.zeros(3000)
    tensors = {"a": torch.zeros(4), "b": silent, "c": torch.zeros(3000), "d": torch.zeros(9)[::2]}
    held = reg(tensors)
    before = held.counters()
    held.snapshot()
    assert before == [None, 0, 0]
    assert held.changed(before) == []
    tensors["a"].add_(0)
    assert held.changed(before) == [], "the same bytes are no change"
    tensors["c"].add_(0)
    tensors["d"].add_(0)
    ctypes.memset(tensors["a"].data_ptr() + 15, 1, 1)
    assert held.changed(before) == ["a", "c", "d"]
    held.snapshot()
    assert held.changed(held.counters()) == []
    held.install()
    assert held.changed(held.counters()) == []


def test_source_untied_and_destination_tied_is_refused() -> None:
    """every_byte_written_once: one memory cannot take two contents; the names are listed."""
    shared = torch.zeros(2000)
    source = reg({"a": torch.zeros(2000), "b": torch.zeros(2000)})
    with pytest.raises(LayoutMismatch, match="'b' shares memory with 'a' here, not so there"):
        reg({"a": shared, "b": shared}).adopt(source.manifest, HERE)


def test_a_different_tie_is_refused() -> None:
    """every_byte_written_once: a slice tied at another offset is another tie."""
    flat, other = torch.zeros(2000), torch.zeros(2000)
    source = reg({"a": flat, "b": flat[100:200]})
    reg({"a": other, "b": other[100:200]}).adopt(source.manifest, HERE)
    with pytest.raises(LayoutMismatch, match="'b' shares memory with 'a' here"):
        reg({"a": other, "b": other[200:300]}).adopt(source.manifest, HERE)


def test_a_subset_names_what_it_cannot_take() -> None:
    """subset_selection_exact: selected but absent fails, on either side; so does half of a tie, since writing it would
    change the other half."""
    flat = torch.zeros(2000)
    held = reg({"a": flat, "b": flat[:10], "c": torch.zeros(5), "mine": torch.zeros(1)})
    theirs = reg({"a": torch.zeros(2000), "b": torch.zeros(10), "c": torch.zeros(6)}).manifest
    with pytest.raises(
        LayoutMismatch, match=r"'c': shape \(5\) here, \(6\) there; 'mine': missing there; 'x': not reg"
    ):
        held.subset(["c", "mine", "x"], theirs, HERE)
    with pytest.raises(LayoutMismatch, match="'b' shares memory with 'a' here: update both or none"):
        held.subset(["a"], theirs, HERE)
    with pytest.raises(LayoutMismatch, match="'b' shares memory with 'a' here: update both or none"):
        held.subset(["b"], theirs, HERE)


def test_registration_order_does_not_matter() -> None:
    """Names sort by their UTF-8 bytes, whatever order they come in."""
    names = ["b", "a", "é", "z", "\U0001f600", "a.b", "a-b", "\uffff"]
    tensors = {name: torch.zeros(3) for name in names}
    digests = set()
    for seed in range(5):
        random.Random(seed).shuffle(names)
        held = reg({name: tensors[name] for name in names})
        assert held.manifest.names == sorted(names, key=str.encode)
        digests.add(held.manifest.digest)
        assert [t is tensors[n] for n, t in zip(held.manifest.names, held.tensors, strict=True)] == [True] * 8
    assert len(digests) == 1


def test_the_manifest_survives_its_bytes() -> None:
    """A module's manifest decodes to the same digest and rows."""
    manifest = reg(Tied()).manifest
    assert Manifest.decode(manifest.encode()).digest == manifest.digest


class Loaded(nn.Parameter):
    """A parameter subclass without dispatch of its own, as engines attach loaders to."""


def test_plain_subclasses_are_tensors() -> None:
    """Subclasses that only carry attributes keep their own memory and are registered as they are."""
    weight = Loaded(torch.ones(2000))
    held = reg({"w": weight})
    assert held.tensors[0] is weight
    assert int(held.memory.addresses[0]) == weight.data_ptr()


def test_surroundings_do_not_matter() -> None:
    """Inference mode and another default device change nothing about what is registered, staged and installed."""
    weight = torch.arange(12.0).view(3, 4).t()
    target = torch.zeros(4, 3)
    with torch.inference_mode(), torch.device("meta"):
        source = reg({"w": weight})
        source.snapshot()
        source.stage()
        reader = reg({"w": target}).adopt(source.manifest, HERE)
        reader.placement.staging.copy_(source.placement.staging)
        reader.install()
    assert torch.equal(target, weight)


def test_memory_that_torch_only_pretends_is_refused() -> None:
    """A tensor of zeros without memory has elements but no address."""
    with pytest.raises(UnsupportedTensor, match="'z': without memory"):
        reg({"z": torch._efficientzerotensor(3)})


def test_interleaving_too_fine_to_tell_is_refused_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of pieces, tensors whose outer bounds touch count as overlapping."""
    pairs = torch.zeros(3000, 2)
    held = reg({"even": pairs[:, 0], "odd": pairs[:, 1]})
    held.check_writable(HERE)
    monkeypatch.setattr("tensorhub.client.aliases.OVERLAP_RUNS_MAX", 100)
    with pytest.raises(UnsupportedTensor, match="'even' and 'odd' overlap"):
        reg({"even": pairs[:, 0], "odd": pairs[:, 1]}).check_writable(HERE)


def test_padding_is_zero_whatever_memory_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """mixed_dtype_alignment: the bytes between tiny tensors belong to the version: zeros, never leftovers."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(77))
    held = reg({"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(17, dtype=torch.uint8)})
    held.snapshot()
    held.stage()
    assert held.placement.staging.tolist() == [1] * 3 + [0] * 13 + [1] * 17 + [0] * 15


def test_a_view_as_a_quantized_dtype_is_refused_by_name():
    """A plain tensor viewed as a quantized dtype has no scales; the refusal names it."""
    with pytest.raises(UnsupportedTensor, match="'odd': quantized"):
        register({"odd": torch.zeros(8, dtype=torch.uint8).view(torch.qint8)}, name="a", where=Where())
