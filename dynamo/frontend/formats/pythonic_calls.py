"""Tool calls as Python function calls: Llama 3.2 and 4, LFM2, Olmo 3 and others."""

from __future__ import annotations

import re
from typing import NamedTuple

from dynamo.frontend.formats.message import AnswerMessage, CallSteps
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.scan import MAX_HELD, Markers, json_text, value_json

_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_NAME_BEGINS = re.compile(r"\s*(?:[A-Za-z_][\w.\-]*\s*)?")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_KEYWORD_BEGINS = re.compile(r"\s*(?:[A-Za-z_]\w*\s*=?)?")
_MAX_NAME = 256
_STRUCTURE = re.compile(r"[\"'()\[\]{},]")
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


class PythonicCallShape(NamedTuple):
    """The markers around the calls. Without any, the calls are the whole answer, and of tools of
    the request alone; else the brackets around them may be missing."""

    start: str = ""
    end: str = ""

    @property
    def every_marker(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        return tuple(filter(None, self))

    @property
    def begins(self) -> tuple[str, ...]:
        """The marker that begins calls, if any."""
        return (self.start,) if self.start else ()

    def parser(self, message: AnswerMessage, tools: RequestTools) -> PythonicCallParser:
        """Return a parser of one answer."""
        return PythonicCallParser(message, self, tools.names)


class PythonicCallParser(CallSteps):
    """``[f(a=1), g(b="x")]`` as the whole answer or between markers.

    ``tool_names`` are those of the request. Each argument is passed on, as JSON, when it is
    complete. Anything that is not such a list, with keywords alone, is content.
    """

    __slots__ = (
        "_arguments", "_end", "_expression", "_name", "_shape", "_start", "_tool_names",
    )  # fmt: skip

    def __init__(
        self, message: AnswerMessage, shape: PythonicCallShape, tool_names: frozenset[str]
    ) -> None:
        super().__init__(self._outside if shape.start else self._beginning, message)
        self._shape = shape
        self._tool_names = tool_names
        self._start = Markers(*shape.begins)
        self._end = Markers(*filter(None, (shape.end,)))
        self._name = ""  # of a function whose first argument is to come
        self._arguments = 0
        self._expression = _Expression()

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        if self._message.stopped and self._message.in_call:
            if self._step == self._value:
                self._message.add_arguments(_argument_json(self._text))
            self._end_call()
        elif self._step == self._value:
            self._message.add_arguments(self._text.strip())
        elif self._step == self._separator:
            if self._aside or not self._end.may_begin(self._text):
                self._message.add_content(self._take_aside() + self._text)
        elif self._step != self._keyword or self._name:
            self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _beginning(self) -> bool:
        self._put_space_aside()
        if not self._text:
            return False
        opens = self._text[0] == "["
        self._put_aside(1 if opens else 0)
        self._step = self._call if opens else self._outside
        return True

    def _outside(self) -> bool:
        """Content, to the marker of calls, if the format has one, or the end of the answer."""
        marker = self._content(self._start)
        if marker:
            self._step = self._open
        return bool(marker)

    def _open(self) -> bool:
        """Behind the marker: the bracket may be missing."""
        self._put_space_aside()
        if not self._text:
            return False
        self._put_aside(1 if self._text[0] == "[" else 0)
        self._step = self._call
        return True

    def _call(self) -> bool:
        """At the name of a function."""
        header = _NAME.match(self._text, 0, _MAX_NAME + 1)
        if header is None and self._incomplete(_NAME_BEGINS):
            return False
        if header is None or header.end() > _MAX_NAME or not self._accepts(header[1]):
            self._step = self._outside
            return True
        self._put_aside(header.end())
        self._name = header[1]
        self._arguments = 0
        self._step = self._keyword
        return True

    def _keyword(self) -> bool:
        """At the name of an argument, or the end of the call."""
        keyword = _KEYWORD.match(self._text, 0, _MAX_NAME + 1)
        complete = keyword is not None and keyword.end() < len(self._text)  # "=" may become "=="
        if not complete and self._incomplete(_KEYWORD_BEGINS):
            return False
        if self._text.lstrip()[:1] == ")":
            self._begin()
            self._take(self._text.index(")") + 1)
            self._end_call()
            self._step = self._separator
        elif keyword is None or keyword.end() > _MAX_NAME:
            if not self._name:
                self._end_call()
            self._step = self._outside
        else:
            self._begin()
            self._take(keyword.end())
            separator = ", " if self._arguments else "{"
            self._message.add_arguments(f"{separator}{json_text(keyword[1])}: ")
            self._arguments += 1
            self._expression = _Expression()
            self._step = self._value
        return True

    def _value(self) -> bool:
        end = self._expression.end(self._text)
        if end < 0:
            if len(self._text) <= MAX_HELD:
                return False
            end = len(self._text)  # too long: a string
        self._message.add_arguments(_argument_json(self._take(end)))
        if self._text[:1] == ",":
            self._take(1)
        self._step = self._keyword
        return True

    def _separator(self) -> bool:
        """After a call: another, or the end of the list."""
        self._take_space()
        text = self._text
        if not text or self._end.may_begin(text):
            return False
        end = self._end.leading(text)
        marked = bool(self._shape.start)
        self._take(len(end) or (1 if text[0] in ",]" else 0))
        if end:
            self._step = self._outside
        elif text[0] == ",":
            self._step = self._separator if marked else self._call
        elif not marked or text[0] != "]":
            is_name = marked and (text[0].isalpha() or text[0] == "_")
            self._step = self._call if is_name else self._outside
        return True

    def _accepts(self, name: str) -> bool:
        return self._shape.start != "" or name in self._tool_names

    def _begin(self) -> None:
        """Begin the call, now that it has the form of one."""
        if self._name:
            self._message.begin_call(self._name)
            self._name = ""
            self._take_aside()

    def _end_call(self) -> None:
        self._message.add_arguments("}" if self._arguments else "{}")
        self._message.end_call()

    def _incomplete(self, beginning: re.Pattern[str]) -> bool:
        """Whether more text may make the beginning of something out of all text so far."""
        text = self._text
        return len(text) <= _MAX_NAME and beginning.fullmatch(text) is not None


def _argument_json(text: str) -> str:
    """Return an argument as JSON; one in quotes that is no literal is the text between these."""
    value, text = value_json(text), text.strip()
    quoted = len(text) > 1 and text[0] in _IN_STRING and text[0] == text[-1]
    return json_text(text[1:-1]) if quoted and value == json_text(text) else value


class _Expression:
    """Finds the end of an argument: a comma or a bracket that belongs to the call."""

    __slots__ = ("_at", "_depth", "_quote")

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quote = ""

    def end(self, text: str) -> int:
        """The length of the argument at the beginning of ``text``, -1 if it goes on.

        ``text`` may have grown since the last call. O(new characters).
        """
        while self._at < len(text):
            pattern = _IN_STRING[self._quote] if self._quote else _STRUCTURE
            mark = pattern.search(text, self._at)
            if mark is None:
                self._at = len(text)
                return -1
            if self._quote and mark[0] == self._quote and mark.end() == len(text):
                self._at = mark.start()  # the next character decides
                return -1
            self._at = mark.end()
            if self._quote:
                self._in_string(mark[0], text)
            elif mark[0] in "\"'":
                self._quote = mark[0]
            elif mark[0] in "([{":
                self._depth += 1
            elif not self._depth:
                return mark.start()
            elif mark[0] != ",":
                self._depth -= 1
        return -1

    def _in_string(self, char: str, text: str) -> None:
        if char == "\\":
            # The escaped character may be still to come: the search begins behind it.
            self._at += 1
        elif not text[self._at].isalnum():  # else an apostrophe: templates do not escape it
            self._quote = ""
