"""The files keep the house rules: each opens with a docstring, none grows too long, every test states its promise."""

from __future__ import annotations

import ast
import os
import re

import pytest

from tests.repo.sources import ROOT, Source, python_files, test_functions

#: A module is about 400 lines at most; this is where "about" ends.
MODULE_LINES_MAX = 450
SOURCES = list(python_files("tensorhub", "tests", "bench", "examples", "deploy"))
PACKAGE = [source for source in SOURCES if source.path.startswith("tensorhub/")]
SCRIPTS = [
    "scripts/setup",
    "scripts/setup-verl",
    "scripts/check",
    "scripts/test",
    "scripts/test-gpu",
    "scripts/test-verl",
    "scripts/proto",
    "scripts/mutate",
    ".ci/run",
]


def by_path(source: Source) -> str:
    """What a failing case is called."""
    return source.path


@pytest.mark.parametrize("source", SOURCES, ids=by_path)
def test_module_opens_with_a_docstring(source: Source) -> None:
    """A reader learns from the first lines what a file is for. An empty `__init__.py` has nothing to say."""
    assert not source.tree.body or ast.get_docstring(source.tree), f"{source.path} opens without a docstring"


@pytest.mark.parametrize("source", PACKAGE, ids=by_path)
def test_module_is_short(source: Source) -> None:
    """No module of the package is over the limit: it would hold two nouns."""
    assert len(source.lines) <= MODULE_LINES_MAX, f"{source.path} has {len(source.lines)} lines"


def test_every_test_states_its_promise() -> None:
    """A test without a docstring does not say what breaks when it fails."""
    assert [f"{test.path}::{test.name}" for test in test_functions() if not test.docstring] == []


@pytest.mark.parametrize("source", PACKAGE, ids=by_path)
def test_asserts_hold_no_effects(source: Source) -> None:
    """`python -O` drops asserts: none assigns or awaits."""
    effects = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            inside = [part for part in ast.walk(node.test) if isinstance(part, effects)]
            assert not inside, f"{source.path}:{node.lineno} asserts with an effect"


@pytest.mark.parametrize("source", SOURCES, ids=by_path)
def test_no_leftovers(source: Source) -> None:
    """No open ends in the code: what is not done is not hinted at."""
    marks = re.compile(r"#.*\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3)) + r")\b")
    hits = [f"{source.path}:{number}" for number, line in enumerate(source.lines, 1) if marks.search(line)]
    assert hits == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_strict(script: str) -> None:
    """Scripts run as they are and stop at unset variables."""
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert re.search(r"^set -[a-z]*u", path.read_text(encoding="utf-8"), re.MULTILINE)
