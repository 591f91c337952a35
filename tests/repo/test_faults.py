"""Every fault of the catalogue that this milestone covers has a test that carries its id."""

from __future__ import annotations

import re

import pytest

from tests.repo.fault_ids import FAULT_IDS
from tests.repo.sources import test_functions

#: Name and docstring of each test, once for all ids.
TEXTS = [f"{test.name} {test.docstring}" for test in test_functions() if not test.path.startswith("tests/repo/")]


def carries(text: str, fault: str) -> bool:
    """Whether an id stands in a test's text as a word of its own: part of a longer word does not count.

    Names join words by underscores, so `test_tied_once_moves_bytes_once` carries `tied_once`.
    """
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(fault)}(?![A-Za-z0-9])", text) is not None


@pytest.mark.parametrize("fault", FAULT_IDS)
def test_fault_has_a_test(fault: str) -> None:
    """The id appears in some test's name or docstring."""
    assert any(carries(text, fault) for text in TEXTS), f"no test names the fault {fault!r}"


def test_fault_ids_are_distinct() -> None:
    """An id listed twice would hide one that was forgotten."""
    assert len(set(FAULT_IDS)) == len(FAULT_IDS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("test_tied_once_moves_bytes_once", True),
        ("some promise. Fault: tied_once.", True),
        ("`tied_once`", True),
        ("test_untied_once", False),
        ("tied_onces", False),
    ],
)
def test_an_id_is_found_as_a_word(text: str, found: bool) -> None:
    """The search finds ids in names and prose, and not inside other words."""
    assert carries(text, "tied_once") is found
