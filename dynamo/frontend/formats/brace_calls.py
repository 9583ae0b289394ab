"""Tool calls of Gemma: names without quotes, texts between tokens of their own."""

from __future__ import annotations

import re
from typing import NamedTuple

from dynamo.frontend.formats.message import AnswerMessage, CallSteps
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.scan import MAX_HELD, Markers, escaped, json_text, value_json

_MAX_NAME = 256
_NAME = re.compile(r"\s*call\s*:\s*([\w.:/-]+)\s*\{")
_NAME_BEGINS = re.compile(r"\s*(?:c(?:a(?:l(?:l(?:\s*(?::\s*(?:[\w.:/-]+\s*)?)?)?)?)?)?)?")
_CLOSES = {"{": "}", "[": "]"}


class BraceCallShape(NamedTuple):
    """The markers around a call, and the one on both sides of a text."""

    call: str
    end_call: str
    quote: str

    @property
    def every_marker(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        return tuple(self)

    @property
    def begins(self) -> tuple[str, ...]:
        """The marker that begins a call."""
        return (self.call,)

    def parser(self, message: AnswerMessage, tools: RequestTools) -> BraceCallParser:
        """Return a parser of one answer."""
        return BraceCallParser(message, self)


class BraceCallParser(CallSteps):
    """``<|tool_call>call:f{city:<|"|>Paris<|"|>,days:3}<tool_call|>``.

    Texts are passed on as they arrive, other values when they are complete. The marker at the end
    of a call closes what the model has left open.
    """

    __slots__ = (
        "_call_end", "_first", "_key_end", "_open", "_quote", "_shape", "_start", "_value",
    )  # fmt: skip

    def __init__(self, message: AnswerMessage, shape: BraceCallShape) -> None:
        super().__init__(self._outside, message)
        self._shape = shape
        self._start = Markers(shape.call)
        self._quote = Markers(shape.quote)
        self._call_end = Markers(shape.end_call)
        self._key_end = Markers(shape.quote, shape.end_call, ":", "}")
        self._value = Markers(shape.quote, shape.end_call, ",", "}", "]")
        self._open: list[str] = []
        self._first = True  # nothing in the innermost object or array yet

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        if self._message.stopped and self._open:
            self._close_call()
        if self._step == self._plain_value:
            self._message.add_arguments(self._take_aside().strip())
        elif self._step in (self._outside, self._name):
            self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _close_call(self) -> None:
        """Close what the model has left open."""
        if self._step == self._text_value:
            self._message.add_arguments('"')
        elif self._step == self._plain_value:
            self._message.add_arguments(value_json(self._take_aside()))
        elif self._step in (self._colon, self._any_value):
            self._message.add_arguments('""')
        self._end()
        self._text = ""

    def _outside(self) -> bool:
        """Content up to a call."""
        marker = self._content(self._start)
        if marker:
            self._step = self._name
        return bool(marker)

    def _name(self) -> bool:
        """After ``<|tool_call>``."""
        header = _NAME.match(self._text[:_MAX_NAME])
        if header is None:
            if len(self._text) <= _MAX_NAME and _NAME_BEGINS.fullmatch(self._text):
                return False
            self._step = self._outside
            return True
        self._take(header.end())
        self._take_aside()
        self._message.begin_call(header[1])
        self._enter("{")
        return True

    def _item(self) -> bool:
        """In an object or an array, before an item or its end."""
        self._text = self._text.lstrip(" \t\r\n,")
        if not self._text or self._value.may_begin(self._text):
            return False
        if self._value.leading(self._text) == self._shape.end_call:
            self._end()
        elif self._text[0] in "}]":
            self._take(1)
            self._leave()
        elif self._open[-1] == "{":
            self._step = self._key
        else:
            self._separate()
            self._step = self._any_value
        return True

    def _key(self) -> bool:
        """At the name of an argument."""
        quoted = self._text.startswith(self._shape.quote)
        start = len(self._shape.quote) if quoted else 0
        marks = self._quote if quoted else self._key_end
        count, marker = marks.find(self._text[start:])
        # With room for a whole marker, a name that is too long is cut at the same place always.
        if not marker and len(self._text) - start < _MAX_NAME + len(self._shape.end_call):
            return False
        key = self._take(start + min(count, _MAX_NAME))[start:]
        if marker in ("}", self._shape.end_call, "") or count > _MAX_NAME:
            self._step = self._item  # a key without a value, or a part of one that is too long
            return True
        self._take(len(marker))
        self._separate()
        self._message.add_arguments(f"{json_text(key.strip())}: ")
        self._step = self._colon if marker == self._shape.quote else self._any_value
        return True

    def _colon(self) -> bool:
        """After a name in quotes."""
        self._take_space()
        if not self._text:
            return False
        self._take(1 if self._text[0] == ":" else 0)
        self._step = self._any_value
        return True

    def _any_value(self) -> bool:
        """Before a value."""
        self._take_space()
        if not self._text or self._quote.may_begin(self._text):
            return False
        if self._text.startswith(self._shape.quote):
            self._take(len(self._shape.quote))
            self._message.add_arguments('"')
            self._step = self._text_value
        elif self._text[0] in _CLOSES:
            self._enter(self._take(1))
        else:
            self._step = self._plain_value
        return True

    def _text_value(self) -> bool:
        count, marker = self._quote.find(self._text)
        self._message.add_arguments(escaped(self._take(count)))
        if marker:
            self._take(len(marker))
            self._message.add_arguments('"')
            self._step = self._item
        return bool(marker)

    def _plain_value(self) -> bool:
        """A number, true, false, null; anything else is a text."""
        count, marker = self._value.find(self._text)
        self._put_aside(count)
        if not marker and self._aside_size <= MAX_HELD:
            return False
        self._message.add_arguments(value_json(self._take_aside()))
        self._step = self._item
        return True

    def _enter(self, bracket: str) -> None:
        self._open.append(bracket)
        self._first = True
        self._message.add_arguments(bracket)
        self._step = self._item

    def _leave(self) -> None:
        self._message.add_arguments(_CLOSES[self._open.pop()])
        self._first = False
        if not self._open:
            self._message.end_call()
        self._step = self._item if self._open else self._after

    def _separate(self) -> None:
        if not self._first:
            self._message.add_arguments(", ")
        self._first = False

    def _end(self) -> None:
        """Close what is open."""
        while self._open:
            self._leave()
        self._step = self._after

    def _after(self) -> bool:
        """After the arguments: drop the marker of the end."""
        self._put_space_aside()
        if self._call_end.may_begin(self._text):
            return False
        if self._call_end.leading(self._text):
            self._take(len(self._shape.end_call))
            self._take_aside()
        else:
            self._message.add_content(self._take_aside())
        self._step = self._outside
        return True
