"""Small mistakes in one module, one at a time: comparisons turned, conditions denied, steps left out, numbers off by 1.

It makes syntax trees and never runs them. What people read (messages, docstrings) and what only types say is left out.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake: `function: what stands there -> what stands there now`, the same as long as the code is the same."""

    name: str
    line: int
    tree: ast.Module


def mutants(text: str) -> Iterator[Mutant]:
    """All of a module's, in the order of its lines. Equal ones of one function are numbered."""
    tree = ast.parse(text)
    met: dict[str, int] = {}
    for path, node, function in list(_places(tree)):
        for change in _changes(node):
            changed = copy.deepcopy(tree)
            _put(changed, path, change)
            name = f"{function}: {_shown(node)} -> {_shown(change)}"
            met[name] = met.get(name, 0) + 1
            name = name if met[name] == 1 else f"{name} #{met[name]}"
            yield Mutant(name, getattr(node, "lineno", 0), ast.fix_missing_locations(changed))


def _shown(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


# ---------------------------------------------------------------- where

#: From the module down: field, and index where the field is a list.
Path = tuple[tuple[str, int | None], ...]


def _places(node: ast.AST, path: Path = (), function: str = "module") -> Iterator[tuple[Path, ast.AST, str]]:
    """Every node that may be changed."""
    if path:
        yield path, node, function
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = node.name if function == "module" else f"{function}.{node.name}"
    for field, value in ast.iter_fields(node):
        if _is_left_alone(node, field):
            continue
        if isinstance(value, ast.AST):
            yield from _places(value, (*path, (field, None)), function)
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, ast.AST) and not _is_docstring(item):
                yield from _places(item, (*path, (field, index)), function)


def _is_left_alone(node: ast.AST, field: str) -> bool:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True  # the mistake is to raise or not, not what is said
    if isinstance(node, ast.Call) and field in ("args", "keywords") and _is_error(node.func):
        return True
    if isinstance(node, ast.If) and _shown(node.test) == "TYPE_CHECKING":
        return True
    return field in ("annotation", "returns", "decorator_list", "bases", "pattern")


def _is_error(function: ast.expr) -> bool:
    """Whether a call makes an error, or tells people something."""
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name.endswith(("Error", "Mismatch", "Order", "Conflict", "Unavailable", "Aborted", "Failed")) or name in (
        "BadRequest",
        "Broken",
        "Where",
        "event",
    )


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _put(tree: ast.AST, path: Path, change: ast.AST) -> None:
    parent: ast.AST = tree
    for field, index in path[:-1]:
        value = getattr(parent, field)
        parent = value if index is None else value[index]
    field, index = path[-1]
    if index is None:
        setattr(parent, field, change)
    else:
        getattr(parent, field)[index] = change


# ---------------------------------------------------------------- what


def _changes(node: ast.AST) -> Iterator[ast.AST]:  # noqa: C901 - one case per kind of mistake
    match node:
        case ast.Compare(left, [operator], comparators):
            if type(operator) in COMPARISONS:
                yield ast.Compare(left, [COMPARISONS[type(operator)]()], comparators)
        case ast.Compare(left, operators, comparators):
            for index, operator in enumerate(operators):
                turned = COMPARISONS[type(operator)]()
                yield ast.Compare(left, [*operators[:index], turned, *operators[index + 1 :]], comparators)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.And() if isinstance(operator, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(operator)](), right)
        case ast.AugAssign(target, operator, value) if type(operator) in ARITHMETIC:
            yield ast.AugAssign(target, ARITHMETIC[type(operator)](), value)
        case ast.If(test, body, orelse) if not isinstance(test, ast.UnaryOp | ast.Compare):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test, body, orelse) if not isinstance(test, ast.UnaryOp | ast.Compare):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() as value):
            yield ast.Constant(value + 1)
        case ast.Name(name) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Expr(ast.Call()) | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Continue():
            yield ast.Break()
        case ast.Break():
            yield ast.Continue()
        case _:
            return
