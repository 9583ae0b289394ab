"""Columns of text on a terminal, where Chinese and Japanese characters take two cells. Pure.

Not tables of rich: to import those takes 40 ms of CPU, as much as all of ``dynamo ps``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

_GAP = 2
_SHORTEST = 12
"""Columns that do not fit are cut to this width, not further."""


def cell_len(text: str) -> int:
    """Return how many cells of a terminal ``text`` takes."""
    return len(text) if text.isascii() else int(_rich_cells().cell_len(text))


def model_state(state: str, progress: float | None) -> str:
    """Return the state of a model or a worker as tables show it."""
    word = "no worker" if state == "zero" else state
    return word if progress is None else f"{word} {progress:.0%}"


def cut(text: str, width: int, mark: str = "") -> str:
    """Return the beginning of ``text`` in at most ``width`` cells, with ``mark`` if it was cut."""
    if cell_len(text) <= width:
        return text
    left = max(width - len(mark), 0)
    if text.isascii():
        return text[:left] + mark
    return (_rich_cells().chop_cells(text, left)[0] if left else "") + mark


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Return the words of ``text`` in lines of at most ``width`` cells; the later ones begin with
    ``indent``. A longer word is broken: Chinese and Japanese have no spaces."""
    lines, line = [], ""
    for word in text.split():
        gap = " " if line.strip() else ""
        if cell_len(line + gap + word) <= width:
            line += gap + word
            continue
        if line.strip():
            lines.append(line)
            line = indent
        while cell_len(line + word) > width and (head := cut(word, width - cell_len(line))):
            lines.append(line + head)
            line, word = indent, word[len(head) :]
        line += word
    return [*lines, line]


def printable(text: str) -> str:
    """Replace control characters: names and output of programs must not move the cursor."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def aligned(rows: Sequence[Sequence[str]], width: int = 0) -> list[str]:
    """Return a line per row, with columns of one width.

    To fit into ``width``, the longest columns are cut first. The last column stays as it is.
    """
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if width:
        _shrink(widths, width)
    return [_line(row, widths) for row in rows]


def figures(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with names on the left and figures on the right. Nothing is cut."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * _GAP).join(
            (first + " " * (widths[0] - cell_len(first)), *map(str.rjust, cells, widths[1:]))
        )
        for first, *cells in rows
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
        (text := cut(cell, width, "…")) + " " * (width - cell_len(text) + _GAP)
        for cell, width in zip(before, widths, strict=False)
    ]
    return ("".join(padded) + last).rstrip()


def _rich_cells() -> Any:
    """Import it where a text needs it: 4 ms, of the 60 that ``dynamo ps`` may take."""
    return importlib.import_module("rich.cells")
