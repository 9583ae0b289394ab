"""Options of ``dynamo chat``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["ChatSettings"]


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """chat: with which model"""

    model: str | None = option(
        None, "--model", help="default: the only one that the frontend serves"
    )
    system: str | None = option(None, "--system", metavar="TEXT", help="the system prompt")
    max_tokens: int | None = option(
        None,
        "--max-tokens",
        minimum=1,
        help="end an answer after so many; default: the model's end",
    )
