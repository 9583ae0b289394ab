"""The table of every public name in docs/dynamo-workers.md is what this package has."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamo.llm.absent import ABSENT, Absent

PAGE = Path(__file__).parents[2] / "docs" / "dynamo-workers.md"
NOT_PUBLIC = (
    *("Any", "AsyncGenerator", "AsyncIterator", "BaseModel", "Callable", "Optional", "Protocol"),
    *("Type", "Union", "ValidationError", "wraps"),
)
"""What Dynamo's modules import for themselves."""


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


def test_the_table_has_every_name_of_dynamo() -> None:
    """``DYNAMO_WORKERS`` with both wheels, ``ai-dynamo`` and ``ai-dynamo-runtime``."""
    tree = Path(os.environ.get("DYNAMO_WORKERS", "/nowhere")) / "dynamo"
    if not (tree / "llm").is_dir():
        pytest.skip("DYNAMO_WORKERS names no directory with the wheel of ai-dynamo-runtime")
    listed = {(row.module, row.name) for row in rows()}
    for module in ("dynamo.llm", "dynamo.runtime"):
        source = tree / module.partition(".")[2] / "__init__.py"
        names = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        public = {name for name in names if not name.startswith("_")} - set(NOT_PUBLIC)
        assert public <= {name for place, name in listed if place == module}
