"""From a key and a value of a graph to the words of a command line. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["are_words", "as_flags", "as_word"]


def as_flags(key: str, value: Any) -> list[str]:
    """``key: value`` is ``--key value``; see the table.

    ========== ==========================
    true       ``--key``
    false      ``--no-key``
    a list     ``--key`` for each item
    a mapping  its JSON
    null       nothing
    ========== ==========================

    A word that could be taken for a flag is joined by ``=``. Raises ValueError for what is no word.
    """
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, list):
        if not are_words(value):
            raise ValueError("must be a list of words and numbers")
        return [word for item in value for word in _pair(key, as_word(item))]
    try:
        return _pair(key, as_word(value))
    except (TypeError, ValueError):
        problem = f"must be a word, a number, a list or a mapping, got {value!r}"
        raise ValueError(problem) from None


def as_word(value: Any) -> str:
    """A value as one word of a command line or one variable; a mapping becomes JSON.

    Raises TypeError or ValueError for what JSON cannot say.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("holds a zero byte")
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def are_words(values: Iterable[Any]) -> bool:
    """Whether each value can be a word."""
    return all(
        isinstance(value, str | int | float | bool) and "\0" not in str(value) for value in values
    )


def _pair(key: str, word: str) -> list[str]:
    return [f"--{key}={word}"] if word.startswith("-") else [f"--{key}", word]
