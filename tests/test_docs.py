"""Documentation pages: links, files and modules that they name exist; lines are short."""

from __future__ import annotations

import re
import tomllib
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

    As `router/modes/picker` or `dynamo.router.modes.picker`; files as `router/modes/picker.py`.
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
    folders = "benchmarks|tests|examples|lab|scripts|statefiles"
    missing = [
        place(page, name)
        for page in PAGES
        for name in re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]*\w", page.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing, "\n".join(missing)


def test_decisions_are_listed_in_their_order() -> None:
    text = (ROOT / "docs/decisions.md").read_text()
    row = r"^\| \[.*\]\(#(.*?)\) \| \d{4}-\d\d-\d\d \| [a-z ]+ \| \[\S+\]\((\S+)\) \|$"
    listed = [link for link, _ in re.findall(row, text, re.MULTILINE)]  # each has date and code
    assert listed == [anchor(title) for title in re.findall(r"^## (.*)$", text, re.MULTILINE)]


def test_the_lab_has_this_version() -> None:
    project = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert f"dynamo-appliance[planner]=={__version__}" in project["dependencies"]


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


FOREIGN = {"dynamo/common", "dynamo/sglang", "examples/pipeline"}
"""Packages of Dynamo, and a namespace with a slash, which sources name like files of ours."""
SOURCES = [
    path
    for folder in ("dynamo", "lab", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyx", ".pyi", ".hpp")
]


def test_files_that_docstrings_and_comments_name_exist() -> None:
    named = re.compile(
        r"``?((?:dynamo|lab|tests|docs|benchmarks|scripts|examples|deploy|statefiles)/[\w./-]*\w)``?"
    )
    stale = [
        place(path, name)
        for path in SOURCES
        for name in sorted(set(named.findall(path.read_text())) - FOREIGN)
        if not any(ROOT.glob(name)) and not any(ROOT.glob(f"{name}.*"))
    ]
    assert not stale, "\n".join(stale)


def test_what_docstrings_refer_to_is_defined() -> None:
    """As :class:`Name` or :meth:`Name.method`: somewhere, because types are imported for checks."""
    defined, roles = {"bytes", "find", *PACKAGES, *MODULES}, []
    for path in SOURCES:
        if path.is_relative_to(PACKAGE):
            text = path.read_text()
            defined |= {path.stem, path.parent.name}
            names = re.findall(
                r"\b(?:def|class) (\w+)|^\s*(\w+)(?::| =)|\bself\.(\w+)", text, re.MULTILINE
            )
            defined |= {name for found in names for name in found if name}
            roles += [(path, name) for name in re.findall(r":[a-z]+:`~?([\w.]+)`", text)]
    unknown = [place(path, name) for path, name in roles if not defined.issuperset(name.split("."))]
    assert not unknown, "\n".join(unknown)
