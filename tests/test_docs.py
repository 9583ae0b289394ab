"""Documentation pages: links, files and modules that they name exist; lines are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dynamo"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "*/README.md", "*/*/README.md")
    for page in ROOT.glob(pattern)
    if not any(part.startswith(".") or part == "build" for part in page.relative_to(ROOT).parts)
)
PACKAGES = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
MODULES = {path.stem for path in PACKAGE.glob("*.py")}
LINE_WIDTH = 100
COMMANDS_WIDTH = 150  # a command in a code block stays in one line, to be copied

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), target


@pages
def test_modules_exist(page: Path) -> None:
    """Modules as `router/picker` or `dynamo.router.picker`, files as `router/picker.py`."""
    text = page.read_text()
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)/?(?:\.[a-z]+)?`", text):
        if name.split("/")[0] in PACKAGES:
            path = PACKAGE / name
            assert path.is_dir() or any(path.parent.glob(f"{path.name}.*")), name
    for name in re.findall(r"`dynamo((?:\.[a-z_]+)+)[.A-Za-z_]*`", text):
        first, *rest = name[1:].split(".")
        path = PACKAGE / first
        assert first in PACKAGES | MODULES, name
        if path.is_dir() and rest and first not in ("llm", "runtime"):  # names, not modules
            assert any(path.glob(f"{rest[0]}*")), name


@pages
def test_files_exist(page: Path) -> None:
    folders = "benchmarks|tests|examples|scripts|statefiles"
    for name in re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]*\w", page.read_text()):
        assert (ROOT / name).exists(), name


@pages
def test_lines_are_short(page: Path) -> None:
    """Prose ends at column 100; tables, long links and code blocks may be wider."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code = code != line.lstrip().startswith("```")
        limit = COMMANDS_WIDTH if code else LINE_WIDTH
        if "|" in line or line.startswith("#") or " " not in line.strip(" -*"):
            continue
        assert len(line) <= limit, f"line {number} has {len(line)} characters"
