"""Options of ``dynamo route``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RouteSettings"]


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """route: which prompt"""

    prompt_file: str | None = option(
        None,
        "--prompt-file",
        help="text of a prompt, or the JSON body of a chat or completion request; - for stdin",
    )
    model: str | None = option(None, "--model", help="default: the frontend's first")
    explain: bool = option(False, "--explain", help="show all candidates and their cost")
    json: bool = option(False, "--json", help="print the answer as JSON")
