"""Values that models write in JSON or Python, as JSON; the types that a schema allows."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

import orjson

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


def well_formed(text: str) -> str:
    r"""``text`` with U+FFFD in place of each half of a character, which no UTF-8 can hold.

    A model may write an escape such as ``\ud83d`` without the other half.
    """
    if text.isascii():
        return text
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
    try:
        return json_text(json.loads(text))
    except (ValueError, RecursionError):
        pass
    try:
        return json_text(_python_value(text))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json_text(text)


def text_or_value_json(text: str, schema: Any) -> str:
    """``text`` as JSON, for a schema that allows strings and other values.

    It is another value if the schema allows that one, as in vLLM, and else a string.
    """
    for read in (json.loads, _python_value):
        try:
            value = read(text.strip())
            # Python has other names for true and null, which are texts here.
            if _allows(schema, value) and (read is json.loads or isinstance(value, dict | list)):
                return json_text(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return json_text(text)


def begins_value(text: str, kinds: set[str]) -> bool | None:
    """Whether ``text`` is the beginning of a value of ``kinds`` that is no string.

    None: more text decides.
    """
    begun = text.strip()
    if begun[:1] in _BRACKETS:
        return _BRACKETS[begun[0]] in kinds
    if len(text) > _MAX_SCALAR:
        return False
    words = [word for word, kind in _WORDS.items() if kind in kinds]
    if any(word.startswith(begun) for word in words):
        return None
    is_number = not kinds.isdisjoint(_NUMBERS) and _NUMBER_BEGINS.fullmatch(begun)
    return None if is_number or not begun else False


def is_text(schema: Any) -> bool:
    """Return whether a parameter takes text alone, as far as its schema says."""
    return kinds_of(schema) <= _TEXT


def kinds_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, none if it names none.

    No engine checks the schema of a call that is not forced: it may be anything.
    """
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not kinds and isinstance(values, list):
        kinds = {_KINDS[type(each)] for each in values if type(each) in _KINDS}
    for each in _alternatives(schema):
        kinds |= kinds_of(each)
    if kinds and schema.get("nullable") is True:  # OpenAPI
        kinds.add("null")
    return kinds


def _alternatives(schema: dict[str, Any]) -> list[Any]:
    found = [schema.get(name) for name in ("anyOf", "oneOf")]
    return [each for one in found if isinstance(one, list) for each in one]


def _allows(schema: Any, value: Any) -> bool:
    """Whether ``schema`` allows ``value``, which is no string, by its type and its enumeration."""
    kind = _KINDS.get(type(value))
    if not isinstance(schema, dict) or kind is None or kind == "string":
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return any(type(each) is type(value) and each == value for each in values)
    alternatives = _alternatives(schema)
    if alternatives and any(_allows(each, value) for each in alternatives):
        return True
    own = kinds_of({name: schema.get(name) for name in ("type", "nullable")})
    return kind in own or (kind == "integer" and "number" in own)


def _python_value(text: str) -> Any:
    """The value of a Python literal, in which JSON's names are allowed too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape in a string is only a warning
        tree = ast.parse(text, mode="eval")
    return ast.literal_eval(_JsonNames().visit(tree))


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in _JSON_NAMES:
            return ast.Constant(_JSON_NAMES[node.id])
        return node
