"""The public surface is what the list here says, the README's code is code, and heavy modules load late."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import tensorhub
from tests.repo.sources import ROOT

CALLS = {"open", "publish", "replicate", "server_status", "server_versions", "shutdown"}
OBJECTS = {"Hub", "Mirror", "Staging"}
VALUES = {"Replication", "Staged", "SourceUse", "Transfer", "AtLeast", "Newest"}
#: The three branches of the tree; every other error is a name of `tensorhub.errors`.
ERRORS = {"TensorHubError", "UsageError", "Unavailable", "errors"}
EXPORTS = CALLS | OBJECTS | VALUES | ERRORS | {"__version__"}
#: Every public name of a hub that tests and users depend on.
HUB = {
    "close", "closed", "progress", "publish", "register", "register_as_published", "replicate", "resume",
    "staged_bytes", "state", "status", "suspend", "tensors", "unpublish", "version", "versions", "wait", "watch",
}  # fmt: skip
HEAVY = ("torch", "ray", "grpc", "mooncake", "nixl", "torch_npu")
START_SECONDS = 60


def test_exports_are_the_listed_ones() -> None:
    """`tensorhub.__all__` is exactly the list: a new public name is a decision."""
    assert set(tensorhub.__all__) == EXPORTS


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_export_exists(name: str) -> None:
    """Every exported name can be had."""
    assert hasattr(tensorhub, name)


@pytest.mark.parametrize("name", sorted(HUB))
def test_hub_has(name: str) -> None:
    """Every name of a hub that the documentation uses exists."""
    assert hasattr(tensorhub.Hub, name)


def python_blocks() -> list[str]:
    """The README's Python examples."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_readme_code_compiles() -> None:
    """What the README shows is Python."""
    blocks = python_blocks()
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_readme_uses_names_that_exist() -> None:
    """Every `tensorhub.X` and `hub.x` of the README is public."""
    for block in python_blocks():
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "tensorhub":
                    assert node.attr in EXPORTS
                if node.value.id == "hub":
                    assert node.attr in HUB


def test_readme_names_what_exists() -> None:
    """Every make target and repository path that the README names exists."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets
    paths = set(re.findall(r"\]\(([\w./-]+)\)", text))
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", sorted(str(at.relative_to(ROOT / "docs")) for at in (ROOT / "docs").rglob("*.md")))
def test_documents_name_files_that_exist(document: str) -> None:
    """Every file that a document names exists, from the root of the repository or of the package."""
    named = re.findall(r"`([\w/.-]+\.(?:py|c|txt|proto|md))`", (ROOT / "docs" / document).read_text(encoding="utf-8"))
    places = (ROOT, ROOT / "tensorhub", ROOT / "tensorhub/pipeline", ROOT / "docs", ROOT / "tests/sim")
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


@pytest.mark.slow
@pytest.mark.parametrize("optimise", [[], ["-O"]], ids=["", "-O"])
@pytest.mark.parametrize("module", ["tensorhub", "tensorhub.server.__main__", "tensorhub.cli.__main__"])
def test_import_loads_nothing_heavy(module: str, optimise: list[str]) -> None:
    """Neither the package nor the server nor the command line imports a framework; `python -O` changes nothing."""
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, *optimise, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


@pytest.mark.slow
def test_help_needs_no_torch() -> None:
    """`tensorhub --help` answers without torch: it is the first thing that people type."""
    code = (
        "import sys; from tensorhub.cli.__main__ import main; code = main(['--help']);"
        "sys.exit(code or int('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "demo" in done.stdout
