"""The metrics and labels that a PromQL expression names: enough of its grammar for dashboards."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Use", "uses"]

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)(?![\w:])(?!\s*\()\s*(\{[^}]*\})?")
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*(?:=~|!~|!=|=)")
_WORDS = frozenset(("and", "or", "unless", "offset", "bool", "inf", "nan"))
_AGGREGATIONS = frozenset(("sum", "min", "max", "avg", "count"))


class Use(NamedTuple):
    """One selector of a metric, with the labels that it or the grouping around it names."""

    metric: str
    labels: frozenset[str]


def uses(expression: str) -> list[Use]:
    """Return each metric of ``expression``, with its own labels and those of every grouping."""
    text = _STRING.sub('""', expression)
    text = re.sub(r"\[[^]]*\]", "", text)
    grouped = {name.strip() for one in _GROUPING.findall(text) for name in one.split(",")} - {""}
    text = _GROUPING.sub(" ", text)
    found = []
    for name, braces in _SELECTOR.findall(text):
        if name in _WORDS or name in _AGGREGATIONS or not re.search(r"[_:]|^up$", name):
            continue
        found.append(Use(name, frozenset(_LABEL.findall(braces)) | grouped))
    return found
