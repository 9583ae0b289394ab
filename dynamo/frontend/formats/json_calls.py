"""Tool calls as JSON objects: hermes, llama3_json, mistral, and the array of a forced choice."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from dynamo.frontend.answer.parsers.json_object import JsonObjectCall
from dynamo.frontend.formats.message import AnswerMessage, CallSteps
from dynamo.frontend.formats.scan import SPACE, JsonSpan, Markers

__all__ = ["JsonCallParser", "JsonCallShape", "MistralCallParser"]

_BEFORE_CALL = SPACE + "["
_AFTER_CALL = ",;]"
_MAX_HEADER = 512
_HEADER = re.compile(r"([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


class JsonCallShape(NamedTuple):
    """What is around the objects: ``start`` and ``end`` are markers. Without ``end`` the calls end
    at the first text that is neither an object nor a separator. ``bare``: an answer may begin with
    an object, without a marker; it is a call if it names one of the request's tools."""

    start: tuple[str, ...]
    end: str = ""
    bare: bool = False


class JsonCallParser(CallSteps):
    """Content, then markers around one object, several, or an array of objects.

    ``known`` are the names of the request's tools.
    """

    __slots__ = ("_after_call", "_call", "_end", "_known", "_start", "_without_marker")

    def __init__(
        self, message: AnswerMessage, shape: JsonCallShape, known: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(self._beginning if shape.bare else self._outside, message)
        self._known = known
        self._start = Markers(*shape.start)
        self._end = Markers(*([shape.end] if shape.end else []))
        self._without_marker = False
        self._after_call = False
        self._call: JsonObjectCall | None = None

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        call = self._call
        if call is not None:
            call.finish()
            self._call_ended(call)
        if not (self._after_call and self._end.may_begin(self._text)):
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
            if not self._after_call:
                self._message.add_content(opening)
            self._put_aside(len(start))
            self._open()
        elif self._end.leading(text):
            self._close()
        elif text[0] == "{":
            self._call = JsonObjectCall(self._message, self._accepts)
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
            self._message.add_content(self._take_space())
        elif text[0] in _AFTER_CALL:
            self._take(1)
        else:
            return False
        return True

    def _close(self) -> None:
        """At the end marker; without a call the markers are content."""
        self._put_aside(len(self._end.texts[0]))
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
        return not self._without_marker or name in self._known


class MistralCallParser(JsonCallParser):
    """``[TOOL_CALLS]`` before an array of objects, or before ``name[ARGS]{…}``."""

    __slots__ = ("_span",)

    def __init__(
        self, message: AnswerMessage, shape: JsonCallShape, known: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(message, shape, known)
        self._span = JsonSpan()

    def _other(self) -> Callable[[], bool]:
        return (
            self._outside if self._after_call or "]" in "".join(self._aside)[:-1] else self._header
        )

    def _header(self) -> bool:
        """The name, up to the arguments."""
        brace = self._text.find("{")
        if brace < 0 and len(self._text) <= _MAX_HEADER:
            return False
        found = _HEADER.fullmatch(self._text, 0, max(0, brace))
        if found is None or brace > _MAX_HEADER:
            self._step = self._outside
            return True
        self._take(brace)
        self._take_aside()
        self._message.begin_call(found[1])
        self._span = JsonSpan()
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        if not self._text:
            return False
        end = self._span.end(self._text)
        self._message.add_arguments(self._take(len(self._text) if end < 0 else end))
        if end < 0:
            return False
        self._after_call = True
        self._step = self._between
        return True
