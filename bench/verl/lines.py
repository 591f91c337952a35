"""Question: how many lines does it take to put verl's weights on references?

Counts lines that hold code; blanks, comments and docstrings hold none. Reads files, imports nothing of them.
"""

from __future__ import annotations

import ast
import io
import tokenize

from bench.measure import figure, sample
from bench.remote import Missing
from bench.report import Report
from bench.verl.environment import ROOT

GLUE = ROOT / "tensorhub" / "integrations" / "verl.py"
PATCHES = ROOT / "deploy" / "verl"
ENGINE = "TensorHubCheckpointEngine"
MANAGER = "TensorHubCheckpointManager"
GLUE_LINES_MAX = 70
PATCH_LINES_MAX = 45
#: Tokens that are not code.
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def measure(report: Report) -> None:
    """`verl_glue_lines` of the checkpoint engine, `verl_patch_lines` of the manager and of patches to verl."""
    text = GLUE.read_text(encoding="utf-8")
    glue, manager = parts(text)
    report.ratios.append(figure("verl_glue_lines", sample([float(glue)]), at_most=GLUE_LINES_MAX))
    patches = sorted(PATCHES.glob("*.patch"))
    if not patches:
        raise Missing(f"verl_patch_lines: no patch in {PATCHES.relative_to(ROOT)}")
    lines = manager + sum(changed_lines(patch.read_text(encoding="utf-8")) for patch in patches)
    report.ratios.append(figure("verl_patch_lines", sample([float(lines)]), at_most=PATCH_LINES_MAX))


def parts(text: str) -> tuple[int, int]:
    """Code lines of the engine's class with the functions that it uses, and of the manager's with those left to it."""
    lines = code_lines(text)
    tree = ast.parse(text)
    named = {
        node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    glue = reached(named, ENGINE)
    glue_lines, manager_lines = (
        {line for name in names for line in range(first_line(named[name]), (named[name].end_lineno or 0) + 1)}
        for names in (glue, reached(named, MANAGER) - glue)
    )
    return len(lines & glue_lines), len(lines & manager_lines)


def reached(named: dict[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef], start: str) -> set[str]:
    """The names of the module's definitions that one of them uses, directly or not, with itself."""
    found: set[str] = set()
    ahead = [start]
    while ahead:
        name = ahead.pop()
        if name in found:
            continue
        found.add(name)
        used = {node.id for node in ast.walk(named[name]) if isinstance(node, ast.Name)}
        ahead += sorted(used & named.keys())
    return found


def first_line(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return lines - docstring_lines(ast.parse(text))


def docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def changed_lines(patch: str) -> int:
    """Lines that a unified diff adds and removes."""
    return sum(line.startswith(("+", "-")) and not line.startswith(("+++ ", "--- ")) for line in patch.splitlines())
