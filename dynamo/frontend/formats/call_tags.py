"""Grammars of calls in the own format of a model: xgrammar's structural tags, which vLLM takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dynamo.frontend.formats.reasoning import ReasoningShape

MAX_SPACE = 16
"""White space in a row between the parts of arguments; a model that repeats it would not end."""

_NAME = re.compile(r"[\w.\-]+", re.ASCII)
_NUMBER = {"type": "regex", "pattern": "[0-9]{1,4}"}
_SPACE = {"type": "regex", "pattern": r"[ \n]{0,4}"}
_ANY_OBJECT = {"type": "object", "additionalProperties": True}
# xgrammar ignores these; for a JSON schema with them vLLM takes another library.
_IGNORED = frozenset(
    ("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
     "patternProperties", "not", "if", "dependentRequired", "dependentSchemas")
)  # fmt: skip


class CallTag(NamedTuple):
    """How a model writes a call: ``begin``, the arguments as JSON, ``end``.

    In ``begin``, NAME is the function and NUMBER a number. ``opens`` and ``closes`` are around all
    calls, ``between`` is between two. ``single``: the format has one call in an answer.
    """

    begin: str
    end: str
    opens: str = ""
    closes: str = ""
    between: str = ""
    single: bool = False

    def call(self, name: str, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the tag of a call of ``name``, whose arguments follow ``schema``."""
        content: dict[str, Any] = {
            "type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACE
        }  # fmt: skip
        begin, *rest = self.begin.replace("NAME", name).split("NUMBER")
        if rest:
            content = _sequence(_NUMBER, _text(rest[0]), content)
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}

    def section(self, calls: list[dict[str, Any]], single: bool) -> dict[str, Any]:
        """Return the format of one call or more, with what is around them."""
        row = {
            "type": "tags_with_separator", "tags": calls, "separator": self.between,
            "at_least_one": True, "stop_after_first": single or self.single,
        }  # fmt: skip
        if not self.opens:
            return row
        return {"type": "tag", "begin": self.opens, "content": row, "end": self.closes}


def can_be_tagged(functions: Sequence[dict[str, Any]]) -> bool:
    """Whether a structural tag guarantees the names and the arguments of ``functions``."""
    return all(
        _NAME.fullmatch(function["name"]) and not _has_ignored(function.get("parameters"))
        for function in functions
    )


def forced_tag(
    tags: Sequence[CallTag], functions: Sequence[dict[str, Any]], single: bool
) -> dict[str, Any]:
    """Return the format of an answer that is calls of ``functions``: one if ``single``."""
    return _either(
        tag.section([tag.call(name, schema) for name, schema in _schemas(functions)], single)
        for tag in tags
    )


def strict_tag(
    tags: Sequence[CallTag],
    triggers: Sequence[str],
    others: Sequence[str],
    functions: Sequence[dict[str, Any]],
    single: bool,
) -> dict[str, Any]:
    """Return the format of any text, in which the arguments of a strict function follow its schema.

    A call begins with one of ``triggers``; the text has none of ``others``.
    """
    calls = []
    for tag in tags:
        row = [
            tag.call(function["name"], schema if function.get("strict") is True else _ANY_OBJECT)
            for function, (_, schema) in zip(functions, _schemas(functions), strict=True)
        ]
        calls += [tag.section(row, single)] if tag.opens else row
    return {
        "type": "triggered_tags", "triggers": list(triggers), "tags": calls,
        "excludes": list(others), "stop_after_first": single,
    }  # fmt: skip


def after_reasoning(
    answer: dict[str, Any],
    shape: ReasoningShape | None,
    inside: bool,
    prompt: str | None,
    excluded: Sequence[str],
) -> dict[str, Any]:
    """Return ``answer`` behind the reasoning of ``shape``, which has no text of ``excluded``.

    ``inside``: the prompt has opened it. One that has closed it leaves no more of it.
    """
    if shape is None or shape.closed(prompt):
        return _sequence(_SPACE, answer)
    pairs = [(begin and "" if inside else begin, end) for begin, end in shape.pairs]
    text = {"type": "any_text", "excludes": [mark for mark in excluded if mark.strip()]}
    reasoning = _either(
        _sequence({"type": "tag", "begin": begin, "content": text, "end": end}, _SPACE)
        for begin, end in dict.fromkeys(pairs)
    )
    if inside:
        return _sequence(reasoning, answer)
    return _sequence(_SPACE, {"type": "optional", "content": reasoning}, answer)


def parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of the arguments; without one there are none."""
    schema = function.get("parameters")
    return schema if isinstance(schema, dict) and schema else {"type": "object", "properties": {}}


def _schemas(functions: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((function["name"], parameters(function)) for function in functions)


def _has_ignored(schema: Any) -> bool:
    """Whether ``schema`` has a condition that xgrammar ignores."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        if not isinstance(node, dict):
            continue
        lengths = "pattern" in node and ("minLength" in node or "maxLength" in node)
        if lengths or not _IGNORED.isdisjoint(node) or len(node.get("allOf") or ()) > 1:
            return True
        for key, value in node.items():
            # The names of properties and definitions are no conditions.
            names = key in ("properties", "$defs", "definitions") and isinstance(value, dict)
            if key not in ("enum", "const", "default", "examples"):
                pending += value.values() if names else [value]
    return False


def _either(formats: Iterator[dict[str, Any]]) -> dict[str, Any]:
    rows = list(formats)
    return rows[0] if len(rows) == 1 else {"type": "or", "elements": rows}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
