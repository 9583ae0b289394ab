"""Replaces keys and passwords in the bodies of requests and answers. Pure.

JSON is decoded, also inside its strings, and the deltas of an answer are joined, so that neither
escapes nor chunks hide a part of a secret. All of it takes time in proportion to the text: no
character is read more often than a constant number of times.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

REDACTED = "[redacted]"
LEFT_OUT = "[left out]"
_NESTED = 8
_SHORTEST = 6
_BEARER_CHARACTERS = 16
_WORD_CHARACTERS = 8
_STEP = 1 << 16
_NAME_CHARACTERS = 512  # of a match without the value, which may be cut by the end of a step
# How keys of known services begin; a lookahead, so that a rejected place costs no more than that.
_KEY = re.compile(
    r"(?:(?:sk|rk|dyn|hf|gh[oprsu]|github_pat|glpat|gsk|xai|nvapi|npm|pypi|xapp|xox[abeprs])[-_]"
    r"(?=[A-Za-z0-9_-]{16}|[A-Za-z0-9_-]{6,16}\Z)"
    r"|(?:AKIA|ASIA)(?=[A-Z0-9]{16})|AIza(?=[A-Za-z0-9_-]{30})|eyJ(?=[A-Za-z0-9_-]{16}))"
)
_KEY_END = re.compile(r"[A-Za-z0-9_-]*+")
_TOKEN_END = re.compile(r"[A-Za-z0-9_.-]*+")
# A letter or digit before a key that belongs to an escape.
_ESCAPE_END = re.compile(r"(?:\\[bfnrt]|\\u[0-9A-Fa-f]{4}|%[0-9A-Fa-f]{2}|\[[0-9]{1,3}m)\Z")
_ESCAPE_CHARACTERS = 6
# Searched in lower case, each branch with a letter first: a search skips other letters quickly.
_SCHEME = re.compile(r"(bearer|basic)[ \t]{1,64}+([a-z0-9._~+/=-]{6,}+)")
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END [A-Z ]{0,32}PRIVATE KEY(?: BLOCK)?-----")
_USER = re.compile(r"://([^\s/?#@\"'<>]{1,512}+)@")
_KEY_OF = (
    *("api", "private", "access", "auth", "account", "shared", "storage", "session", "ssh"),
    *("signing", "encryption", "subscription", "master", "service", "webhook", "license"),
)
_NAMES = "|".join(
    (
        *("password", "passwd", "passphrase", "passcode", "secret", "credential"),
        *("authorization", "cookie", *(f"{kind}[-_. ]?key" for kind in _KEY_OF)),
    )
)
_SECRET_NAME = re.compile(_NAMES + r"|(?:token|pwd|jwt|connection[-_ ]?string|cache[-_ ]?salt)\Z")
_HEADER_NAME = re.compile(r"(?:proxy-)?authorization|(?:set-)?cookie|x-[a-z-]*(?:key|token)")
# A name, what is between it and its value, and the quote with which the value begins.
_NAME_IN_TEXT = re.compile(
    rf"(?:{_NAMES}|token(?![\w-])|pwd(?![\w-])|jwt(?![\w-]))"
    r"[\w-]{0,40}+(?P<named>\\*+[\"'])?\s{0,32}+(?P<sign>[:=][=>]?)\s{0,32}+"
    r"(?P<escapes>\\*+)(?P<quote>[\"'])?",
    re.ASCII,
)
_LINES = ("authorization", "cookie")
_QUOTE = {quote: re.compile(rf"(?<!\\)(\\*+){quote}|[\r\n]") for quote in "\"'"}
_WORD = re.compile(r"[^\s,;&\"'<>\\(){}\[\]]*+")
_LINE = re.compile(r"[^\r\n\"'\\]*+")
_NO_SECRETS = frozenset(("null", "none", "true", "false", "undefined", "nil"))
_ASCII_ESCAPE = re.compile(r"\\u00(2[dD]|3[0-9]|[46][1-9a-fA-F]|[57][0-9aA]|5[fF])")
# Keys of a JSON schema below a secret name that describe the value.
_SCHEMA = frozenset(("type", "description", "title", "format", "$ref", "required"))
# Lists of an answer that spell its text in tokens.
_SPELLED = frozenset(("bytes", "logprobs", "token_ids", "tokens"))
_SPELLED_ENDS = ("_logprobs", "_token_ids")
# Strings of an event that are not a piece of a text.
_WHOLE = frozenset(("id", "object", "model", "type", "role", "finish_reason", "item_id"))
_CHANNEL = ("type", "item_id", "output_index", "content_index", "summary_index", "index")
_NOT_JSON = (msgspec.DecodeError, RecursionError, ValueError)


def cleaned_body(body: bytes) -> str:
    """Return the body of a request without secrets; JSON stays JSON. O(n)."""
    try:
        return _encoded(_Cleaner().value(msgspec.json.decode(body)))
    except _NOT_JSON:
        return _cleaned_rest(body.decode("utf-8", "replace"))


def cleaned_answer(body: bytes) -> str:
    """Return the body of a response without secrets, and without lists of its tokens. O(n).

    In an event stream each event stays; a secret becomes one ``[redacted]``, in the event in which
    it begins.
    """
    text = body.decode("utf-8", "replace")
    if text.startswith(("data:", "event:", "id:", ":")):
        return _cleaned_events(text)
    try:
        return _encoded(_Cleaner(answer=True).value(msgspec.json.decode(body)))
    except _NOT_JSON:
        return _cleaned_rest(text)


def _cleaned_events(text: str) -> str:
    lines: list[Any] = text.split("\n")
    cleaner = _Cleaner(answer=True, is_stream=True)
    pieces: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
    for number, line in enumerate(lines):
        if not line.startswith("data:"):
            lines[number] = cleaned_text(line)
            continue
        data = line[5:].strip()
        try:
            lines[number] = event = [cleaner.value(msgspec.json.decode(data))]
        except _NOT_JSON:
            # The last line of a stream that was cut: its end of a secret is in no whole event.
            lines[number] = f"data: {LEFT_OUT}" if data[:1] == "{" else cleaned_text(line)
            continue
        for channel, container, key in _pieces(event, 0, ()):
            pieces.setdefault(channel, []).append((container, key))
    for places in pieces.values():
        cleaned = _cleaned_pieces([container[key] for container, key in places])
        for (container, key), piece in zip(places, cleaned, strict=True):
            container[key] = piece
    return "\n".join(
        line if isinstance(line, str) else f"data: {_encoded(line[0])}" for line in lines
    )


def _pieces(container: Any, key: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the strings in ``container[key]``, each as the text to which it belongs, and place."""
    value = container[key]
    if isinstance(value, str):
        if key in _WHOLE:
            container[key] = cleaned_text(value)
        else:
            yield (*path, key), container, key
    elif isinstance(value, dict):
        inside = (*path, *(value[name] for name in _CHANNEL if _is_plain(value.get(name))))
        for name in value:
            yield from _pieces(value, name, (*inside, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            # A choice has its index; its place in the list counts only within this chunk.
            has_index = isinstance(item, dict) and isinstance(item.get("index"), int)
            yield from _pieces(value, number, path if has_index else (*path, number))


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int)


def _cleaned_pieces(pieces: Sequence[str]) -> list[str]:
    """Return the pieces of one text without the secrets in it."""
    text = "".join(pieces)
    cleaned = _cleaned_json(text, 0)
    if cleaned is not None:
        return [cleaned, *[""] * (len(pieces) - 1)]
    return _without(_spans(text), pieces)


class _Cleaner:
    """Cleans decoded JSON. Of a stream the strings without a secret's name stay as they are."""

    def __init__(self, answer: bool = False, is_stream: bool = False, nested: int = 0) -> None:
        self._answer = answer
        self._is_stream = is_stream
        self._nested = nested

    def value(self, value: Any, secret: bool = False) -> Any:
        """Return ``value`` without secrets; ``secret``: its name is that of one."""
        if isinstance(value, str):
            if secret:
                return value and REDACTED
            return value if self._is_stream else cleaned_text(value, self._nested)
        if isinstance(value, dict):
            return {cleaned_text(key, _NESTED): self._field(value, key, secret) for key in value}
        if isinstance(value, list):
            if len(value) == 2 and _is_header(value[0]):
                return [value[0], self.value(value[1], True)]
            return [self.value(entry, secret) for entry in value]
        return REDACTED if secret and value is not None and not isinstance(value, bool) else value

    def _field(self, fields: dict[str, Any], key: str, secret: bool) -> Any:
        value = fields[key]
        if self._answer and isinstance(value, list | dict) and _is_spelled(key):
            return LEFT_OUT
        if key == "value":
            names = (fields.get("name"), fields.get("key"))
            secret = secret or any(isinstance(name, str) and _is_secret(name) for name in names)
        elif _is_secret(key):
            secret = True
        elif key in _SCHEMA:
            secret = False
        return self.value(value, secret)


def cleaned_text(text: str, nested: int = 0) -> str:
    """Return ``text``, which may be JSON, without secrets. O(n)."""
    if len(text) < _SHORTEST:
        return text
    cleaned = _cleaned_json(text, nested)
    return "".join(_without(_spans(text), [text])) if cleaned is None else cleaned


def _cleaned_json(text: str, nested: int) -> str | None:
    """Return JSON without the secrets in it; None if it is not JSON, or has none."""
    if nested >= _NESTED or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = msgspec.json.decode(text)
        cleaned = _Cleaner(nested=nested + 1).value(value)
        return None if cleaned == value else _encoded(cleaned)
    except _NOT_JSON:
        return None


def _cleaned_rest(text: str) -> str:
    """Clean what should be JSON and is not; letters of a key may be written as escapes."""
    return cleaned_text(_ASCII_ESCAPE.sub(lambda match: chr(int(match[1], 16)), text), _NESTED)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name.lower()) is not None


def _is_header(name: Any) -> bool:
    return isinstance(name, str) and _HEADER_NAME.fullmatch(name.lower()) is not None


def _is_spelled(name: str) -> bool:
    return name in _SPELLED or name.endswith(_SPELLED_ENDS)


def _spans(text: str) -> list[tuple[int, int]]:
    """Return begin and end of each secret in ``text``, in order; none overlaps another."""
    lower = text.lower()
    if len(lower) != len(text):  # the one letter whose lower case is longer
        lower = text.replace("\u0130", "I").lower()
    secrets = [*_keys(text), *_schemes(text, lower), *_private_keys(text), *_values(text, lower)]
    secrets += [match.span(1) for match in _USER.finditer(text)]
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(secrets):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


def _without(spans: Sequence[tuple[int, int]], pieces: Sequence[str]) -> list[str]:
    """Return the pieces of a text without ``spans`` of it."""
    cleaned, number, begin = [], 0, 0
    for piece in pieces:
        end, position, parts = begin + len(piece), begin, []
        while number < len(spans) and spans[number][0] < end:
            start, stop = spans[number]
            if start >= begin:
                parts += [piece[position - begin : start - begin], REDACTED]
            position = min(stop, end)
            if stop > end:
                break
            number += 1
        cleaned.append("".join((*parts, piece[position - begin :])))
        begin = end
    return cleaned


def _keys(text: str) -> Iterator[tuple[int, int]]:
    end = 0
    for match in _KEY.finditer(text):
        begin = match.start()
        if begin >= end and _begins_word(text, begin):
            is_token = match[0] == "eyJ"
            run = (_TOKEN_END if is_token else _KEY_END).match(text, match.end())
            end = run.end() if run else match.end()
            yield begin, end


def _begins_word(text: str, begin: int) -> bool:
    before = text[max(0, begin - _ESCAPE_CHARACTERS) : begin]
    if not before or not (before[-1].isascii() and before[-1].isalnum()):
        return True
    return _ESCAPE_END.search(before) is not None


def _schemes(text: str, lower: str) -> Iterator[tuple[int, int]]:
    for match in _SCHEME.finditer(lower):
        kind, value = match[1], text[match.start(2) : match.end()]
        if _is_basic(value) if kind == "basic" else len(value) >= _BEARER_CHARACTERS:
            yield match.span()


def _is_basic(value: str) -> bool:
    """Whether ``value`` is a name and a password, rather than a word after "basic"."""
    try:
        decoded = binascii.a2b_base64(value + "=" * (-len(value) % 4))
    except binascii.Error:
        return False
    return b":" in decoded


def _private_keys(text: str) -> Iterator[tuple[int, int]]:
    position = 0
    while (begin := _PEM.search(text, position)) is not None:
        end = _PEM_END.search(text, begin.end())
        position = len(text) if end is None else end.end()
        yield begin.start(), position


def _values(text: str, lower: str) -> Iterator[tuple[int, int]]:
    """Yield the values of fields, settings and headers that have a secret's name."""
    position = 0
    while position < len(text):
        # In steps: a search keeps the interpreter from other threads until it ends.
        near = _NAME_IN_TEXT.search(lower, position, position + _STEP)
        match = near and _NAME_IN_TEXT.match(lower, near.start())
        if match is None:
            position += _STEP - _NAME_CHARACTERS
            continue
        position = match.end()
        end = _value_end(text, match)
        if end > position:
            yield position, end
            position = end


def _value_end(text: str, match: re.Match[str]) -> int:
    """Return the end of the value after a name and its sign; its begin if it is not a secret."""
    begin, named = match.end(), match["named"]
    if match["quote"]:
        return _string_end(text, begin, match["quote"], len(match["escapes"]))
    if match[0].startswith(_LINES) and match["sign"] == ":" and not named:
        line = _LINE.match(text, begin)
        return line.end() if line else begin
    value = _WORD.match(text, begin)
    word = value[0] if value else ""
    is_value = named or "=" in match["sign"] or len(word) >= _WORD_CHARACTERS
    if word.lower() in _NO_SECRETS or not (is_value or any(map(str.isdigit, word))):
        return begin
    return begin + len(word)


def _string_end(text: str, begin: int, quote: str, escapes: int) -> int:
    """Return the end of a string whose opening quote has ``escapes`` backslashes before it.

    Each time that JSON is written into a string of JSON, a quote that ends one gets twice as many
    and one more. One that is inside has another number. A line's end ends a string, too.
    """
    for match in _QUOTE[quote].finditer(text, begin):
        if match[1] is None:
            return match.start()
        more = len(match[1]) - escapes
        if more >= 0 and more % (2 * (escapes + 1)) == 0:
            return match.end() - 1 - escapes
    return len(text)
