"""The small defects that one function can have: comparisons, bounds, order, missing calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

__all__ = ["Edit", "broken_code", "edits_of", "functions_of"]

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}
_EXTREMES = {"min": "max", "max": "min"}
_LOGS = ("log", "logger", "print", "warnings")
"""Without one of their lines a program does the same."""
_LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(NamedTuple):
    """``replacement`` for the bytes ``begin`` to ``end`` of the source, on ``line``."""

    kind: str
    line: int
    begin: int
    end: int
    replacement: str

    def apply(self, source: bytes) -> bytes:
        """Return the source with the defect."""
        return source[: self.begin] + self.replacement.encode() + source[self.end :]


def functions_of(source: bytes) -> Iterator[tuple[int, Function]]:
    """Yield the functions of a module and its classes, with the first line of their code objects.

    Functions inside functions are part of these.
    """
    levels: list[ast.AST] = [ast.parse(source)]
    while levels:
        for node in ast.iter_child_nodes(levels.pop()):
            if isinstance(node, Function):
                yield min([node.lineno, *(mark.lineno for mark in node.decorator_list)]), node
            elif isinstance(node, ast.ClassDef | ast.If | ast.Try | ast.With):
                levels.append(node)


def broken_code(source: bytes, path: str, first_line: int, name: str) -> CodeType | None:
    """Compile ``source``; return the code of its function ``name`` that begins at a line.

    None: the source is not valid.
    """
    try:
        levels = [compile(source, path, "exec", dont_inherit=True)]
    except SyntaxError:
        return None
    while levels:
        for constant in levels.pop().co_consts:
            if isinstance(constant, CodeType):
                if (constant.co_firstlineno, constant.co_name) == (first_line, name):
                    return constant
                levels.append(constant)
    return None


def edits_of(source: bytes, function: Function) -> Iterator[Edit]:
    """Yield the defects of a function, in the order of its text's nodes."""
    text = _Text(source)
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    for statement in function.body[documented:]:
        for node in ast.walk(statement):
            for kind, place, replacement in _changes(node, text):
                begin, end = text.span(place)
                yield Edit(kind, place.lineno, begin, end, replacement)


class _Text:
    """Positions of nodes in a source, in bytes, as the parser counts them."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        last_line, last_column = node.end_lineno or 0, node.end_col_offset or 0
        begin = self._lines[node.lineno - 1] + node.col_offset
        return begin, self._lines[last_line - 1] + last_column

    def of(self, node: ast.expr) -> str:
        begin, end = self.span(node)
        return self._source[begin:end].decode()


def _changes(node: ast.AST, text: _Text) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield kind, what is replaced, and the text that replaces it."""
    if isinstance(node, ast.stmt):
        yield from _statements(node, text)
        return
    match node:
        case ast.Compare(ops=[operator], comparators=[right]):
            yield from _comparisons(node, operator, right, text)
        case ast.BoolOp(op=operator, values=values):
            word = " and " if isinstance(operator, ast.And) else " or "
            for at in range(len(values)):
                others = [f"({text.of(one)})" for one in (*values[:at], *values[at + 1 :])]
                yield "condition left out", node, f"({word.join(others)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "opposite", node, f"bool({text.of(operand)})"
        case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=ast.Constant(value=int())):
            yield "off by one", node, f"({text.of(left)})"
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, _, *_]):
            yield "min for max", node.func, _EXTREMES[name]


def _statements(node: ast.stmt, text: _Text) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    match node:
        case ast.If(test=test, body=[*_, last], orelse=[]) if isinstance(last, _LEAVES):
            yield "branch left out", test, "False"
        case ast.Expr(value=ast.Call() | ast.Await() as value):
            call = value.value if isinstance(value, ast.Await) else value
            if isinstance(call, ast.Call) and text.of(call.func).split(".")[0] not in _LOGS:
                yield "call left out", node, "pass"
        case ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign() | ast.Delete():
            yield "change left out", node, "pass"


def _comparisons(
    node: ast.Compare, operator: ast.cmpop, right: ast.expr, text: _Text
) -> Iterator[tuple[str, ast.expr, str]]:
    left, right_text = text.of(node.left), text.of(right)
    if type(operator) in _COMPARISONS:
        yield "comparison", node, f"{left} {_COMPARISONS[type(operator)]} {right_text}"
    elif right_text == "None":
        kind = "truth for None"
        yield kind, node, f"(not {left})" if isinstance(operator, ast.Is) else f"bool({left})"
    elif isinstance(operator, ast.In | ast.NotIn):
        word = "not in" if isinstance(operator, ast.In) else "in"
        yield "opposite", node, f"({left} {word} {right_text})"
