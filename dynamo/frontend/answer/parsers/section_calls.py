"""The tool calls of DeepSeek V3 and V3.1: a section of calls, each between markers."""

from __future__ import annotations

from typing import NamedTuple

from dynamo.frontend.answer.parsers.message import AnswerMessage
from dynamo.frontend.answer.parsers.scan import Markers, TextSteps

__all__ = ["DEEPSEEK_MARKERS", "DEEPSEEK_V3", "DEEPSEEK_V3_1", "SectionCallParser", "SectionShape"]

_SECTION, _END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_MARKERS = (_SECTION, _END_SECTION, _CALL, _SEPARATOR, _END_CALL)
_START = Markers(_SECTION)
_IN_SECTION = Markers(_CALL, _END_SECTION)
_MAX_HEADER = 512


class SectionShape(NamedTuple):
    """A call is a header, ``opens`` and its arguments, up to one of ``closes``. The name follows
    ``before_name`` in the header."""

    before_name: str
    opens: str
    closes: tuple[str, ...]


DEEPSEEK_V3 = SectionShape(_SEPARATOR, "```json\n", ("\n```" + _END_CALL, _END_CALL))
DEEPSEEK_V3_1 = SectionShape("", _SEPARATOR, (_END_CALL,))


class SectionCallParser(TextSteps):
    """Content, then one section of calls, then perhaps content again."""

    __slots__ = ("_closes", "_message", "_opening", "_shape")

    def __init__(self, message: AnswerMessage, shape: SectionShape) -> None:
        super().__init__(self._outside)
        self._message = message
        self._shape = shape
        self._closes = Markers(*shape.closes)
        self._opening = ""  # markup that is content if no call follows

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        markup = self._step == self._between and _IN_SECTION.may_begin(self._text)
        if self._opening or not (markup or self._step == self._arguments):
            self._message.add_content(self._opening + self._text)
        self._message.finish()

    def _outside(self) -> bool:
        """Content up to a section."""
        if self._opening:
            self._message.add_content(self._opening)
            self._opening = ""
        count, marker = _START.find(self._text)
        self._message.add_content(self._take(count))
        if marker:
            self._opening = self._take(len(marker))
            self._step = self._between
        return bool(marker)

    def _between(self) -> bool:
        """In a section, between calls."""
        space = self._take_space()
        if self._opening:
            self._opening += space
        if _IN_SECTION.may_begin(self._text):
            return False
        marker = _IN_SECTION.leading(self._text)
        if marker == _END_SECTION and not self._opening:
            self._take(len(marker))
            marker = ""
        else:
            self._opening += self._take(len(marker))
        self._step = self._header if marker == _CALL else self._outside
        return True

    def _header(self) -> bool:
        """After the marker of a call."""
        shape = self._shape
        end = self._text.find(shape.opens)
        if end < 0 and len(self._text) <= _MAX_HEADER + len(shape.opens):
            return False
        before, _, name = self._text[: max(0, end)].rpartition(shape.before_name or "\n")
        name = name.strip()
        if not name or end > _MAX_HEADER or (shape.before_name and not before):
            self._step = self._outside
            return True
        self._take(end + len(shape.opens))
        self._opening = ""
        self._message.begin_call(name)
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        count, marker = self._closes.find(self._text)
        self._message.add_arguments(self._take(count))
        if marker:
            self._take(len(marker))
            self._step = self._between
        return bool(marker)
