"""Documentation pages: links, files and modules that they name exist; lines are short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dynamo import __version__

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


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def place(page: Path, what: object) -> str:
    return f"{page.relative_to(ROOT)}: {what}"


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, fragment = target.partition("#")
    other = (page.parent / path).resolve() if path else page
    if not other.exists() or not fragment:
        return other.exists()
    return fragment in map(anchor, re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE))


def test_links_lead_somewhere() -> None:
    broken = [
        place(page, target)
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if "://" not in target and not leads_somewhere(page, target)
    ]
    assert not broken, "\n".join(broken)


def unknown_modules(text: str) -> Iterator[str]:
    """Yield the names of modules in ``text`` that do not exist.

    As `router/picker` or `dynamo.router.picker`; files as `router/picker.py`.
    """
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)/?(?:\.[a-z]+)?`", text):
        path = PACKAGE / name
        known = path.is_dir() or any(path.parent.glob(f"{path.name}.*"))
        if name.split("/")[0] in PACKAGES and not known:
            yield name
    for name in re.findall(r"`dynamo((?:\.[a-z_]+)+)[.A-Za-z_]*`", text):
        first, *rest = name[1:].split(".")
        path = PACKAGE / first
        names = first in ("llm", "runtime") or not path.is_dir() or not rest  # not modules
        if first not in PACKAGES | MODULES or not (names or any(path.glob(f"{rest[0]}*"))):
            yield name


def test_modules_exist() -> None:
    missing = [place(page, name) for page in PAGES for name in unknown_modules(page.read_text())]
    assert not missing, "\n".join(missing)


def test_files_exist() -> None:
    folders = "benchmarks|tests|examples|scripts|statefiles"
    missing = [
        place(page, name)
        for page in PAGES
        for name in re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]*\w", page.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing, "\n".join(missing)


def test_decisions_are_listed_in_their_order() -> None:
    text = (ROOT / "docs/decisions.md").read_text()
    listed = re.findall(r"^\| \[.*\]\(#(.*)\) \|$", text, re.MULTILINE)
    assert listed == [anchor(title) for title in re.findall(r"^## (.*)$", text, re.MULTILINE)]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/changelog.md").read_text(), re.MULTILINE)
    assert headings[0] == __version__


def long_lines(page: Path) -> Iterator[int]:
    """Yield the numbers of lines that are too long; tables, long links and code may be wider."""
    code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        code = code != line.lstrip().startswith("```")
        limit = COMMANDS_WIDTH if code else LINE_WIDTH
        if "|" in line or line.startswith("#") or " " not in line.strip(" -*"):
            continue
        if len(line) > limit:
            yield number


def test_lines_are_short() -> None:
    wide = [place(page, number) for page in PAGES for number in long_lines(page)]
    assert not wide, f"lines of more than {LINE_WIDTH} characters:\n" + "\n".join(wide)
