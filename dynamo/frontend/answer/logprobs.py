"""Log probabilities of an engine in the two shapes of the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dynamo.frontend.text.detokenizer import make_detokenizer
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "CompletionToken",
    "LogprobsCollector",
    "finite",
]

_LOWEST = -9999.0
"""In place of minus infinity, which JSON cannot express."""


class LogprobsCollector(Protocol):
    """Collects what engine outputs report until a chunk is written."""

    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""

    def drain(self) -> dict[str, Any] | None:
        """Return everything since the last call, as the API shows it; None if that is nothing."""


class ChatLogprobs:
    """``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._entries: list[dict[str, Any]] = []

    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""
        for token_id, logprob, top in _tokens(output, count):
            entry = _entry(self._tokenizer, token_id, logprob)
            entry["top_logprobs"] = [
                _entry(self._tokenizer, each.get("token_id"), each["logprob"], each.get("token"))
                for each in top[: self._alternatives]
            ]
            self._entries.append(entry)

    def drain(self) -> dict[str, Any] | None:
        """Return everything since the last call; None if that is nothing."""
        if not self._entries:
            return None
        taken, self._entries = self._entries, []
        return {"content": taken, "refusal": None}


class CompletionToken(NamedTuple):
    """A token of a completion: text, log probability, alternatives, offset in the text."""

    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


class CompletionLogprobs:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, four columns of one length.

    With ``echo`` the text begins with the prompt: ``echoed`` are its tokens, ``offset`` is the
    number of its characters. A character of several tokens counts once, with the last of them, and
    with ``skip_special`` special tokens have no characters, as in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        alternatives: int,
        skip_special: bool = True,
        echoed: Iterable[CompletionToken] = (),
        offset: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._detokenizer = make_detokenizer(tokenizer, skip_special)
        self._offset = offset
        self._rows = list(echoed)

    def set_echoed(self, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Set the log probabilities of the echoed tokens: for each (id, log probability) of the
        token itself and of the most likely ones, or nothing."""
        for place, (echoed, row) in enumerate(zip(self._rows, rows, strict=False)):
            if row:
                text = self._tokenizer.token_text
                top = {text(each): finite(logprob) for each, logprob in row}
                logprob = finite(row[0][1])
                self._rows[place] = echoed._replace(logprob=logprob, top=top)

    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""
        for token_id, logprob, top in _tokens(output, count):
            token = self._tokenizer.token_parts(token_id)[0]
            named = {
                _name(self._tokenizer, each): finite(each["logprob"])
                for each in top[: self._alternatives]
            }
            self._rows.append(CompletionToken(token, finite(logprob), named or None, self._offset))
            self._offset += len(self._detokenizer.push((token_id,)))

    def drain(self) -> dict[str, Any] | None:
        """Return everything since the last call; None if that is nothing."""
        if not self._rows:
            return None
        taken, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(names, zip(*taken, strict=True), strict=True))


def finite(value: float) -> float:
    """``value``, or the lowest one that JSON can express in place of minus infinity."""
    return value if math.isfinite(value) else _LOWEST


def _tokens(
    output: EngineOutput, count: int
) -> list[tuple[int, float, Sequence[Mapping[str, Any]]]]:
    """(id, log probability, alternatives) for each token that has a log probability."""
    ids, logprobs = output.token_ids[:count], output.log_probs or []
    top: list[list[dict[str, Any]]] = output.top_logprobs or []
    return [
        (token_id, logprobs[place], top[place] if place < len(top) else ())
        for place, token_id in enumerate(ids[: len(logprobs)])
    ]


def _entry(
    tokenizer: Tokenizer, token_id: int | None, logprob: float, name: Any = None
) -> dict[str, Any]:
    """A token with the text ``name``, or else its own."""
    token, raw = tokenizer.token_parts(token_id) if token_id is not None else ("", None)
    if isinstance(name, str):
        token = name
    shown = list(token.encode()) if raw is None else raw
    return {"token": token, "logprob": finite(logprob), "bytes": shown}


def _name(tokenizer: Tokenizer, given: Mapping[str, Any]) -> str:
    token = given.get("token")
    if isinstance(token, str):
        return token
    token_id = given.get("token_id")
    return tokenizer.token_parts(token_id)[0] if token_id is not None else ""
