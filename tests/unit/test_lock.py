"""requirements.lock and docs/licences.md agree with pyproject.toml. `scripts/lock` makes them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
PINNED = re.compile(r"^([A-Za-z0-9_.-]+)==([^ ;\\]+)(.*)$", re.MULTILINE)


def pinned() -> dict[str, set[str]]:
    """The versions of each package; one that depends on the Python has several."""
    found: dict[str, set[str]] = {}
    for name, version, _ in PINNED.findall(LOCK):
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


@pytest.mark.parametrize("text", REQUIREMENTS)
def test_the_lock_has_what_the_project_asks_for(text: str) -> None:
    wanted = Requirement(text)
    versions = pinned()[canonicalize_name(wanted.name)]
    assert versions
    assert all(wanted.specifier.contains(version) for version in versions), "run scripts/lock"


def test_every_package_has_hashes_and_nothing_names_a_place() -> None:
    parts = re.split(r"^(?=[A-Za-z0-9])", LOCK, flags=re.MULTILINE)
    for part in filter(str.strip, parts):
        assert "--hash=sha256:" in part, part[:80]
    assert "://" not in LOCK
    assert "--index" not in LOCK


def test_the_licence_of_every_package_is_listed() -> None:
    rows = (ROOT / "docs/licences.md").read_text()
    for name, versions in pinned().items():
        assert any(f"| {name} | {version} |" in rows for version in versions), name
