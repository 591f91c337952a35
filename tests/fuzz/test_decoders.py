"""Whatever bytes come in, each decoder gives a value that encodes again or its documented error, in bounded memory.

Inputs are edits of valid ones and noise, the same in every run, and a few that no run has seen before.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tensorhub.wire import codec, proto
from tests.fuzz.__main__ import main
from tests.fuzz.mutate import KINDS, Edit, edited
from tests.fuzz.targets import TARGETS, Found, Target
from tests.support.message_strategies import answers, calls

DECODERS = [name for name in TARGETS if name != "machine"]
#: Whole messages of any content, beside the fixed examples.
_MESSAGES = {
    "msgpack-call": calls.map(codec.encode_call),
    "msgpack-answer": answers.map(codec.encode_answer),
    "protobuf-call": calls.map(proto.encode_call),
    "protobuf-answer": answers.map(proto.encode_answer),
}
_EDITS = st.lists(
    st.builds(Edit, st.integers(0, KINDS - 1), st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), max_size=6
)
_LIMITS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Edited valid inputs, and noise."""
    valid = TARGETS[name].valid()
    whole = st.one_of(st.sampled_from(valid), _MESSAGES.get(name, st.sampled_from(valid)))
    return st.one_of(st.builds(edited, whole, _EDITS, st.just(valid)), st.binary(max_size=300))


def run(name: str, data: bytes) -> None:
    """Check an input; a failure says how to have it again."""
    try:
        TARGETS[name].run(data)
    except Exception as error:
        error.add_note(f"again: python -m tests.fuzz {name} --hex {data.hex()}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_any_bytes_give_a_value_or_the_documented_error(name: str) -> None:
    """The same inputs in every run."""

    @settings(_LIMITS, derandomize=True, max_examples=150)
    @given(inputs(name))
    def check(data: bytes) -> None:
        run(name, data)

    check()
    TARGETS[name].finish()


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_fresh_bytes_give_a_value_or_the_documented_error(name: str) -> None:
    """Inputs of this run alone."""

    @settings(_LIMITS, max_examples=30)
    @given(inputs(name))
    def check(data: bytes) -> None:
        run(name, data)

    check()
    TARGETS[name].finish()


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_pass(name: str) -> None:
    """What the edits start from is decoded: a target that refuses everything would find nothing."""
    for data in TARGETS[name].valid():
        run(name, data)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("locator-mooncake", "96a4626f6f74a1680aa3746370ce7fffffff01"),  # an incarnation of 2**31: bytes(2**31)
        ("locator-mooncake", "96a4626f6f74a168cb7ff0000000000000a3746370c4016101"),  # a port of infinity
        ("locator-local", "85a4626f6f7490a96e616d65737061636501a370696401a5737461727401a375696401"),  # no hash
        ("locator-memory", "dd7fffffff"),
        ("memory-map", "dd7fffffff" * 100),
        ("manifest", "dd00400000" * 1024),
        ("msgpack-call", "92019101" + "80" * 64),
        ("texts", "686f73743a" + "39" * 5000),  # host:999…
        ("texts", "39" * 5000),
    ],
)
def test_what_was_found_stays_mended(name: str, data: str) -> None:
    """Inputs that once raised something else, or took memory that they do not have."""
    run(name, bytes.fromhex(data))


@given(st.binary(max_size=40), _EDITS)
@example(b"", [Edit(kind, 0, 0) for kind in range(KINDS)])
def test_edits_never_fail(data: bytes, edits: list[Edit]) -> None:
    """Every edit is one of any bytes, the empty ones included, and gives the same bytes again."""
    assert edited(data, edits, [data]) == edited(data, edits, [data])


def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder that allocates what a header announces, and one that lets another error pass, are both reported with
    the bytes that show it, and those bytes show it again."""

    def allocates(data: bytes) -> None:
        bytearray(int.from_bytes(data[:4], "big") % 2**28)

    def passes_on(data: bytes) -> None:
        {0: 0}[data[0] if data else 0]

    for check in (allocates, passes_on):
        monkeypatch.setitem(TARGETS, "token", Target(check, lambda: [b"\0\0\0\1"]))
        assert main(["token", "--seconds", "30", "--seed", "1"]) == 1
        said = capsys.readouterr().out
        assert main(["token", "--hex", said.split()[-1]]) == 1


def test_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory beyond a small multiple of the input is a finding by itself."""
    with pytest.raises(Found, match="of memory"):
        Target(lambda _: bytes(2**22) and None, list).run(b"x")
