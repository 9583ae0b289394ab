"""The replies of the simulated engine: random ids, ids derived from the prompt, or a script."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamo.errors import ConfigError
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import StopConditions

REPLIES = ("random", "sequence", "echo", "script")
_VOCABULARY = range(1000, 2000)
_DRAWN_AT_ONCE = 32
_HEADER_TOKENS = 8
_PRIME = 998_244_353


class ScriptLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file."""

    reply: str
    match: str = ""


class ReplyScript:
    """The lines of ``path``, tokenized with the tokenizer in ``tokenizer_path``.

    Raises ConfigError for a file or a line that cannot be read.

    The file of ``--reply-script`` has a JSON object a line: ``{"reply": "text", "match": "text"}``.
    The first line whose ``match`` occurs in the prompt is the reply; a line without ``match``
    always is.
    """

    def __init__(self, path: str, tokenizer_path: Path) -> None:
        import tokenizers  # takes 20 ms: only for a script

        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
        self._lines = [(line.match, self._ids(line.reply)) for line in _read(path)]

    def reply(self, prompt: Tokens, max_tokens: int) -> Reply | None:
        """Return the reply to ``prompt``, and "length" if ``max_tokens`` cuts it, else "stop".

        None if no line matches.
        """
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        for match, ids in self._lines:
            if match in text:
                cut = ids[:max_tokens]
                return Reply(iter(cut), len(cut), "stop" if len(cut) == len(ids) else "length")
        return None

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            raise ConfigError("--reply-script: a `reply` has no tokens; give it some text")
        return ids


def _read(path: str) -> list[ScriptLine]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--reply-script {path}: can't be read: {error}") from None
    script = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                script.append(msgspec.json.decode(line, type=ScriptLine))
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"--reply-script {path}, line {number}: {error}; each line is an object "
                    'like {"reply": "text", "match": "part of the prompt"}'
                ) from None
    return script


class Reply(NamedTuple):
    """``length`` token ids, at least one, and the finish reason."""

    ids: Iterator[int]
    length: int
    finish_reason: str


def random_reply(max_tokens: int, seed: int | None = None) -> Reply:
    """Return ``max_tokens`` ids in [1000, 2000); equal seeds give equal ids."""
    draw = random.Random(seed)
    batches = (draw.choices(_VOCABULARY, k=_DRAWN_AT_ONCE) for _ in repeat(None))
    return Reply(chain.from_iterable(batches), max_tokens, "length")


def sequence_reply(prompt: Tokens, max_tokens: int, seed: int | None = None) -> Reply:
    """Return ``max_tokens`` ids in [1000, 2000), each of which depends on all tokens before it.

    So the reply to a prompt with the first ids of its reply is the rest, as with greedy decoding.
    Each seed has its own replies. O(prompt).
    """
    # The tokens are the digits of a number to the base 2^32, the next one the most significant.
    total = int.from_bytes(prompt.tobytes(), "little") % _PRIME
    weight = pow(1 << 32, len(prompt), _PRIME)
    return Reply(_sequence(total, weight, seed or 0), max_tokens, "length")


def echo_reply(prompt: Tokens, max_tokens: int, stops: StopConditions | None = None) -> Reply:
    """Return the ids of the prompt and "stop", or "length" if ``max_tokens`` cuts them.

    A prompt with end tokens (``stop_token_ids_hidden``) is a conversation: the reply is the content
    of its last complete turn. What follows is the start of the reply, which another worker may have
    sent in part already: the rest is returned then. As in an engine, the first of the request's
    ``stop_token_ids`` ends the reply. O(prompt).
    """
    stops = stops or StopConditions()
    reply = _last_turn(prompt, stops.stop_token_ids_hidden or ())
    ends = [reply.index(token) for token in stops.stop_token_ids or () if token in reply]
    reply = reply[: min(ends) + 1] if ends else reply
    cut = reply[:max_tokens]
    return Reply(iter(cut), len(cut), "stop" if len(cut) == len(reply) else "length")


def rest_of(reply: Reply, sent: int) -> Reply:
    """Return ``reply`` after its first ``sent`` ids, but at least its last id."""
    skipped = min(sent, reply.length - 1)
    return reply._replace(ids=islice(reply.ids, skipped, None), length=reply.length - skipped)


def _last_turn(prompt: Tokens, ends: Collection[int]) -> Tokens:
    """Return the content of the turn that the last end token ends, that token included."""
    if not any(token in prompt for token in ends):
        return prompt
    last = len(prompt) - 1
    while prompt[last] not in ends:
        last -= 1
    first = last
    while first and prompt[first - 1] not in ends:
        first -= 1
    return _after_header(prompt[first : last + 1], prompt[last + 1 :])


def _after_header(turn: Tokens, begun: Tokens) -> Tokens:
    """Return ``turn`` without the tokens that name its role, and without what ``begun`` has of it.

    ``begun`` is the start of the next turn. Templates write the same tokens around the name of each
    role, as in ``<|im_start|>user``; without such tokens the turn is returned as it is.
    """
    before = _common(turn, begun, (0, 0))
    header = _common(turn, begun, _equal(turn, begun, before)) if before else None
    if header is None:
        return turn
    return turn[_equal(turn, begun, header)[0] :] or turn[-1:]


def _common(turn: Tokens, begun: Tokens, start: tuple[int, int]) -> tuple[int, int] | None:
    """Return the places behind the first token that both have near ``start``."""
    near = begun[start[1] : start[1] + _HEADER_TOKENS]
    for index, token in enumerate(turn[start[0] : start[0] + _HEADER_TOKENS], start[0] + 1):
        if token in near:
            return index, start[1] + near.index(token) + 1
    return None


def _equal(turn: Tokens, begun: Tokens, start: tuple[int, int]) -> tuple[int, int]:
    """Return the places behind the tokens that are the same in both from ``start`` on."""
    index, begun_index = start
    while index < len(turn) and begun_index < len(begun) and turn[index] == begun[begun_index]:
        index, begun_index = index + 1, begun_index + 1
    return index, begun_index


def _sequence(total: int, weight: int, seed: int) -> Iterator[int]:
    while True:
        token = _VOCABULARY[(total + seed) % _PRIME % len(_VOCABULARY)]
        yield token
        total = (total + token * weight) % _PRIME
        weight = (weight << 32) % _PRIME
