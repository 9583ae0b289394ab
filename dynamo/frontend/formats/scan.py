"""Read text that arrives in pieces: markers, JSON values, literals, the steps of a parser.

No result depends on how the text is cut: what may be the beginning of a marker is held back.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import orjson

SPACE = " \t\r\n"
MAX_HELD = 1 << 16
"""Characters that a parser may hold back to find out what they are."""
_IN_STRING = re.compile(r'["\\]')
_IN_JSON_STRING = re.compile(r'\\[\s\S]?|["\x00-\x1f]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_IN_ANY_STRING = re.compile(r"""\\[\s\S]?|["'\x00-\x1f]""")
_STRUCTURE = re.compile(r'["{}\[\]<]')
_JSON_NAMES = {"true": True, "false": False, "null": None}
_TEXT = frozenset(("string",))
_NUMBERS = frozenset(("integer", "number"))
_KINDS: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_BRACKETS = {"{": "object", "[": "array"}
_WORDS = {"true": "boolean", "false": "boolean", "null": "null"}
_NUMBER_BEGINS = re.compile(r"-?\d*(?:\.\d*)?(?:[eE][-+]?\d*)?")
_MAX_SCALAR = 64
_MAX_LITERAL = 8192
_QUOTED = re.compile(r"""\s*(["'])(?P<value>[^"'<>=\r\n]+)\1""")
_UNQUOTED = re.compile(r"""\s*["']?(?P<value>[^\s"'<>=]+)""")
_UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


def well_formed(text: str) -> str:
    r"""``text`` with U+FFFD in place of each half of a character, which no UTF-8 can hold.

    A model may write an escape such as ``\ud83d`` without the other half.
    """
    if text.isascii():
        return text
    # In UTF-16 two halves that belong together become one character, and a lone one is an error.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def json_text(value: Any) -> str:
    """``value`` as JSON, in the form in which models write it. Raises TypeError, ValueError."""
    return well_formed(json.dumps(value, ensure_ascii=False, allow_nan=False))


def json_object(text: str) -> bytes | None:
    """The JSON object that ``text`` is, as it is written, so that no number loses digits.

    None for any other text, and for one of more than 1,024 levels.
    """
    try:
        return text.encode() if isinstance(orjson.loads(text), dict) else None
    except orjson.JSONDecodeError:
        pass
    try:  # this one takes half a character
        value = json.loads(text)
        return json_text(value).encode() if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def escaped(text: str) -> str:
    """``text`` as it is inside a JSON string; the parts of a text may be escaped separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_json(text: str) -> str:
    """The value that ``text`` is in JSON or else in Python, as JSON; a string if it is neither."""
    text = text.strip()
    for read in (_json_value, _python_value):
        try:
            return json_text(read(text))
        except _UNREADABLE:
            pass
    return json_text(text)


def text_or_value_json(text: str, schema: Any) -> str:
    """``text`` as JSON, for a schema that allows strings and other values.

    It is another value if the schema allows that one, as in vLLM, and else a string.
    """
    for read in (_json_value, _python_value):
        try:
            value = read(text.strip())
            # Python has other names for true and null, which are texts here.
            if _allows(schema, value) and (read is _json_value or isinstance(value, dict | list)):
                return json_text(value)
        except _UNREADABLE:
            pass
    return json_text(text)


def begins_value(text: str, kinds: set[str]) -> bool | None:
    """Whether ``text`` is the beginning of a value of ``kinds`` that is no string.

    None: more text decides.
    """
    begun = text.strip()
    if begun[:1] in _BRACKETS:
        return _BRACKETS[begun[0]] in kinds
    # Longer than any number or word: a text of digits is not held back to its end.
    if len(text) > _MAX_SCALAR:
        return False
    if any(kind in kinds and word.startswith(begun) for word, kind in _WORDS.items()):
        return None
    is_number = not kinds.isdisjoint(_NUMBERS) and _NUMBER_BEGINS.fullmatch(begun)
    return None if is_number or not begun else False


def attribute_value(text: str) -> tuple[str, str] | None:
    """The value at the beginning of ``text``, in quotes or not, and what follows; None if there is
    none. A quote may be missing. O(characters)."""
    match = _QUOTED.match(text) or _UNQUOTED.match(text)
    return None if match is None else (match["value"].strip(), text[match.end() :])


def is_text(schema: Any) -> bool:
    """Return whether a parameter takes text alone, as far as its schema says."""
    return kinds_of(schema) <= _TEXT


def kinds_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, none if it names none.

    No engine checks the schema of a call that is not forced: it may be anything.
    """
    if not isinstance(schema, dict):
        return set()
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    kinds = {kind for kind in types if isinstance(kind, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and isinstance(values, list):
        kinds = {_KINDS[type(value)] for value in values if type(value) in _KINDS}
    for alternative in _alternatives(schema):
        kinds |= kinds_of(alternative)
    if kinds and schema.get("nullable") is True:  # OpenAPI
        kinds.add("null")
    return kinds


def _alternatives(schema: dict[str, Any]) -> list[Any]:
    lists = [schema.get(name) for name in ("anyOf", "oneOf")]
    return [schema for schemas in lists if isinstance(schemas, list) for schema in schemas]


def _allows(schema: Any, value: Any) -> bool:
    """Whether ``schema`` allows ``value``, which is no string, by its type and its enumeration."""
    kind = _KINDS.get(type(value))
    if not isinstance(schema, dict) or kind is None or kind == "string":
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        # In Python 1, 1.0 and True are equal.
        return any(type(listed) is type(value) and listed == value for listed in values)
    if any(_allows(alternative, value) for alternative in _alternatives(schema)):
        return True
    own = kinds_of({name: schema.get(name) for name in ("type", "nullable")})
    return kind in own or (kind == "integer" and "number" in own)


def _json_value(text: str) -> Any:
    """The value of a JSON text, in whose strings a model may write line breaks and tabs."""
    return json.loads(text, strict=False)


def _python_value(text: str) -> Any:
    """The value of a Python literal, in which JSON's names are allowed too.

    Raises ValueError for a long text: its syntax tree would hold the event loop.
    """
    if len(text) > _MAX_LITERAL:
        raise ValueError(f"a literal of {len(text)} characters")
    # A model may write line breaks in a string, which Python refuses as JSON does.
    if _CONTROL.search(text) is not None:
        text = StringEscapes(_IN_ANY_STRING).push(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape in a string is only a warning
        tree = ast.parse(text, mode="eval")
    return ast.literal_eval(_JsonNames().visit(tree))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_NAMES:
            return ast.Constant(_JSON_NAMES[node.id])
        return node


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
        # Few pieces have the first character of a marker: "in" costs less than a search.
        for char in self._first:
            if char in text:
                break
        else:
            return len(text), ""
        match = self._find(text)
        if match is not None:
            return match.start(), match[0]
        # What may begin a marker is shorter than the longest one; the longest such end wins.
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if self.may_begin(text[start:]):
                return start, ""
        return len(text), ""

    def may_begin(self, text: str) -> bool:
        """Whether ``text`` is the beginning of a marker, not a whole one. True for ""."""
        return any(marker.startswith(text) and marker != text for marker in self.texts)

    def leading(self, text: str) -> str:
        """The marker at the beginning of ``text``, or ""."""
        for marker in self.texts:
            if text.startswith(marker):
                return marker
        return ""


@functools.cache
def _searched(
    texts: tuple[str, ...],
) -> tuple[tuple[str, ...], int, Callable[[str], re.Match[str] | None]]:
    """The first characters, the greatest length, and the search. The formats have a few dozen."""
    find = re.compile("|".join(map(re.escape, texts))).search
    return tuple({text[0] for text in texts}), max(map(len, texts), default=0), find


class StringEscapes:
    """Escapes the control characters inside strings of JSON text, which arrives in pieces.

    JSON allows none there, but models write line breaks and tabs. ``marks`` finds them, quotes, and
    a backslash with the character behind it.
    """

    __slots__ = ("_escaped", "_marks", "quote")

    def __init__(self, marks: re.Pattern[str] = _IN_JSON_STRING) -> None:
        self._marks = marks
        self._escaped = False  # the last character was a backslash
        self.quote = ""  # of the string that is open

    def push(self, text: str) -> str:
        """Return ``text`` with its control characters escaped. O(characters)."""
        first = ""
        if self._escaped and text:
            self._escaped, first = False, self._after_backslash(text[0])
            text = text[1:]
        return first + self._marks.sub(self._replaced, text)

    def _replaced(self, match: re.Match[str]) -> str:
        mark = match[0]
        if mark[0] == "\\":
            self._escaped = len(mark) == 1  # the text ends
            return mark if self._escaped else "\\" + self._after_backslash(mark[1])
        if mark < " ":
            return escaped(mark) if self.quote else mark
        if not self.quote:
            self.quote = mark
        elif self.quote == mark:
            self.quote = ""
        return mark

    def _after_backslash(self, char: str) -> str:
        # The model's own backslash begins the escape.
        return escaped(char)[1:] if char < " " and self.quote else char


class JsonSpan:
    """Finds the end of one JSON string, array or object.

    A ``<`` outside strings ends it too: no JSON has one there, but a marker after broken JSON does.
    """

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def open(self) -> bool:
        """Whether the value has begun and not ended."""
        return self._quoted or self._depth != 0

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
        mark = _IN_STRING.search(text, at)
        if mark is None:
            return -1, False
        if mark[0] == "\\":
            self._escaped = True
            return mark.end(), False
        self._quoted = False
        return mark.end(), not self._depth

    def _structure(self, text: str, at: int) -> tuple[int, bool]:
        mark = _STRUCTURE.search(text, at)
        if mark is None:
            return -1, False
        char = mark[0]
        if char == "<":
            return mark.start(), True
        if char == '"':
            self._quoted = True
        else:
            self._depth += 1 if char in "{[" else -1
        return mark.end(), not self._quoted and not self._depth


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
