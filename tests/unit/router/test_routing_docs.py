"""docs/routing/settings.md names every knob of the router as it is, part by part like --help.

``python tests/unit/router/test_routing_docs.py`` prints the tables as they should be.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.config.option import Option
from dynamo.config.parser import range_text
from dynamo.config.router import RouterProcessSettings, RouterSettings

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = DOCS / "routing/settings.md"
TITLE = "| flag | variable | default | range | what it does |\n|---|---|---|---|---|\n"


def tables() -> Iterator[tuple[str, str]]:
    """Heading and table of each part."""
    for group in (RouterSettings, RouterProcessSettings):
        heading, lines = str(group.__doc__), ""
        for field in _knobs(group):
            spec: Option = field.metadata["option"]
            if spec.heading:
                if lines:
                    yield heading, TITLE + lines
                heading, lines = spec.heading, ""
            lines += _row(spec, field.default)
        yield heading, TITLE + lines


def _knobs(group: type) -> list[dataclasses.Field[object]]:
    return [field for field in dataclasses.fields(group) if "option" in field.metadata]


def _row(spec: Option, default: object) -> str:
    names = "<br>".join(f"`{flag}`" for flag in spec.flags) or "(variable only)"
    known = "<br>".join(f"`{variable}`" for variable in spec.env)
    shown = "" if default is None else default
    limits = ", ".join(spec.choices) or range_text(spec)
    return f"| {names} | {known} | {shown} | {limits} | {spec.help} |\n"


@pytest.mark.parametrize(("heading", "table"), list(tables()))
def test_every_knob_is_in_the_table_of_its_part(heading: str, table: str) -> None:
    text = f"## {heading}\n\n{table}"
    assert text in PAGE.read_text(), f"docs/routing/settings.md should say:\n{text}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    titles = {page: page.read_text()}
    for target in re.findall(r"\]\(([^)\s]+)\)", titles[page]):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            assert anchor in map(_anchor, headings), f"{page.name}: {target}"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_rooms_and_files_that_a_page_names_are_there(page: Path) -> None:
    """Rooms as `frontend/prefill/line`, files as benchmarks/replicas.py."""
    text = page.read_text()
    rooms = {path.name for path in (ROOT / "dynamo").iterdir() if path.is_dir()}
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)(?:\.py)?`", text):
        if name.split("/")[0] in rooms:
            place = ROOT / "dynamo" / name
            assert any(place.parent.glob(f"{place.name}*")), f"{page.name}: {name}"
    for name in re.findall(r"\b(?:benchmarks|tests|examples|scripts)/[\w/.-]*\w", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    print("\n".join(f"## {heading}\n\n{table}" for heading, table in tables()))
