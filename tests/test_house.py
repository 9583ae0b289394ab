"""What linters can't hold: sizes, doors, docstrings, and that every room opens alone."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "dynamo").rglob("*.py"))
COMPILED = sorted((ROOT / "dynamo").rglob("*.pyx"))
FILE_LINES = 500
FUNCTION_LINES = 60
BANNED_NAMES = ("utils", "helpers", "manager", "handler")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = [module_name(path) for path in SOURCES]
IMPORTABLE = [name for name in MODULES if not name.endswith("__main__")]


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", [*SOURCES, *COMPILED], ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_are_small(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= FILE_LINES, f"{path.name} has {lines} lines, at most {FILE_LINES}"
    assert not any(word in path.stem for word in BANNED_NAMES), f"{path.name} says nothing"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_small_and_rooms_say_what_they_are_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no module docstring"
    for function in functions(tree):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= FUNCTION_LINES, f"{path.name}:{function.name} has {length} lines"


@pytest.mark.parametrize("name", IMPORTABLE)
def test_all_is_true(name: str) -> None:
    module = importlib.import_module(name)
    assert hasattr(module, "__all__"), f"{name} has no __all__"
    missing = [public for public in module.__all__ if not hasattr(module, public)]
    assert not missing, f"{name}.__all__ promises {missing}"
    assert len(set(module.__all__)) == len(module.__all__)


def test_public_things_have_docstrings() -> None:
    bare = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not bare, "public names without a docstring:\n" + "\n".join(bare)


def test_every_module_imports_alone() -> None:
    """No module leans on another having been imported first (one interpreter for each package)."""
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for loaded in [m for m in sys.modules if m.split('.')[0] == 'dynamo']:\n"
        "        if not loaded.startswith('dynamo._fast.'):\n"
        "            del sys.modules[loaded]\n"
        "    importlib.import_module(name)\n"
    )
    command = [sys.executable, "-W", "error", "-c", script, *IMPORTABLE]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr[-3000:]


def test_only_config_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if "config" not in path.parts
        and any(word in path.read_text() for word in ("os.environ", "os.getenv", "getenv("))
    ]
    assert not readers, f"read the environment through dynamo.config: {readers}"


def test_only_the_command_line_prints() -> None:
    allowed = {"cli", "bench"}
    printers = []
    for path in SOURCES:
        if allowed & set(path.parts) or path.stem == "__main__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                printers.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not printers, f"only dynamo.cli prints: {printers}"


def test_no_orphan_tasks() -> None:
    """Every task has a parent: a TaskGroup, or dynamo.runtime.tasks."""
    bare = []
    for path in SOURCES:
        if path.name == "tasks.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("ensure_future", "gather") and owner == "asyncio":
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if node.func.attr == "create_task" and (owner == "asyncio" or owner.endswith("loop")):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not bare, f"tasks without a parent: {bare}"


def test_compiled_rooms_are_built_typed_and_twinned() -> None:
    """Every extension loads as compiled code, has a stub and a readable twin."""
    for path in COMPILED:
        module = importlib.import_module(f"dynamo._fast.{path.stem}")
        assert module.__file__ is not None and module.__file__.endswith(".so")
        assert path.with_suffix(".pyi").exists(), f"{path.name} has no .pyi"
        assert (ROOT / "tests/oracle" / f"{path.stem}.py").exists(), f"{path.name} has no twin"
