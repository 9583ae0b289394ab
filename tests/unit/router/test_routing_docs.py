"""docs/routing.md names every knob of the router as it is."""

from __future__ import annotations

from pathlib import Path

from dynamo.config.knob import describe
from dynamo.config.router import RouterSettings
from dynamo.config.router_process import RouterProcessSettings

PAGE = Path(__file__).parents[3] / "docs/routing.md"


def rows(*groups: type) -> list[str]:
    """The table of the page, line by line."""
    lines = ["| flag | variable | default | what it does |", "|---|---|---|---|"]
    for group in groups:
        for flags, variables, default, text in describe(group):
            names = "<br>".join(f"`{flag}`" for flag in flags.split()) or "(variable only)"
            known = "<br>".join(f"`{variable}`" for variable in variables.split())
            lines.append(f"| {names} | {known} | {'' if default is None else default} | {text} |")
    return lines


def test_every_knob_is_in_the_table() -> None:
    page = PAGE.read_text()
    for table in (rows(RouterSettings), rows(RouterProcessSettings)):
        text = "\n".join(table) + "\n"
        assert text in page, f"docs/routing.md should say:\n{text}"
