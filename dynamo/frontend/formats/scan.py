"""Search in text that arrives in pieces: markers, the end of a JSON value, the steps of a parser.

No result depends on how the text is cut: what may be the beginning of a marker is held back.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

SPACE = " \t\r\n"
MAX_HELD = 1 << 16
"""Characters that a parser may hold back to find out what they are."""

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]<]')


class Markers:
    """Fixed texts that separate the parts of an answer; none is the beginning of another.

    Without any, nothing is found.
    """

    __slots__ = ("_find", "_first", "_longest", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._first, self._longest, self._find = _searched(texts)

    def find(self, text: str) -> tuple[int, str]:
        """How many characters of ``text`` precede the first marker, and that marker.

        Without a marker it is "", and the characters are those before what may begin one.
        """
        for char in self._first:
            if char in text:
                break
        else:
            return len(text), ""
        found = self._find(text)
        if found is not None:
            return found.start(), found[0]
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if self.may_begin(text[start:]):
                return start, ""
        return len(text), ""

    def may_begin(self, text: str) -> bool:
        """Whether ``text`` is the beginning of a marker, not a whole one. True for ""."""
        return any(each.startswith(text) and each != text for each in self.texts)

    def leading(self, text: str) -> str:
        """The marker at the beginning of ``text``, or ""."""
        for each in self.texts:
            if text.startswith(each):
                return each
        return ""


@functools.cache
def _searched(
    texts: tuple[str, ...],
) -> tuple[tuple[str, ...], int, Callable[[str], re.Match[str] | None]]:
    """The first characters, the greatest length, and the search. The formats have a few dozen."""
    find = re.compile("|".join(map(re.escape, texts))).search
    return tuple({text[0] for text in texts}), max(map(len, texts), default=0), find


class JsonSpan:
    """Finds the end of one JSON string, array or object.

    A ``<`` outside strings ends it too: no JSON has one there, but a marker after broken JSON does.
    """

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str) -> int:
        """The number of characters of ``text`` up to the end of the value, -1 if all belong to it.

        Each call continues where the last one stopped. O(characters).
        """
        at = 0
        while 0 <= at < len(text):
            at, ended = self._string(text, at) if self._quoted else self._structure(text, at)
            if ended:
                return at
        return -1

    def _string(self, text: str, at: int) -> tuple[int, bool]:
        if self._escaped:
            self._escaped = False
            return at + 1, False
        found = _IN_STRING.search(text, at)
        if found is None:
            return -1, False
        if found[0] == "\\":
            self._escaped = True
            return found.end(), False
        self._quoted = False
        return found.end(), not self._depth

    def _structure(self, text: str, at: int) -> tuple[int, bool]:
        found = _STRUCTURE.search(text, at)
        if found is None:
            return -1, False
        char = found[0]
        if char == "<":
            return found.start(), True
        if char == '"':
            self._quoted = True
        else:
            self._depth += 1 if char in "{[" else -1
        return found.end(), not self._quoted and not self._depth


class TextSteps:
    """The base of a parser: text is collected in ``_text`` and consumed by the current ``_step``.

    A step returns True if another step can continue, False if it needs more text. It then must not
    leave text that it has searched in ``_text``, beyond a bound: it puts that aside.
    """

    __slots__ = ("_aside", "_aside_size", "_step", "_text")

    def __init__(self, first: Callable[[], bool]) -> None:
        self._text = ""
        self._aside: list[str] = []
        self._aside_size = 0
        self._step = first

    def push(self, text: str) -> None:
        """Add text."""
        self._text = self._text + text if self._text else text
        while self._step():
            pass

    def _take(self, count: int) -> str:
        """Remove and return the first ``count`` characters."""
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _put_aside(self, count: int) -> None:
        """Remove the first ``count`` characters, which :meth:`_take_aside` will return."""
        if count:
            self._aside.append(self._take(count))
            self._aside_size += count

    def _put_space_aside(self, space: str = SPACE) -> None:
        """Remove the white space at the beginning, which :meth:`_take_aside` will return."""
        self._put_aside(len(self._text) - len(self._text.lstrip(space)))

    def _take_aside(self) -> str:
        """Remove and return what was put aside."""
        text = "".join(self._aside)
        self._aside.clear()
        self._aside_size = 0
        return text

    def _take_space(self) -> str:
        """Remove and return the white space at the beginning."""
        return self._take(len(self._text) - len(self._text.lstrip(SPACE)))
