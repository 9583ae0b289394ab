"""The reference implementation of ``dynamo.frontend.answer.choice``: one character at a time."""

from __future__ import annotations

__all__ = ["cut_at_stop"]


def cut_at_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The part of ``text`` that is shown, and the stop string that ended it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None
