"""The library loads whole or explains itself (`register_failure_is_fatal`)."""

from __future__ import annotations

import ctypes

import pytest

from tensorhub.errors import EngineUnavailable
from tensorhub.native import binding


def test_a_missing_library_says_how_to_build_it(tmp_path):
    """Without a built library the error names the folder and the command."""
    with pytest.raises(EngineUnavailable, match="build_ext --inplace"):
        binding._library_file(tmp_path)


def test_a_file_that_is_no_library_is_refused(tmp_path):
    """A truncated or foreign file is an error with its path, not a crash."""
    file = tmp_path / "_tensorhub.so"
    file.write_bytes(b"no ELF")
    with pytest.raises(EngineUnavailable, match="does not load"):
        binding._load(file)


def test_another_library_is_no_stale_build_of_ours():
    """A library without our entry points is refused at load, not at the first call."""
    with pytest.raises(EngineUnavailable, match="does not load"):
        binding._load(binding._xxhash_extension())


def test_a_stale_build_is_refused(monkeypatch):
    """A library built from older sources is refused: signatures may have changed."""
    monkeypatch.setattr(binding, "ABI", binding.ABI + 1)
    with pytest.raises(EngineUnavailable, match="stale build"):
        binding._load(binding._library_file(binding.Path(binding.__file__).parent))


def test_a_wrong_digest_function_fails_the_self_test():
    """A symbol that computes something else is not taken for XXH3."""
    wrong = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t)(lambda data, nbytes: nbytes)
    assert not binding._computes_xxh3(wrong)


def test_no_digest_function_is_an_error_that_names_what_was_tried(monkeypatch):
    """Without any XXH3 nothing starts, and the error lists the places."""

    def refuse(path: str) -> None:
        raise OSError(f"cannot open {path}")

    monkeypatch.setattr(binding.ctypes, "CDLL", refuse)
    with pytest.raises(EngineUnavailable, match=r"xxhash package: .*libxxhash: "):
        binding._find_xxh3()
