"""Which mistakes the fast tests do not see: each mutant of a module runs the tests named for it, in a child of its own.

    scripts/mutate grace versions        # modules by their last name, or by path; all that are listed without any
    scripts/mutate grace --line 62       # only mutants of this line

It fails when a mutant survives that `survivors.txt` does not explain, or when that explains one that is killed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest

from tests.mutation.mutants import Mutant, mutants
from tests.mutation.tables import TESTS

ROOT = Path(__file__).parents[2]
EXPLAINED = Path(__file__).with_name("survivors.txt")
#: A child that takes so many times as long as one without a mistake, and longer than that, hangs: its mutant is killed.
SLOWER, CHILD_S = 6, 10.0
#: What a child may take: a mistake that allocates without end shall not be the machine's trouble.
CHILD_BYTES = 4 << 30
#: Exit statuses of pytest that mean that a test, or an import, did not like the module.
FAILED = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a tree instead of its file."""

    module: str
    file: Path
    tree: ast.Module

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.module else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.file)
        exec(compile(self.tree, str(self.file), "exec"), module.__dict__)  # the point of it


@dataclass(slots=True)
class Account:
    """What came of one module's mutants."""

    count: int = 0
    survived: list[Mutant] = field(default_factory=list)
    explained: int = 0
    wrongly_explained: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__.split("\n")[0])
    parser.add_argument("modules", nargs="*", help="module names, their ends, or paths")
    parser.add_argument("--line", type=int, help="only mutants of this line")
    options = parser.parse_args()
    explained = _explained()
    bad = 0
    for module in _chosen(options.modules):
        account = _judge(module, explained.get(module, set()), options.line)
        killed = account.count - len(account.survived) - account.explained
        print(
            f"{module}: {account.count} mutants, {killed} killed, {account.explained} explained, "
            f"{len(account.survived)} survive",
            flush=True,
        )
        for name in account.wrongly_explained:
            print(f"  explained, but not there or killed: {name}")
        bad += len(account.survived) + len(account.wrongly_explained)
    return 1 if bad else 0


def _chosen(wanted: list[str]) -> list[str]:
    names = [each.removesuffix(".py").replace("/", ".") for each in wanted]
    for name in names:
        if not any(module.endswith(name) for module in TESTS):
            sys.exit(f"no tests are named for {name} in tests/mutation/tables.py; there are: {', '.join(TESTS)}")
    return [module for module in TESTS if not names or any(module.endswith(name) for name in names)]


def _explained() -> dict[str, set[str]]:
    """{module: names of mutants}: a line `module | mutant | why` each."""
    found: dict[str, set[str]] = {}
    for line in EXPLAINED.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            module, name, _ = line.split(" | ")
            found.setdefault(module, set()).add(name)
    return found


def _judge(module: str, explained: set[str], line: int | None) -> Account:
    file = ROOT / (module.replace(".", "/") + ".py")
    text = file.read_text(encoding="utf-8")
    began_s = time.monotonic()
    if _run(module, file, ast.parse(text), 60 * CHILD_S) != 0:
        sys.exit(f"{module}: its tests fail without any mutant")
    limit_s = max(CHILD_S, SLOWER * (time.monotonic() - began_s))
    account = Account()
    for mutant in mutants(text):
        if line is not None and mutant.line != line:
            continue
        account.count += 1
        began_s = time.monotonic()
        survives = _run(module, file, mutant.tree, limit_s) == 0
        if survives and mutant.name in explained:
            account.explained += 1
        elif survives:
            account.survived.append(mutant)
            took_s = time.monotonic() - began_s
            print(f"  survives: {file.relative_to(ROOT)}:{mutant.line} {mutant.name}  ({took_s:.1f} s)", flush=True)
        elif mutant.name in explained:
            account.wrongly_explained.append(mutant.name)
    if line is None:
        names = {mutant.name for mutant in mutants(text)}
        account.wrongly_explained += sorted(explained - names)
    return account


def _run(module: str, file: Path, tree: ast.Module, limit_s: float) -> int:
    """0 when all tests pass; the first that fails ends it."""
    child = os.fork()
    if child == 0:
        os._exit(_child(module, file, tree, TESTS[module]))
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, *FAILED) and code > 0:
                sys.exit(f"{module}: pytest ended with {code}; are its tests named rightly?")
            return code
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


def _child(module: str, file: Path, tree: ast.Module, tests: tuple[str, ...]) -> int:
    resource.setrlimit(resource.RLIMIT_DATA, (CHILD_BYTES, CHILD_BYTES))
    with tempfile.TemporaryFile("w+") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        # A failure is enough: it is not made small, and the same run judges every mutant.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutation", derandomize=True, database=None, phases=phases)
        hypothesis.settings.load_profile("mutation")
        sys.meta_path.insert(0, Planted(module, file, tree))
        options = ["-x", "-q", "--assert=plain", "-p", "no:randomly", "-m", "not slow"]
        return int(pytest.main([*options, *(str(ROOT / test) for test in tests)]))
    except BaseException:  # whatever it is, the mutant did not live
        return FAILED[0]


if __name__ == "__main__":
    sys.exit(main())
