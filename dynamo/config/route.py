"""Options of ``dynamo route``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RouteSettings"]


@dataclass(frozen=True, kw_only=True)
class RouteSettings:
    """route: which prompt, and which frontend to ask"""

    prompt_file: str | None = option(
        None,
        "--prompt-file",
        help="text of a prompt, or the JSON body of a chat or completion request; - for stdin",
    )
    url: str = option("http://127.0.0.1:8000", "--url", help="the frontend")
    model: str | None = option(None, "--model", help="default: the frontend's first")
    explain: bool = option(False, "--explain", help="show all candidates and their cost")
    json: bool = option(False, "--json", help="print the answer as JSON")
    timeout_s: float = option(
        30.0, "--timeout-secs", minimum=0.1, help="seconds to wait for the frontend"
    )
