"""Values that models write in JSON or Python, as JSON; the types that a schema allows."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

__all__ = ["escaped", "is_text", "json_text", "kinds_of", "value_json"]

_JSON_NAMES = {"true": True, "false": False, "null": None}


def json_text(value: Any) -> str:
    """``value`` as JSON, in the form in which models write it. Raises TypeError, ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


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


def is_text(schema: Any) -> bool:
    """Return whether a parameter takes text, as far as its schema says."""
    kinds = kinds_of(schema)
    return not kinds or "string" in kinds


def kinds_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows, none if it names none."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {each for each in (kind if isinstance(kind, list) else [kind]) if each}
    for name in ("anyOf", "oneOf"):
        for each in schema.get(name) or ():
            kinds |= kinds_of(each)
    return kinds


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
