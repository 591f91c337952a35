"""Hypothesis strategies for every message, derived from the same type hints that the codec compiles.

It decides which values are tried; it knows nothing of bytes, so that it cannot repeat a mistake of the codec.
"""

from __future__ import annotations

from typing import get_args, get_type_hints

from hypothesis import strategies as st

from tensorhub import messages as m
from tensorhub import types as t

_IDS = st.binary(min_size=16, max_size=16)

for _kind in (t.Generation, t.Epoch, t.Digest):
    st.register_type_strategy(_kind, st.one_of(st.just(b""), _IDS))
st.register_type_strategy(t.SessionId, _IDS)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))

MESSAGES: tuple[type, ...] = (*get_args(m.Request), *get_args(m.Reply), *get_args(m.Notice))
CALL_IDS = st.integers(0, 2**63 - 1)


def instances(cls: type) -> st.SearchStrategy[object]:
    """Any instance of a message class."""
    return st.builds(cls, **{name: st.from_type(hint) for name, hint in get_type_hints(cls).items()})


requests = st.one_of([instances(cls) for cls in get_args(m.Request)])
replies = st.one_of([instances(cls) for cls in (*get_args(m.Reply), *get_args(m.Notice))])
calls = st.builds(m.Call, CALL_IDS, requests)
answers = st.builds(m.Answer, CALL_IDS, replies)
