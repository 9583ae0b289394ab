"""docs/routing/settings.md lists every option of the router, part by part like --help.

``python tests/unit/router/test_routing_docs.py`` prints the tables as they should be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.config.parser import Option, option_of, range_text
from dynamo.config.router import RouterProcessSettings, RouterSettings

PAGE = Path(__file__).parents[3] / "docs/routing/settings.md"
TITLE = "| flag | variable | default | range | what it does |\n|---|---|---|---|---|\n"


def tables() -> Iterator[tuple[str, str]]:
    """Heading and table of each part."""
    for group in (RouterSettings, RouterProcessSettings):
        heading, lines = str(group.__doc__), ""
        for field in _options(group):
            spec = option_of(field)
            if spec.heading:
                if lines:
                    yield heading, TITLE + lines
                heading, lines = spec.heading, ""
            lines += _row(spec, field.default)
        yield heading, TITLE + lines


def _options(group: type) -> list[dataclasses.Field[object]]:
    return [field for field in dataclasses.fields(group) if "option" in field.metadata]


def _row(spec: Option, default: object) -> str:
    names = "<br>".join(f"`{flag}`" for flag in spec.flags) or "(variable only)"
    known = "<br>".join(f"`{variable}`" for variable in spec.env)
    shown = "" if default is None else default
    limits = ", ".join(spec.choices) or range_text(spec)
    return f"| {names} | {known} | {shown} | {limits} | {spec.help} |\n"


@pytest.mark.parametrize(("heading", "table"), list(tables()))
def test_every_option_is_in_the_table_of_its_part(heading: str, table: str) -> None:
    text = f"## {heading}\n\n{table}"
    assert text in PAGE.read_text(), f"docs/routing/settings.md should say:\n{text}"


if __name__ == "__main__":
    print("\n".join(f"## {heading}\n\n{table}" for heading, table in tables()))
