"""Columns of text on a terminal, where Chinese and Japanese characters take two cells. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

_GAP = 2
_SHORTEST = 12
"""Columns that do not fit are cut to this width, not further."""


def cells(text: str) -> int:
    """Return how many cells of a terminal ``text`` takes."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def cut(text: str, width: int, mark: str = "") -> str:
    """Return the beginning of ``text`` in at most ``width`` cells, with ``mark`` if it was cut."""
    if cells(text) <= width:
        return text
    left = width - len(mark)
    if text.isascii():
        return text[: max(0, left)] + mark
    kept = []
    for character in text:
        left -= _cells_of(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept) + mark


def printable(text: str) -> str:
    """Replace control characters: names and output of programs must not move the cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def aligned(rows: Sequence[Sequence[str]], width: int = 0) -> list[str]:
    """Return a line per row, with columns of one width.

    To fit into ``width``, the longest columns are cut first. The last column stays as it is.
    """
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    if width:
        _shrink(widths, width)
    return [_line(row, widths) for row in rows]


def figures(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with names on the left and figures on the right. Nothing is cut."""
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * _GAP).join(
            (first + " " * (widths[0] - cells(first)), *map(str.rjust, rest, widths[1:]))
        )
        for first, *rest in rows
    ]


def _shrink(widths: list[int], width: int) -> None:
    """Shorten the longest of ``widths`` until the columns before the last one fit."""
    excess = sum(widths[:-1]) + _GAP * (len(widths) - 1) - width
    while excess > 0:
        longest = max(range(len(widths) - 1), key=widths.__getitem__, default=0)
        if widths[longest] <= _SHORTEST or longest == len(widths) - 1:
            return
        widths[longest] -= 1
        excess -= 1


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    *before, last = row
    padded = [
        shown + " " * (width - cells(shown) + _GAP)
        for cell, width in zip(before, widths, strict=False)
        for shown in (cut(cell, width, "…"),)
    ]
    return ("".join(padded) + last).rstrip()


def _cells_of(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
