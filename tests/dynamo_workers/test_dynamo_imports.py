"""Dynamo's own worker packages beside this package: what they import from it exists.

``DYNAMO_WORKERS`` names a directory with Dynamo's ``dynamo/vllm``, ``dynamo/sglang``,
``dynamo/common`` …, for example an unpacked ``ai-dynamo`` wheel; without it those tests skip.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = (
    *("dynamo._core", "dynamo._core.backend", "dynamo.health_check", "dynamo.llm"),
    *("dynamo.llm.exceptions", "dynamo.prometheus_names", "dynamo.runtime"),
    "dynamo.runtime.logging",
)
PACKAGES = ("common", "sglang", "trtllm", "vllm")
THIRD_PARTY = "No module named"


@pytest.fixture
def tree() -> Path:
    """The directory of Dynamo's packages."""
    given = os.environ.get("DYNAMO_WORKERS")
    if not given:
        pytest.skip("DYNAMO_WORKERS is not set: unpack the wheel of ai-dynamo and name it there")
    return Path(given)


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code with these directories before this package on its path."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, "-P", "-c", code]  # without the current directory
    return subprocess.run(command, env=environ, text=True, capture_output=True, timeout=120)


def test_other_directories_add_to_the_package_and_those_before_it_win(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for directory in (before, after):
        for name in ("vllm", "added"):
            package = directory / "dynamo" / name
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(f"where = {directory.name!r}\n")
    code = (
        "import dynamo, dynamo.vllm, dynamo.added, dynamo.llm\n"
        "print(dynamo.__file__, dynamo.vllm.where, dynamo.added.where, dynamo.llm.__file__)"
    )
    ours = f"{ROOT}/dynamo/__init__.py before before {ROOT}/dynamo/llm/__init__.py\n"
    assert run(code, before).stdout == ours
    found = run(
        f"import sys; sys.path.append({str(after)!r}); import dynamo.added, dynamo.vllm\n"
        "print(dynamo.added.where, dynamo.vllm.__file__)"
    )
    assert found.stdout == f"after {ROOT}/dynamo/vllm/__init__.py\n"


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of what the file imports from modules of ours."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in OURS:
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_imported_name_exists(tree: Path, package: str) -> None:
    files = [
        path
        for path in (tree / "dynamo" / package).rglob("*.py")
        if "tests" not in path.parts and not path.name.startswith("test_")
    ]
    names = {pair for path in files for pair in imported(path)}
    assert len(names) > 5
    missing = [
        f"{module}.{name}"
        for module, name in sorted(names)
        if not hasattr(importlib.import_module(module), name) and name not in TYPE_ONLY
    ]
    assert missing == []


TYPE_ONLY = ("KvRemovedEventInput", "KvStoredEventInput")
"""Types of arguments that Dynamo's stub file has, and not the module itself."""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_packages_import(tree: Path, package: str, tmp_path: Path) -> None:
    """Import every module; only packages of others may be missing."""
    chosen = tmp_path / "dynamo"
    chosen.mkdir()
    for name in PACKAGES:
        (chosen / name).symlink_to(tree / "dynamo" / name)
    code = f"""
import importlib, pkgutil, sys
import dynamo.{package} as package
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if ".tests" not in module.name and not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if (error.name or "dynamo").startswith("dynamo"):
                print(module.name, error)
"""
    found = run(code, tmp_path)
    assert found.returncode == 0, found.stderr[-2000:]
    ours = [line for line in found.stdout.splitlines() if not line.endswith(TOLERATED)]
    assert ours == []


TOLERATED = ("'dynamo.nixl_connect'", "'dynamo.logits_processing'")
"""Pure Python packages of the ``ai-dynamo-runtime`` wheel, to be put on the path as well."""
