"""Bounds of the values that chat templates make.

Operators, methods and filters can make gigabytes of a few characters, within one call that no
deadline ends. So the size of a result is estimated from the arguments before the call. The
functions below whose names are participles return that size, in characters; 0: no bound applies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
from markupsafe import Markup

MAX_SIZE = 1 << 26
"""Characters of a text: more than any prompt has."""
ITEM_SIZE = 64
"""What an item of a list counts, in characters."""
SIZED = frozenset((str, list, tuple, Markup))
_MAX_COUNT = 1 << 20
_MAX_SUMMED = 4096
_MAX_DIGITS = 100
_MAX_INDENT = 64
_NUMBER = re.compile(r"[0-9]+")
_DIGITS = 7


def check_size(size: int) -> None:
    """Raise TemplateError if a value has more than ``MAX_SIZE`` characters."""
    if size > MAX_SIZE:
        raise jinja2.TemplateError(
            f"a value has more than {MAX_SIZE} characters, or {MAX_SIZE // ITEM_SIZE} items"
        )


def joined(parts: Iterable[str]) -> str:
    """Return the parts as one text. Raises TemplateError for one that is too long."""
    parts = list(parts)
    check_size(sum(map(len, parts)))
    return "".join(parts)


def check_format(text: str, values: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise TemplateError if ``text % values``, or its ``format``, may be too long."""
    arguments = [*values, *named.values()]
    numbers = [value for value in arguments if type(value) is int]
    widths = _NUMBER.findall(text)
    # First, because int() raises ValueError for a number of thousands of digits.
    if any(len(width) > _DIGITS for width in widths) or max(numbers, default=0) > MAX_SIZE:
        check_size(MAX_SIZE + 1)
    widest = max(map(int, widths), default=0)
    # A width may be an argument: ``%*d``, ``{:{}}``.
    if "*" in text or "{:{" in text.replace(" ", "") or text.count("{") > text.count("}"):
        widest = max([widest, *numbers])
    longest = max([len(str(value)) for value in arguments], default=0)
    check_size(len(text) + (text.count("%") + text.count("{")) * max(widest, longest))


def check_call(function: Any, owner: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise TemplateError if a method of the text ``owner`` may return one that is too long."""
    size = _GROWING.get(getattr(function, "__name__", ""))
    if size is not None and args:
        check_size(size(owner, *args, *named.values()))


def bounded_filters(filters: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the filters of jinja2, those that make large values with a check before."""
    bounded = {name: filters[name] for name in filters if name != "urlize"}
    for name, size in _FILTERS.items():
        bounded[name] = _checked(filters[name], size)
    return bounded


def _checked(function: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    # Some filters get the environment or the context before the value.
    own = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        values = list(args)
        if len(values) > own and hasattr(values[own], "__next__"):
            values[own] = list(values[own])  # to look at it and use it then
        check_size(size(*values[own:], *named.values()))
        return function(*values, **named)

    return checked


def _width(owner: Any, width: Any = 0, *_: Any) -> int:
    return width if isinstance(width, int) else 0


def _tabs(owner: Any, size: Any = 8, *_: Any) -> int:
    tabs: int = owner.count("\t" if isinstance(owner, str) else b"\t")
    return len(owner) + tabs * (size if isinstance(size, int) else 0)


def _replaced(owner: Any, old: Any, new: Any = "", *_: Any) -> int:
    text, old = str(owner), str(old)
    # An empty text is found between all characters, and at both ends.
    count = text.count(old) if old else len(text) + 1
    return len(text) + count * len(str(new))


def _translated(owner: Any, table: Any, *_: Any) -> int:
    values = table.values() if isinstance(table, dict) else ()
    return len(owner) * max([len(text) for text in values if isinstance(text, str)], default=1)


def _joined(owner: Any, items: Any = (), *_: Any) -> int:
    if not hasattr(items, "__len__"):
        return MAX_SIZE + 1 if not isinstance(items, Iterable) else 0
    return sum(len(text) for text in items if isinstance(text, str)) + len(owner) * len(items)


def _joined_filter(value: Any, between: Any = "", *_: Any) -> int:
    return _joined(str(between), value) if hasattr(value, "__len__") else 0


def _counted(value: Any, count: Any = 0, *_: Any) -> int:
    return MAX_SIZE + 1 if isinstance(count, int) and count > _MAX_COUNT else 0


def _indented(value: Any, width: Any = 4, *_: Any) -> int:
    text = str(value)
    size = len(width) if isinstance(width, str) else int(width)
    return len(text) + (text.count("\n") + 1) * size


def _wrapped(value: Any, width: Any = 79, breaks: Any = True, string: Any = "", *_: Any) -> int:
    return len(str(value)) * max(1, len(str(string or "")))


def _rounded(value: Any, precision: Any = 0, *_: Any) -> int:
    return MAX_SIZE + 1 if isinstance(precision, int) and abs(precision) > _MAX_DIGITS else 0


def _summed(value: Any, *starts: Any) -> int:
    sized = any(type(start) in SIZED for start in starts if start != "attribute")
    return MAX_SIZE + 1 if sized and hasattr(value, "__len__") and len(value) > _MAX_SUMMED else 0


def _formatted(value: Any, *args: Any) -> int:
    check_format(str(value), args, {})
    return 0


def _json(value: Any, *options: Any) -> int:
    for option in options:
        sizes = [option] if isinstance(option, int) else [len(text) for text in option or ()]
        if max(sizes, default=0) > _MAX_INDENT:
            return MAX_SIZE + 1
    return 0


_GROWING: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    "expandtabs": _tabs,
    "replace": _replaced,
    "translate": _translated,
    "join": _joined,
}
_FILTERS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "truncate"), _width),
    **dict.fromkeys(("batch", "slice"), _counted),
    "format": _formatted,
    "indent": _indented,
    "join": _joined_filter,
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
    "tojson": _json,
    "wordwrap": _wrapped,
}
