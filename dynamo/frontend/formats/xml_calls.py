"""Tool calls with a tag for each parameter, as of Qwen3-Coder, MiniMax M2 and GLM 4.5."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
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

_MAX_NAME = 256
_MAX_GAP = 256
"""White space that may be between the end of a value and the next tag."""
_QUOTES = "\"'"
_BARE_NAME = re.compile(r"[\w./:-]+")
_TYPED = re.compile(r"""\b(?:string\s*=\s*["']?(true|false)\b|type\s*=\s*["']?(\w+))""")
_TEXT_TYPES = ("true", "string")


class XmlCallShape(NamedTuple):
    """The tags around a call, its function and each parameter, each as (opens, closes)."""

    #: "" where a function has no tag around it.
    call: tuple[str, str]
    #: A name follows, in quotes or not, up to ``tag_ends``. Where it opens with "", the name
    #: follows ``call`` at once, up to the first parameter or the end of the call.
    function: tuple[str, str]
    #: A name follows, in quotes or not, up to ``name_ends``.
    parameter: tuple[str, str]
    name_ends: str = ">"
    #: A tag between the name of a parameter and its value.
    value_opens: str = ""
    #: Line breaks around a value are dropped.
    trims: bool = True
    tag_ends: str = ">"
    #: Another end of a value.
    value_closes: str = ""
    #: ``string="true"`` or ``type="string"`` behind a name says whether a value is a text.
    typed: bool = False
    #: The function ``f`` is called ``f.f``.
    doubled: bool = False
    #: Frames that may stand behind a call.
    follows: tuple[str, ...] = ()
    #: Tags before a value around its type, which the schema has, too.
    kind: tuple[str, str] = ("", "")
    #: Special tokens that the tags contain.
    tokens: tuple[str, ...] = ()

    @property
    def every_marker(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        tags = [*self.call, *self.function, *self.parameter, *self.kind, *self.tokens]
        tags += self.name_ends, self.tag_ends, self.value_opens
        return tuple(tag for tag in dict.fromkeys(tags) if len(tag) > 1)

    @property
    def begins(self) -> tuple[str, ...]:
        """The marker that begins a call."""
        return (self.call[0] or self.function[0],)

    def parser(self, message: AnswerMessage, tools: RequestTools) -> XmlCallParser:
        """Return a parser of one answer."""
        return XmlCallParser(message, tools.schemas, self)


class _Tags:
    """The tags of one shape, as what is searched for in each step.

    ``after`` are the tags that may follow each tag that ends a value.
    """

    __slots__ = (
        "after", "bare_name_end", "begins", "call_end", "ends", "function", "in_function", "kind",
        "name_end", "starts", "value", "value_end",
    )  # fmt: skip

    def __init__(self, shape: XmlCallShape) -> None:
        functions = tuple(filter(None, (shape.function[0],)))
        # Both are one tag where a function has none of its own.
        closes = tuple(filter(None, dict.fromkeys((shape.function[1], shape.call[1]))))
        opens = shape.parameter[0]
        ends = tuple(filter(None, (shape.parameter[1], shape.value_closes)))
        value_opens = tuple(filter(None, (shape.value_opens,)))
        self.begins = (*filter(None, (shape.call[0],)), *functions)
        self.ends = ends
        self.starts = Markers(*self.begins)
        self.function = Markers(*functions)
        call_end = (*filter(None, (shape.call[1],)), *shape.follows)
        self.call_end = Markers(*call_end)
        self.bare_name_end = Markers(opens, *closes)
        self.in_function = Markers(opens, *ends, *closes, *self.begins, *shape.follows)
        self.name_end = Markers(shape.name_ends, *value_opens, opens, *ends, *closes)
        self.kind = Markers(*filter(None, shape.kind[:1]))
        self.value = Markers(*value_opens)
        self.value_end = Markers(*ends, opens, *closes)
        between = Markers(*call_end, *self.begins)
        self.after = {
            **dict.fromkeys(ends, Markers(opens, *closes, *self.begins, *shape.follows)),
            shape.function[1]: between,
            shape.call[1]: Markers(*self.begins, *shape.follows),
        }


_tags = functools.cache(_Tags)


class XmlCallParser(CallSteps):
    """``<tool_call><function=f><parameter=a>value</parameter></function></tool_call>``, and alike.

    ``schemas`` maps the name of a tool to the JSON schemas of its parameters. They decide whether a
    value is a text, which is passed on as it arrives, or a JSON value. Where a schema allows both,
    the value decides, as early as it can.
    """

    __slots__ = (
        "_kinds", "_names", "_parameters", "_reads_text", "_schema", "_schemas", "_shape",
        "_strays", "_tags", "_types",
    )  # fmt: skip

    def __init__(
        self,
        message: AnswerMessage,
        schemas: Mapping[str, Mapping[str, Any]],
        shape: XmlCallShape,
    ) -> None:
        super().__init__(self._outside, message)
        self._shape = shape
        self._tags = _tags(shape)
        self._schemas = schemas
        self._types: Mapping[str, Any] = {}
        self._parameters = 0
        self._names: set[str] = set()  # of the parameters so far
        self._reads_text = False
        self._kinds: set[str] = set()
        self._schema: Any = None  # of the value, while it may be a text or another value
        self._strays: list[str] = []

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        self._read_to_end()
        if self._message.stopped and self._message.in_call:
            self._close_call()
        self._end_stray()
        # What is held back of a text value is the beginning of its end.
        if self._step in (self._json_value, self._either_value):
            self._message.add_arguments(self._take_aside().strip())
        elif self._step in (self._outside, self._tag, self._name, self._bare_name):
            self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _close_call(self) -> None:
        """Close what the model has left open."""
        if self._step in (self._json_value, self._either_value):
            self._end_json(self._take_aside())
        elif self._step == self._text_value:
            self._message.add_arguments('"')
        elif self._step in (self._before_value, self._value):
            # The first quote of a text was written with the name.
            self._message.add_arguments('"' if self._reads_text else '""')
        self._end_call()
        self._step = self._outside
        self._text = ""

    def _outside(self) -> bool:
        """Content up to a call."""
        marker = self._content(self._tags.starts)
        if marker:
            self._step = self._tag if marker == self._shape.call[0] else self._name
        return bool(marker)

    def _tag(self) -> bool:
        """After ``<tool_call>``."""
        self._put_space_aside()
        if not self._shape.function[0]:
            self._step = self._bare_name
            return True
        if self._tags.function.may_begin(self._text):
            return False
        marker = self._tags.function.leading(self._text)
        self._put_aside(len(marker))
        self._step = self._name if marker else self._outside
        return True

    def _name(self) -> bool:
        """After ``<function=``."""
        tag_ends = self._shape.tag_ends
        end = self._text.find(tag_ends)
        if end < 0 and len(self._text) < _MAX_NAME + len(tag_ends):
            return False
        tag = self._named(self._text[:end]) if 0 <= end <= _MAX_NAME else None
        if tag is None or not _may_be_name(tag[0], self._schemas):
            self._step = self._outside
            return True
        self._take(end + len(tag_ends))
        self._begin(tag[0])
        return True

    def _named(self, text: str) -> tuple[str, str] | None:
        """The name in a tag and the attributes behind it; None for a tag without a name."""
        if self._shape.function[0].endswith(("name=", "tool=")):
            return attribute_value(text)
        name = text.strip().strip(_QUOTES)
        return (name, "") if name else None

    def _bare_name(self) -> bool:
        """After ``<tool_call>``, where the name follows: up to the next tag."""
        self._put_space_aside()
        count, marker = self._tags.bare_name_end.find(self._text)
        name = self._text[:count].strip()
        plain = count <= _MAX_NAME and _BARE_NAME.fullmatch(name) is not None
        if not marker and (plain or not name):
            return False
        if not plain:
            self._step = self._outside
            return True
        self._take(count)
        self._begin(name)
        return True

    def _begin(self, name: str) -> None:
        self._take_aside()
        namespace, _, last = name.partition(".")
        if self._shape.doubled and namespace == last:
            name = last
        self._types = self._schemas.get(name, {})
        self._parameters = 0
        self._names = set()
        self._message.begin_call(name)
        self._step = self._function

    def _function(self) -> bool:
        """Between parameters."""
        self._take_space()
        if self._tags.in_function.may_begin(self._text):
            return False
        marker = self._tags.in_function.leading(self._text)
        if marker == self._shape.parameter[0]:
            self._take(len(marker))
            self._step = self._parameter
        elif marker in self._tags.ends:  # of a parameter without a name
            self._take(len(marker))
        elif marker in self._tags.begins:  # the end of this call is missing
            self._end_call()
            self._end_stray()
            self._step = self._outside
        elif marker:
            self._end_call()
            # The end of the call is left to the next step, which expects it behind the function.
            self._take(len(marker) if marker == self._shape.function[1] else 0)
            self._end_stray()
            self._step = self._after
        else:
            self._step = self._stray
        return True

    def _end_call(self) -> None:
        self._message.add_arguments("}" if self._parameters else "{}")
        self._message.end_call()

    def _stray(self) -> bool:
        """Text between parameters, which belongs to none of them: content behind the call."""
        count, marker = self._tags.in_function.find(self._text)
        self._strays.append(self._take(count))
        if marker:
            self._step = self._function
        return bool(marker)

    def _end_stray(self) -> None:
        self._message.add_content("".join(self._strays))
        self._strays.clear()

    def _parameter(self) -> bool:
        """After ``<parameter=``."""
        count, marker = self._tags.name_end.find(self._text)
        # With room for a whole tag, the longest name is read alike however the text is cut.
        if not marker and len(self._text) <= _MAX_NAME + len(self._shape.function[1]):
            return False
        tag = self._named(self._text[:count]) if count <= _MAX_NAME else None
        if (
            marker not in (self._shape.name_ends, self._shape.value_opens)
            or tag is None
            or not _may_be_name(tag[0], self._types)
        ):
            if marker == self._shape.name_ends:
                self._take(count + len(marker))
            self._step = self._stray
            return True
        self._take(count + (len(marker) if marker == self._shape.name_ends else 0))
        name, attributes = tag
        self._names.add(name)
        typed = _TYPED.search(attributes) if self._shape.typed else None
        schema = None if typed is not None else self._types.get(name)
        self._reads_text = is_text(schema)
        if typed is not None:
            self._reads_text = typed[typed.lastindex or 0] in _TEXT_TYPES
        self._kinds = kinds_of(schema)
        self._schema = schema if "string" in self._kinds and not self._reads_text else None
        quote = '"' if self._reads_text else ""
        separator = ", " if self._parameters else "{"
        self._message.add_arguments(f"{separator}{json_text(name)}: {quote}")
        self._parameters += 1
        self._step = self._before_value if self._shape.value_opens else self._value
        return True

    def _before_value(self) -> bool:
        """Between the name of a parameter and its value, where a tag separates them."""
        self._take_space()
        if self._tags.value.may_begin(self._text) or self._tags.kind.may_begin(self._text):
            return False
        if opens := self._tags.kind.leading(self._text):
            closes = self._shape.kind[1]
            end = self._text.find(closes, 0, _MAX_NAME + len(closes))
            if end < 0 and len(self._text) < _MAX_NAME + len(closes):
                return False
            self._take(len(opens) if end < 0 else end + len(closes))
            return True
        self._take(len(self._tags.value.leading(self._text)))
        self._step = self._value
        return True

    def _value(self) -> bool:
        """At the beginning of a value: drop the line break that the format puts there."""
        if not self._text:
            return False
        if self._text[0] == "\n" and self._shape.trims:
            self._take(1)
        self._step = self._text_value if self._reads_text else self._json_value
        if self._schema is not None:
            self._step = self._either_value
        return True

    def _text_value(self) -> bool:
        count, marker = self._tags.value_end.find(self._text)
        ends = self._ends_value(count, marker) if marker else None
        if ends is False:
            count += 1  # the tag is text; its first character is not searched again
        text = self._take(count)
        if not ends and text.endswith("\n"):  # dropped if the end follows
            self._text, text = "\n" + self._text, text[:-1]
        if ends:
            self._message.add_arguments(escaped(self._end_value(text, marker)) + '"')
        else:
            self._message.add_arguments(escaped(text))
        return ends is not None

    def _end_value(self, text: str, marker: str) -> str:
        """Return the value ``text`` without the line break that the format puts before the tag
        ``marker``, and drop that, unless it is the next tag: then the end is missing."""
        closes = marker in self._tags.ends
        self._take(len(marker) if closes else 0)
        self._step = self._function
        return text.removesuffix("\n") if self._shape.trims or not closes else text

    def _ends_value(self, start: int, marker: str) -> bool | None:
        """Whether the tag at ``start`` ends the value, which may contain such a tag.

        It does if another tag of the call follows, or nothing. None: more text decides.
        """
        start += len(marker)
        if marker == self._shape.parameter[0]:
            return self._begins_parameter(start)
        return self._is_followed(start, _MAX_GAP, self._tags.after[marker])

    def _begins_parameter(self, start: int) -> bool | None:
        """Whether a parameter begins before ``start``, in a value whose end is missing: then it is
        one of the function, and a new one. None: more text decides."""
        text = self._text[start : start + _MAX_NAME + len(self._shape.function[1])]
        count, marker = self._tags.name_end.find(text)
        if not marker:
            return None if len(text) <= _MAX_NAME and not self._final else False
        tag = self._named(text[:count])
        if marker not in (self._shape.name_ends, self._shape.value_opens) or tag is None:
            return False
        name = tag[0]
        is_parameter = name in self._types if self._types else _may_be_name(name)
        return is_parameter and name not in self._names

    def _either_value(self) -> bool:
        """At the beginning of a value that may be a text: find out whether it can be another."""
        count, marker = self._tags.value_end.find(self._text)
        self._put_aside(count)
        is_json = bool(marker) or begins_value("".join(self._aside), self._kinds)
        if is_json:
            self._step = self._json_value
        elif is_json is not None:
            self._begin_text()
        return is_json is not None

    def _json_value(self) -> bool:
        count, marker = self._tags.value_end.find(self._text)
        ends = self._ends_value(count, marker) if marker else None
        self._put_aside(count + (ends is False))
        if ends:
            self._end_json(self._end_value(self._take_aside(), marker))
        elif self._aside_size > MAX_HELD:
            self._begin_text()
        else:
            return ends is not None
        return True

    def _end_json(self, text: str) -> None:
        value = value_json(text) if self._schema is None else text_or_value_json(text, self._schema)
        self._message.add_arguments(value)

    def _begin_text(self) -> None:
        """The value put aside is the beginning of a text."""
        self._message.add_arguments('"')
        self._text = self._take_aside() + self._text
        self._step = self._text_value

    def _after(self) -> bool:
        """After ``</function>``."""
        self._put_space_aside()
        if self._tags.call_end.may_begin(self._text):
            return False
        end = self._tags.call_end.leading(self._text)
        space = self._take_aside()
        self._message.add_content("" if end else space)
        self._take(len(end))
        if end not in self._shape.follows:
            self._step = self._outside
        return True


def _may_be_name(name: str, names: Collection[str] = ()) -> bool:
    """Return whether ``name`` has no white space and no tag, unless it is one of ``names``."""
    return name in names or not (set("<> \t\r\n") & set(name))
