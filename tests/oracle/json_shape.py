"""Reference implementation of dynamo._fast.json_shape: what a JSON text costs to decode."""

from __future__ import annotations

import re

__all__ = ["measure"]

_TOKEN = re.compile(
    rb'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\]:]|-[0-9.eE+-]*|[0-9][0-9.eE+-]*|[a-z]+', re.DOTALL
)


def measure(text: bytes, max_weight: int, max_depth: int) -> tuple[int, int, bytes]:
    weight = depth = deepest = 0
    name = string = b""
    for match in _TOKEN.finditer(text):
        if weight > max_weight or deepest > max_depth:
            break
        token = match[0]
        kind = token[:1]
        if kind == b'"':
            weight += 1
            string = token[1:-1]
        elif kind in b"{[":
            weight += 4
            depth += 1
            deepest = max(deepest, depth)
        elif kind in b"}]":
            depth -= 1
        elif kind == b":":
            weight += 8
            if depth == 1:
                name = string
        elif kind.isalpha():
            weight += 1
        else:
            weight += _number_weight(token)
    return weight, deepest, name


def _number_weight(token: bytes) -> int:
    if b"e" in token or b"E" in token:
        return 8 if len(token) <= 19 else max(1024, len(token))
    return 1 if len(token) <= 19 else len(token) // 2
