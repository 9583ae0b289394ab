"""The tool calls of Qwen3-Coder: a tag for the function and one for each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo.frontend.answer.parsers.literals import escaped, json_text, value_json
from dynamo.frontend.answer.parsers.message import AnswerMessage
from dynamo.frontend.answer.parsers.scan import MAX_HELD, Markers, TextSteps

__all__ = ["XmlCallParser"]

_CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_END_CALL, _END_FUNCTION, _END_PARAMETER = "</tool_call>", "</function>", "</parameter>"
_STARTS = Markers(_CALL, _FUNCTION)
_FUNCTION_START = Markers(_FUNCTION)
_CALL_END = Markers(_END_CALL)
_IN_FUNCTION = Markers(_PARAMETER, _END_FUNCTION, _END_CALL)
_VALUE_END = Markers(_END_PARAMETER)
_MAX_NAME = 256


class XmlCallParser(TextSteps):
    """``<tool_call><function=f><parameter=a>value</parameter></function></tool_call>``.

    ``schemas`` maps the name of a tool to the JSON schemas of its parameters. They decide whether a
    value is a text, which is passed on as it arrives, or a JSON value.
    """

    __slots__ = ("_message", "_opening", "_parameters", "_reads_text", "_schemas", "_types")

    def __init__(self, message: AnswerMessage, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(self._outside)
        self._message = message
        self._schemas = schemas
        self._types: Mapping[str, Any] = {}
        self._opening = ""  # markup that is content if no call follows
        self._parameters = 0
        self._reads_text = False

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        # What is held back of a text value is the beginning of its end.
        if self._step == self._json_value:
            self._message.add_arguments(self._text)
        elif self._step in (self._outside, self._tag, self._name):
            self._message.add_content(self._opening + self._text)
        self._message.finish()

    def _outside(self) -> bool:
        """Content up to a call."""
        if self._opening:
            self._message.add_content(self._opening)
            self._opening = ""
        count, marker = _STARTS.find(self._text)
        self._message.add_content(self._take(count))
        if marker:
            self._opening = self._take(len(marker))
            self._step = self._tag if marker == _CALL else self._name
        return bool(marker)

    def _tag(self) -> bool:
        """After ``<tool_call>``."""
        self._opening += self._take_space()
        if _FUNCTION_START.may_begin(self._text):
            return False
        found = _FUNCTION_START.leading(self._text)
        self._opening += self._take(len(found))
        self._step = self._name if found else self._outside
        return True

    def _name(self) -> bool:
        """After ``<function=``."""
        end = self._text.find(">")
        if end < 0 and len(self._text) <= _MAX_NAME:
            return False
        name = self._text[: max(0, end)].strip()
        if not name or end > _MAX_NAME:
            self._step = self._outside
            return True
        self._take(end + 1)
        self._opening = ""
        self._types = self._schemas.get(name, {})
        self._parameters = 0
        self._message.begin_call(name)
        self._step = self._function
        return True

    def _function(self) -> bool:
        """Between parameters."""
        self._take_space()
        if _IN_FUNCTION.may_begin(self._text):
            return False
        marker = _IN_FUNCTION.leading(self._text)
        if marker == _PARAMETER:
            self._take(len(marker))
            self._step = self._parameter
        elif marker:
            self._message.add_arguments("}" if self._parameters else "{}")
            self._take(len(marker) if marker == _END_FUNCTION else 0)
            self._step = self._after
        else:
            self._step = self._stray
        return True

    def _stray(self) -> bool:
        """Text between parameters, which belongs to none of them: content."""
        count, marker = _IN_FUNCTION.find(self._text)
        self._message.add_content(self._take(count))
        if marker:
            self._step = self._function
        return bool(marker)

    def _parameter(self) -> bool:
        """After ``<parameter=``."""
        end = self._text.find(">")
        if end < 0 and len(self._text) <= _MAX_NAME:
            return False
        if not 0 <= end <= _MAX_NAME:
            self._step = self._stray
            return True
        name = self._take(end + 1)[:-1].strip()
        self._reads_text = _is_text(self._types.get(name))
        quote = '"' if self._reads_text else ""
        separator = ", " if self._parameters else "{"
        self._message.add_arguments(f"{separator}{json_text(name)}: {quote}")
        self._parameters += 1
        self._step = self._value
        return True

    def _value(self) -> bool:
        """At the beginning of a value: drop the line break that the format puts there."""
        if not self._text:
            return False
        if self._text[0] == "\n":
            self._take(1)
        self._step = self._text_value if self._reads_text else self._json_value
        return True

    def _text_value(self) -> bool:
        count, marker = _VALUE_END.find(self._text)
        if not marker and self._text[:count].endswith("\n"):
            count -= 1  # dropped if the tag follows
        text = self._take(count)
        if marker:
            self._take(len(marker))
            self._step = self._function
            self._message.add_arguments(escaped(text.removesuffix("\n")) + '"')
        else:
            self._message.add_arguments(escaped(text))
        return bool(marker)

    def _json_value(self) -> bool:
        count, marker = _VALUE_END.find(self._text)
        if marker:
            self._message.add_arguments(value_json(self._take(count)))
            self._take(len(marker))
            self._step = self._function
        elif len(self._text) > MAX_HELD:
            self._message.add_arguments('"')
            self._step = self._text_value
        else:
            return False
        return True

    def _after(self) -> bool:
        """After ``</function>``."""
        self._message.add_content(self._take_space())
        if _CALL_END.may_begin(self._text):
            return False
        self._take(len(_CALL_END.leading(self._text)))
        self._step = self._outside
        return True


def _is_text(schema: Any) -> bool:
    """Whether a parameter takes text, as far as its schema says."""
    kinds = _kinds(schema)
    return not kinds or "string" in kinds


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {each for each in (kind if isinstance(kind, list) else [kind]) if each}
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            kinds |= _kinds(each)
    return kinds
