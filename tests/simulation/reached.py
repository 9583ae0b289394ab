"""Counts the functions of ``dynamo`` that runs reach: ``scripts/simulate --reached``."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["Reached", "report"]

_PACKAGE = Path(__file__).resolve().parents[2] / "dynamo"


class Reached:
    """Collects the functions that are called while it is on, in each thread that calls it."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    def start(self) -> None:
        """Collect in this thread from now on."""
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._codes.add(frame.f_code)

    def names(self) -> list[str]:
        """Stop, and return file and line of each function of the package that was called."""
        sys.setprofile(None)
        inside = f"{_PACKAGE}/"
        return sorted(
            f"{code.co_filename.removeprefix(inside)}:{code.co_firstlineno}"
            for code in self._codes
            if code.co_filename.startswith(inside) and code.co_name[0] != "<"
        )


def report(reached: Iterable[str]) -> str:
    """Return how many functions there are and were reached, in all and by package."""
    there: Counter[str] = Counter()
    known: dict[str, str] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = str(path.relative_to(_PACKAGE))
        package = str(Path(name).parent)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                there[package] += 1
                line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                known[f"{name}:{line}"] = package
    found = Counter(known[name] for name in set(reached) if name in known)
    lines = [f"{sum(found.values())} of {sum(there.values())} functions of dynamo were reached"]
    lines += [
        f"  {package:<28} {found[package]:4d} of {there[package]}" for package in sorted(there)
    ]
    return "\n".join(lines)
