"""The tool calls of MiniMax M3: an element for each argument, and for each value inside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from dynamo.frontend.formats.message import AnswerMessage, CallSteps
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.scan import (
    MAX_HELD,
    Markers,
    attribute_value,
    begins_value,
    escaped,
    is_text,
    json_text,
    kinds_of,
    text_or_value_json,
    value_json,
)

_NS = "]<]minimax[>["
_CALL, _END_CALL = f"{_NS}<tool_call>", f"{_NS}</tool_call>"
_INVOKE, _END_INVOKE = f"{_NS}<invoke", f"{_NS}</invoke>"
_MAX_NAME = 256
_MAX_TAG = len(_NS) + _MAX_NAME
_NAME = re.compile(r"\s*name\s*=")
_TAG = re.compile(re.escape(_NS) + r"<(/?)([^<>/\s]+)>")
_ITEM = "item"


class ElementCallShape(NamedTuple):
    """The markers of MiniMax M3: the token before each tag, and the tags that are tokens."""

    every_marker: tuple[str, ...] = (_NS, "<tool_call>", "</tool_call>")
    begins: tuple[str, ...] = (_NS,)

    def parser(self, message: AnswerMessage, tools: RequestTools) -> ElementCallParser:
        """Return a parser of one answer."""
        return ElementCallParser(message, tools.schemas)


class _Element(NamedTuple):
    """An open element. ``closes`` is what its JSON ends with: "}" or "]"."""

    schema: Any
    closes: str


class ElementCallParser(CallSteps):
    """``<tool_call><invoke name="f"><city>Paris</city></invoke></tool_call>``, each tag behind a
    token that marks it.

    ``schemas`` maps the name of a tool to the JSON schemas of its parameters. They decide whether a
    value is a text, which is passed on as it arrives, or a JSON value. Elements inside a value make
    it an object, or an array if they are called ``item``.
    """

    __slots__ = (
        "_first", "_in_section", "_kinds", "_open", "_schema", "_schemas", "_starts", "_tag",
    )  # fmt: skip

    def __init__(self, message: AnswerMessage, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(self._outside, message)
        self._schemas = schemas
        self._starts = Markers(_CALL, _INVOKE)
        self._in_section = Markers(_INVOKE, _END_CALL)
        self._tag = Markers(_NS)
        self._open: list[_Element] = []
        self._schema: Any = None  # of the value that is read
        self._kinds: set[str] = set()
        self._first = True

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        self._read_to_end()
        if self._message.stopped and self._message.in_call:
            self._close_call()
        if self._step in (self._json_value, self._either_value):
            self._message.add_arguments(self._take_aside().strip())
        elif self._step in (self._outside, self._between, self._name):
            markup = self._step == self._between and self._in_section.may_begin(self._text)
            if self._aside or not markup:
                self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _close_call(self) -> None:
        """Close what the model has left open."""
        if self._step in (self._json_value, self._either_value):
            self._end_json()
        elif self._step == self._text_value:
            self._message.add_arguments('"')
        elif self._step == self._value:
            self._message.add_arguments('""')
        self._leave("tool_call")
        self._text = ""

    def _outside(self) -> bool:
        """Content up to a call."""
        marker = self._content(self._starts)
        if marker:
            self._step = self._between if marker == _CALL else self._name
        return bool(marker)

    def _between(self) -> bool:
        """In a section of calls, between them."""
        marker = self._next_marker(self._in_section, _END_CALL)
        if marker is None:
            return False
        self._step = self._name if marker == _INVOKE else self._outside
        return True

    def _name(self) -> bool:
        """After ``<invoke``."""
        end = self._text.find(">")
        if end < 0 and len(self._text) <= _MAX_NAME:
            return False
        tag = self._text[:end] if 0 <= end <= _MAX_NAME else ""
        prefix = _NAME.match(tag)
        value = None if prefix is None else attribute_value(tag[prefix.end() :])
        if value is None:
            self._step = self._outside
            return True
        self._take(end + 1)
        self._take_aside()
        self._message.begin_call(value[0])
        self._enter({"properties": self._schemas.get(value[0], {})}, "}")
        return True

    def _child(self) -> bool:
        """In an object or an array, between elements."""
        count, marker = self._tag.find(self._text)
        self._take(count)  # stray text, of which arguments have none
        if not marker:
            return False
        tag = _TAG.match(self._text)
        if tag is None:
            end = self._text.find(">", len(_NS))
            if end < 0 and len(self._text) <= len(_NS) + _MAX_NAME:
                return False
            # Skip what is no tag; without an end, only the token that marks it.
            self._take(end + 1 or len(_NS))
            return True
        self._take(tag.end())
        if tag[1]:
            self._leave(tag[2])
        else:
            self._begin_value(tag[2])
        return True

    def _begin_value(self, name: str) -> None:
        parent = self._open[-1]
        separator = "" if self._first else ", "
        key = "" if parent.closes == "]" else f"{json_text(name)}: "
        self._message.add_arguments(separator + key)
        self._schema = _child_schema(parent, name)
        self._step = self._value

    def _value(self) -> bool:
        """After the tag of a value: find out whether it holds elements, a text or JSON."""
        self._put_space_aside()
        text = self._text
        tag = f"{_NS}<"
        if tag.startswith(text):
            return False
        if text.startswith(tag):
            if ">" not in text[len(tag) :] and len(text) <= len(tag) + _MAX_NAME:
                return False
            # An element inside the value: the space before it is no text.
            if text[len(tag)] != "/":
                self._take_aside()
                kinds = kinds_of(self._schema)
                listed = text.startswith(f"{tag}{_ITEM}>") and ("array" in kinds or not kinds)
                self._enter(self._schema, "]" if listed else "}")
                return True
        self._kinds = kinds_of(self._schema)
        if is_text(self._schema):
            self._begin_text()
        elif "string" in self._kinds:
            self._step = self._either_value
        else:
            self._step = self._json_value
        return True

    def _begin_text(self) -> None:
        """The value, of which the beginning was put aside, is a text."""
        self._message.add_arguments('"' + escaped(self._take_aside()))
        self._step = self._text_value

    def _either_value(self) -> bool:
        """At the beginning of a value that may be a text: find out whether it can be another."""
        count, marker = self._tag.find(self._text)
        self._put_aside(count)
        is_json = bool(marker) or begins_value("".join(self._aside), self._kinds)
        if is_json:
            self._step = self._json_value
        elif is_json is not None:
            self._begin_text()
        return is_json is not None

    def _text_value(self) -> bool:
        count, marker = self._tag.find(self._text)
        ends = self._ends_value(count) if marker else None
        text = self._take(count + (ends is False))
        missing = ends and not self._text.startswith(f"{_NS}</")  # the tag of its end
        if text.endswith("\n") and (missing or not ends):  # dropped if another value follows
            text = text[:-1]
            self._text = self._text if missing else "\n" + self._text
        self._message.add_arguments(escaped(text))
        if ends:
            self._message.add_arguments('"')
            self._step = self._end_value
        return ends is not None

    def _ends_value(self, start: int) -> bool | None:
        """Whether the token at ``start`` begins a tag that ends the value.

        A closing tag does if another tag follows, or nothing: the value may contain one. None: more
        text decides.
        """
        tag = _TAG.match(self._text, start, start + _MAX_TAG)
        if tag is None:
            more = len(self._text) < start + _MAX_TAG and ">" not in self._text[start + len(_NS) :]
            return (True if self._final else None) if more else False
        if not tag[1] or tag[2] == "tool_call":
            return True
        return self._is_followed(tag.end(), _MAX_NAME, self._tag)

    def _json_value(self) -> bool:
        count, marker = self._tag.find(self._text)
        ends = self._ends_value(count) if marker else None
        self._put_aside(count + (ends is False))
        if ends or self._aside_size > MAX_HELD:
            self._end_json()
            self._step = self._end_value
            return True
        return ends is not None

    def _end_json(self) -> None:
        text = self._take_aside()
        kinds = kinds_of(self._schema)
        if "string" in kinds:
            self._message.add_arguments(text_or_value_json(text, self._schema))
        # An array or an object without elements has no text either.
        elif not text.strip() and not kinds.isdisjoint(("array", "object")):
            self._message.add_arguments("[]" if "array" in kinds else "{}")
        else:
            self._message.add_arguments(value_json(text))

    def _end_value(self) -> bool:
        """After a value without elements: drop its end."""
        tag = _TAG.match(self._text)
        if tag is None and len(self._text) <= _MAX_TAG:
            return False
        self._first = False
        self._step = self._child
        if tag is not None and tag[1] and tag[2] not in ("invoke", "tool_call"):
            self._take(tag.end())
        return True

    def _enter(self, schema: Any, closes: str) -> None:
        self._open.append(_Element(schema, closes))
        self._first = True
        self._message.add_arguments("{" if closes == "}" else "[")
        self._step = self._child

    def _leave(self, name: str) -> None:
        """The end of the innermost object or array, or of the call: then of all."""
        count = len(self._open) if name in ("invoke", "tool_call") else 1
        for _ in range(count):
            self._message.add_arguments(self._open.pop().closes)
        self._first = False
        if not self._open:
            self._message.end_call()
            self._step = self._outside if name == "tool_call" else self._between


def _child_schema(parent: _Element, name: str) -> Any:
    """The JSON schema of the element ``name``, None if nothing states it."""
    schema = parent.schema if isinstance(parent.schema, dict) else {}
    if parent.closes == "]":
        return schema.get("items")
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None
