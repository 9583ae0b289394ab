"""Command-line words of the keys and values of a graph. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["are_words", "as_flags", "as_word"]


def as_flags(key: str, value: Any) -> list[str]:
    """Return the words of ``key: value``, in general ``--key value``.

    ========== ==========================
    true       ``--key``
    false      ``--no-key``
    a list     ``--key`` for each item
    a mapping  its JSON
    null       nothing
    ========== ==========================

    A value that looks like a flag is joined with ``=``. Raises ValueError for any other value.
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
    """Return a value as one word or the text of a variable; a mapping becomes JSON.

    Raises TypeError or ValueError for a value without a JSON form.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("contains a zero byte")
        return value
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def are_words(values: Iterable[Any]) -> bool:
    """Whether each value can be a word."""
    return all(
        isinstance(value, str | int | float | bool) and "\0" not in str(value) for value in values
    )


def _pair(key: str, word: str) -> list[str]:
    return [f"--{key}={word}"] if word.startswith("-") else [f"--{key}", word]
