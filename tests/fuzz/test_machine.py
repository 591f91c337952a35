"""Senseless requests never break the machine, and never its honest sessions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.senseless import prove_unharmed, torment

INPUTS = st.binary(max_size=1500)


def check(data: bytes) -> None:
    prove_unharmed(torment(data))


@pytest.mark.slow
@settings(derandomize=True, max_examples=60, deadline=None)
@given(INPUTS)
def test_any_requests_leave_the_machine_whole(data: bytes) -> None:
    """Every promise of the machine holds after every step, nothing but refusals comes of lies, and an honest pair still
    publishes and replicates. The same inputs in every run."""
    check(data)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(INPUTS)
def test_fresh_requests_leave_the_machine_whole(data: bytes) -> None:
    """The same of inputs that no run has seen before."""
    check(data)
