"""Tool calls as JSON objects (Hermes, Llama 3, Mistral, a forced choice), as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from dynamo.frontend.formats.message import AnswerMessage, CallSteps
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.scan import MAX_HELD, SPACE, JsonSpan, Markers, TextSteps, well_formed

_BEFORE_CALL = SPACE + "["
# The comma and the end of a list; the semicolon that Llama 3 writes between calls.
_AFTER_CALL = ",;]"
_MAX_HEADER = 512
# Possessive quantifiers: two runs of spaces side by side would take quadratic time to fail.
_HEADER = re.compile(r"([\w.\-]+)\s*+(?:\[CALL_ID\]\s*+\w+\s*+)?(?:\[ARGS\])?\s*+", re.ASCII)
_SCALAR = re.compile(r"[^\s,}\]<\"{\[]+")
_SEPARATORS = " \t\r\n,"
_WHOLE = re.compile(r'"(?:[^"\\]+|\\[^u]|\\u[0-9a-fA-F]{4})*')
"""A JSON string up to the first escape that is not complete."""


class JsonCallShape(NamedTuple):
    """The markers around JSON objects, and the members of an object that make a call."""

    start: tuple[str, ...]
    #: Without one the calls end at the first text that is neither an object nor a separator.
    end: tuple[str, ...] = ()
    #: An answer may begin with an object, without a marker, which names one of the request's tools.
    bare: bool = False
    #: Each call names one of the request's tools; other objects are content.
    listed: bool = False
    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    #: An object is ``{"f": {…}}``, without the members above.
    keyed: bool = False
    #: The name may precede the object, as ``f[ARGS]{…}``.
    header: bool = False
    #: Special tokens that the markers contain.
    tokens: tuple[str, ...] = ()

    @property
    def every_marker(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        return (*self.start, *self.end, *self.tokens)

    @property
    def begins(self) -> tuple[str, ...]:
        """The markers that begin calls, unless they are words or need not be there."""
        return () if self.bare else tuple(text for text in self.start if not text.isalpha())

    def parser(self, message: AnswerMessage, tools: RequestTools) -> JsonCallParser:
        """Return a parser of one answer."""
        kind = HeaderCallParser if self.header else JsonCallParser
        return kind(message, self, tools.names)


class JsonObjectCall(TextSteps):
    """``{"name": "f", "arguments": {…}}``, in any order, with other members ignored.

    Arguments are passed on as the model wrote them; those in a JSON string are decoded first.
    ``rest`` is the text after the object, None while it is open. ``rejected`` means that it is no
    call: no name, or none that ``accepts`` takes; ``rest`` is then all of its text.
    """

    __slots__ = (
        "_accepts", "_argued", "_arguments", "_key", "_message", "_named", "_parts", "_raw",
        "_raw_size", "_shape", "_span", "_streams", "rejected", "rest",
    )  # fmt: skip

    def __init__(
        self, message: AnswerMessage, shape: JsonCallShape, accepts: Callable[[str], bool]
    ) -> None:
        super().__init__(self._open)
        self._message = message
        self._shape = shape
        self._accepts = accepts
        self._raw: list[str] = []  # all text, as long as it may turn out to be no call
        self._raw_size = 0
        self._span = JsonSpan()
        self._parts: list[str] = []  # of the key or value being read
        self._key: str | None = None  # None while a key is read
        self._streams = False  # the value being read is passed on at once
        self._arguments = ""  # those that came before the name
        self._named = False
        self._argued = False
        self.rejected = False
        self.rest: str | None = None

    def push(self, text: str) -> None:
        """Add text; the first begins with the brace."""
        if not self._named:
            self._raw.append(text)
            self._raw_size += len(text)
        super().push(text)
        if self._raw_size > MAX_HELD and not self._named:
            self._close()

    def finish(self) -> None:
        """Nothing follows: a call with a name is kept with the arguments so far."""
        if self._named and not self._streams and self._is_arguments() and self._parts:
            self._message.add_json(_unquoted_part("".join(self._parts)))
        # A call that is cut before its arguments gets no "{}": the client must not run it.
        self._argued = True
        self._close(self._message.stopped)

    def _open(self) -> bool:
        self._take(1)
        self._step = self._member
        return True

    def _member(self) -> bool:
        self._text = self._text.lstrip(_SEPARATORS)
        if not self._text:
            return False
        if self._text[0] == '"':
            self._key = None
            return self._begin_span()
        if self._text[0] == "}":
            self._take(1)
        return self._close()

    def _colon(self) -> bool:
        self._take_space()
        if not self._text:
            return False
        if self._take(1) != ":":
            return self._close()
        self._step = self._value
        return True

    def _value(self) -> bool:
        self._take_space()
        if not self._text:
            return False
        if self._shape.keyed and not self._named and not self._name(self._key):
            return False
        if self._text[0] in '"{[':
            return self._begin_span()
        if _SCALAR.match(self._text) is None:
            return self._close()
        self._step = self._scalar
        return True

    def _scalar(self) -> bool:
        """In a number, a name, or other text without quotes."""
        scalar = _SCALAR.match(self._text)
        self._put_aside(0 if scalar is None else scalar.end())
        if not self._text:
            return False
        return self._complete(self._take_aside())

    def _begin_span(self) -> bool:
        self._span = JsonSpan()
        self._parts = []
        self._streams = self._named and self._takes_arguments() and self._text[0] != '"'
        self._argued = self._argued or self._streams
        self._step = self._span_step
        return True

    def _span_step(self) -> bool:
        end = self._span.end(self._text)
        piece = self._take(len(self._text) if end < 0 else end)
        if self._streams:
            self._message.add_json(piece)
        else:
            self._parts.append(piece)
        if end < 0:
            return False
        return self._complete("".join(self._parts))

    def _complete(self, text: str) -> bool:
        """A key or a value is complete; a value that was passed on already is empty."""
        self._parts = []
        if self._key is None:
            self._key = _unquoted(text)
            self._step = self._colon
            return self._key is not None or self._close()
        self._step = self._member
        if self._key in self._shape.name and not self._named:
            return self._name(_unquoted(text))
        if text and self._takes_arguments():
            self._argued = True
            unquoted = _unquoted(text)
            self._arguments = text if unquoted is None else unquoted
            # Models write null, or an empty string, where there are no arguments.
            if text == "null" or not self._arguments.strip():
                self._arguments = "{}"
            if self._named:
                self._message.add_json(self._arguments)
        return True

    def _name(self, name: str | None) -> bool:
        if not name or not self._accepts(name):
            return self._close()
        self._named = True
        self._raw.clear()
        self._message.begin_call(name)
        self._message.add_json(self._arguments)
        return True

    def _takes_arguments(self) -> bool:
        return not self._argued and self._is_arguments()

    def _is_arguments(self) -> bool:
        return self._shape.keyed or self._key in self._shape.arguments

    def _close(self, whole: bool = True) -> bool:
        if self._named:
            if not self._argued:
                self._message.add_arguments("{}")
            if whole and not self._span.open:
                self._message.end_call()
            self.rest = self._text
        else:
            self.rejected = True
            self.rest = "".join(self._raw)
        self._text = ""
        self._step = _never
        return False


def _unquoted(text: str) -> str | None:
    """The value of a JSON string, None for any other text."""
    value = _loaded(text)
    return well_formed(value) if isinstance(value, str) else None


def _unquoted_part(text: str) -> str:
    """The value of a JSON string that is cut, up to the last character that is whole."""
    whole = _WHOLE.match(text)
    value = None if whole is None else _loaded(whole[0] + '"')
    if not isinstance(value, str):
        return ""
    # A value that ends with the first half of a character was cut before the other.
    return well_formed(value[:-1] if "\ud800" <= value[-1:] <= "\udbff" else value)


def _loaded(text: str) -> object:
    """The value of a JSON text, None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _never() -> bool:
    return False


class JsonCallParser(CallSteps):
    """Content, then markers around one object, several, or an array of objects.

    ``tool_names`` are those of the request.
    """

    __slots__ = (
        "_after_call", "_call", "_end", "_shape", "_start", "_tool_names", "_without_marker",
    )  # fmt: skip

    def __init__(
        self, message: AnswerMessage, shape: JsonCallShape, tool_names: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(self._beginning if shape.bare else self._outside, message)
        self._shape = shape
        self._tool_names = tool_names
        self._start = Markers(*shape.start)
        self._end = Markers(*shape.end)
        self._without_marker = False
        self._after_call = False
        self._call: JsonObjectCall | None = None

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        if self._call is not None:
            self._call.finish()
            self._call_ended(self._call)
        # The beginning of the end marker behind a call is dropped, as the whole one is.
        markup = self._end.may_begin(self._text) or self._text in self._end.texts
        if not (self._after_call and markup):
            self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _beginning(self) -> bool:
        self._put_space_aside()
        if not self._text:
            return False
        self._without_marker = self._text[0] in "{["
        self._step = self._between if self._without_marker else self._outside
        return True

    def _outside(self) -> bool:
        """Content up to a start marker."""
        self._after_call = False
        marker = self._content(self._start)
        if marker:
            self._open()
        return bool(marker)

    def _open(self) -> None:
        self._without_marker = self._after_call = False
        self._step = self._between

    def _between(self) -> bool:
        """After a marker or a call: another call, a marker, or no call at all."""
        text = self._text
        if not text or self._start.may_begin(text) or self._end.may_begin(text):
            return False
        start = self._start.leading(text)
        if start:
            opening = self._take_aside()
            # A marker directly behind another: no call followed that one.
            if not self._after_call:
                self._message.add_content(opening)
            self._put_aside(len(start))
            self._open()
        elif self._end.leading(text):
            self._close(self._end.leading(text))
        elif text[0] == "{":
            self._call = JsonObjectCall(self._message, self._shape, self._accepts)
            self._step = self._inside
        elif not self._separator():
            self._step = self._other()
        return True

    def _separator(self) -> bool:
        """Consume what may precede a call; it is content only if none comes."""
        text = self._text
        if not self._after_call:
            count = len(text) - len(text.lstrip(_BEFORE_CALL))
            self._put_aside(count)
            return count > 0
        if text[0] in SPACE:
            self._put_space_aside()
        elif text[0] in _AFTER_CALL:
            self._take(1)
        else:
            return False
        return True

    def _close(self, marker: str) -> None:
        """At the end ``marker``; without a call the markers are content."""
        self._put_aside(len(marker))
        if self._after_call:
            self._take_aside()
        self._step = self._outside

    def _other(self) -> Callable[[], bool]:
        """The step after text that is neither call, marker nor separator."""
        return self._outside

    def _inside(self) -> bool:
        call = self._call
        assert call is not None
        call.push(self._take(len(self._text)))
        if call.rest is None:
            return False
        self._call_ended(call)
        return True

    def _call_ended(self, call: JsonObjectCall) -> None:
        self._call = None
        self._text = call.rest or ""
        opening = self._take_aside()
        if call.rejected:
            self._message.add_content(opening)
        self._after_call = not call.rejected
        self._step = self._outside if call.rejected else self._between

    def _accepts(self, name: str) -> bool:
        checks = self._without_marker or self._shape.listed
        return not checks or name in self._tool_names


class HeaderCallParser(JsonCallParser):
    """``[TOOL_CALLS]`` before an array of objects, or before ``name[ARGS]{…}``."""

    __slots__ = ("_span",)

    def __init__(
        self, message: AnswerMessage, shape: JsonCallShape, tool_names: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(message, shape, tool_names)
        self._span = JsonSpan()

    def _other(self) -> Callable[[], bool]:
        # A name follows the marker at once: then the last character aside is the marker's bracket.
        if self._after_call or "]" in "".join(self._aside)[:-1]:
            return self._outside
        return self._header

    def _header(self) -> bool:
        """The name, up to the arguments."""
        brace = self._text.find("{", 0, _MAX_HEADER + 2)
        if brace < 0 and len(self._text) <= _MAX_HEADER:
            return False
        header = _HEADER.fullmatch(self._text, 0, max(0, brace))
        if header is None or brace > _MAX_HEADER:
            self._step = self._outside
            return True
        self._take(brace)
        self._take_aside()
        self._message.begin_call(header[1])
        self._span = JsonSpan()
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        end = self._span.end(self._text)
        self._message.add_json(self._take(len(self._text) if end < 0 else end))
        if end < 0:
            return False
        if not self._span.open:
            self._message.end_call()
        self._after_call = True
        self._step = self._between
        return True
