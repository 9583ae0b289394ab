"""Tool calls in a section between markers, as of DeepSeek V3, V3.1 and Kimi K2."""

from __future__ import annotations

import re
from typing import NamedTuple

from dynamo.frontend.formats.message import AnswerMessage, CallSteps
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.scan import Markers

_MAX_HEADER = 512
_NUMBERED = re.compile(r"^(?:functions\.)?(.*?)(?::\d+)?$", re.DOTALL)


class SectionCallShape(NamedTuple):
    """The ``markers`` of a section's beginning and end and of a call, and the parts of a call.

    A call is a header, ``opens`` and its arguments, up to one of ``closes``. The name follows
    ``before_name`` in the header. With ``numbered`` the header is the id of the call, as
    ``functions.NAME:NUMBER``; later prompts must have this id. ``tokens`` are special tokens that
    the markers contain.
    """

    markers: tuple[str, str, str]
    before_name: str
    opens: str
    closes: tuple[str, ...]
    numbered: bool = False
    tokens: tuple[str, ...] = ()

    @property
    def every_marker(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        texts = (*self.markers, self.before_name, self.opens, *self.closes, *self.tokens)
        return tuple(filter(None, texts))

    @property
    def begins(self) -> tuple[str, ...]:
        """The marker that begins a section."""
        return self.markers[:1]

    def parser(self, message: AnswerMessage, tools: RequestTools) -> SectionCallParser:
        """Return a parser of one answer."""
        return SectionCallParser(message, self)


class SectionCallParser(CallSteps):
    """Content, then one section of calls, then perhaps content again."""

    __slots__ = ("_closes", "_in_section", "_shape", "_start")

    def __init__(self, message: AnswerMessage, shape: SectionCallShape) -> None:
        super().__init__(self._outside, message)
        self._shape = shape
        section, end_section, call = shape.markers
        self._start = Markers(section)
        self._in_section = Markers(call, end_section)
        self._closes = Markers(*shape.closes)

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        self._read_to_end()
        if self._message.stopped and self._message.in_call and not self._message.in_string:
            self._message.end_call()
        markup = self._step == self._between and self._in_section.may_begin(self._text)
        if self._aside or not (markup or self._step == self._arguments):
            self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _outside(self) -> bool:
        """Content up to a section."""
        marker = self._content(self._start)
        if marker:
            self._step = self._between
        return bool(marker)

    def _between(self) -> bool:
        """In a section, between calls."""
        _, end_section, call = self._shape.markers
        marker = self._next_marker(self._in_section, end_section)
        if marker is None:
            return False
        self._step = self._header if marker == call else self._outside
        return True

    def _header(self) -> bool:
        """After the marker of a call."""
        shape = self._shape
        end = self._text.find(shape.opens, 0, _MAX_HEADER + len(shape.opens) + 1)
        if end < 0 and len(self._text) <= _MAX_HEADER + len(shape.opens):
            return False
        # DeepSeek V3 writes the type of the call, the separator, and then the name.
        before, _, name = self._text[: max(0, end)].rpartition(shape.before_name or "\n")
        name = call_id = name.strip()
        if shape.numbered:
            name = _NUMBERED.sub(r"\1", call_id)
        if not name or end > _MAX_HEADER or (shape.before_name and not before):
            self._step = self._outside
            return True
        self._take(end + len(shape.opens))
        self._take_aside()
        self._message.begin_call(name, call_id if shape.numbered else None)
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        count, marker = self._closes.find(self._text)
        self._message.add_json(self._take(count))
        if not marker:
            return False
        ends: bool | None = True
        if self._message.in_string:
            ends = self._is_followed(len(marker), _MAX_HEADER, self._in_section)
        if ends is False:  # no other marker follows: this one is a part of the string
            self._message.add_json(self._take(1))
        elif ends:
            self._take(len(marker))
            if not self._message.in_string:
                self._message.end_call()
            self._step = self._between
        return ends is not None
