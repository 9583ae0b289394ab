"""The table of every public name in docs/dynamo-workers.md is what this package has."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo.llm.absent import ABSENT, Absent

PAGE = Path(__file__).parents[2] / "docs" / "dynamo-workers.md"
NOT_PUBLIC = ("logger",)
"""What Dynamo's modules have for themselves."""


class Row(NamedTuple):
    module: str
    name: str
    here: str
    note: str


def rows() -> list[Row]:
    section = PAGE.read_text().split("## Every public name\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]
    return [Row(module.strip("`"), name.strip("`"), *rest) for module, name, *rest in cells]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.module}.{row.name}")
def test_a_name_is_what_the_table_says(row: Row) -> None:
    found: Any = getattr(importlib.import_module(row.module), row.name, None)
    absent = isinstance(found, type) and issubclass(found, Absent)
    if row.here != "out":
        assert found is not None and not absent
        assert bool(row.note) == (row.here == "differs")
    elif absent:
        assert row.note == ABSENT[row.name]
        with pytest.raises(NotImplementedError, match=row.name):
            found()
    else:
        assert found is None and row.note


MODULES = {
    "dynamo.llm": "llm/__init__.py",
    "dynamo.llm.exceptions": "llm/exceptions.py",
    "dynamo.runtime": "runtime/__init__.py",
    "dynamo.runtime.logging": "runtime/logging.py",
    "dynamo.health_check": "health_check.py",
    "dynamo.prometheus_names": "prometheus_names.py",
}
"""The modules of the table, and the files of Dynamo that say what is in them."""


@pytest.mark.parametrize("module", MODULES)
def test_the_table_has_every_name_of_dynamo(module: str) -> None:
    source = ast.parse((tree() / "dynamo" / MODULES[module]).read_text())
    public = {name for name in _names(source.body) if not name.startswith("_")} - {*NOT_PUBLIC}
    assert public and public - {row.name for row in rows() if row.module == module} == set()


def test_the_table_has_every_name_of_the_compiled_module() -> None:
    command = [sys.executable, "-S", "-P", "-c", "import dynamo._core as one; print(*dir(one))"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tree())}, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip(f"Dynamo's module cannot be loaded here: {done.stderr[-200:]}")
    public = {name for name in done.stdout.split() if not name.startswith("_")}
    assert len(public) > 50 and public - {row.name for row in rows()} == set()


def tree() -> Path:
    """The directory ``DYNAMO_WORKERS`` with both wheels, ``ai-dynamo`` and its runtime."""
    found = Path(os.environ.get("DYNAMO_WORKERS", "/nowhere"))
    if not (found / "dynamo" / "llm").is_dir():
        pytest.skip("DYNAMO_WORKERS names no directory with the wheel of ai-dynamo-runtime")
    return found


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield what a module defines, and what it imports from modules of its own package."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").startswith("dynamo"):
                yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Try):
            yield from _names(node.body)
