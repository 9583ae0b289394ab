"""Reads samples of a Prometheus page, which another program wrote. Pure; O(bytes).

A page has thousands of lines, and a reader needs few of them: this takes 1 us a line, the parser of
``prometheus_client`` 30.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_LABELS = rb'(?:\{((?:[^"}]|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+)\})?'
_LABEL = re.compile(rb'(?<!\w)(\w++)="([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_ESCAPED = re.compile(r"\\(.)")


def samples(
    page: bytes, *names: str, strict: bool = False
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield (name, labels, value) of each sample of ``names`` on a Prometheus page.

    A damaged one is skipped. If ``strict``, it raises ValueError: a sum without it would be wrong.
    """
    wanted = tuple(name.encode() for name in names)
    any_name = b"|".join(map(re.escape, wanted))
    sample = re.compile(rb"(%b)%b[ \t]++(\S++)" % (any_name, _LABELS))
    begins = re.compile(rb"(?:%b)(?![\w:])" % any_name)  # not with a longer name
    for line in page.split(b"\n"):
        if not line.startswith(wanted):
            continue
        match = sample.match(line)
        try:
            if match is None:
                if strict and begins.match(line):
                    raise ValueError(f"a damaged sample: {line[:80]!r}")
                continue
            labels = {
                key.decode(): _unescaped(value.decode(errors="strict" if strict else "replace"))
                for key, value in _LABEL.findall(match[2] or b"")
            }
            value = float(match[3])
        except ValueError:
            if strict:
                raise
            continue
        yield match[1].decode(), labels, value


def _unescaped(value: str) -> str:
    """Return the value of a label, in which quotes, backslashes and line ends are escaped."""
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], value)
