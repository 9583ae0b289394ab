"""What the pretended engine says: random token ids, or the prompt itself. Spec 10.5."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from itertools import chain, repeat
from typing import NamedTuple

from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import StopConditions

__all__ = ["REPLIES", "Reply", "echo_reply", "random_reply"]

REPLIES = ("random", "echo")
_VOCABULARY = range(1000, 2000)
_LUMP = 32


class Reply(NamedTuple):
    """``length`` token ids, at least one, and why the last of them is the last."""

    ids: Iterator[int]
    length: int
    finish_reason: str


def random_reply(max_tokens: int, seed: int | None = None) -> Reply:
    """``max_tokens`` ids in [1000, 2000); equal seeds give equal ids."""
    draw = random.Random(seed)
    lumps = (draw.choices(_VOCABULARY, k=_LUMP) for _ in repeat(None))
    return Reply(chain.from_iterable(lumps), max_tokens, "length")


def echo_reply(prompt: Tokens, max_tokens: int, stops: StopConditions | None = None) -> Reply:
    """The prompt's own ids, then "stop"; "length" if ``max_tokens`` cuts it short.

    Like an engine it ends with the first of its end tokens (``stop_token_ids_hidden``) or of the
    request's ``stop_token_ids``. Of a prompt that has end tokens, a conversation, it says the last
    turn that is complete. O(prompt).
    """
    stops = stops or StopConditions()
    said = _last_turn(prompt, stops.stop_token_ids_hidden or ())
    ends = [said.index(token) for token in stops.stop_token_ids or () if token in said]
    said = said[: min(ends) + 1] if ends else said
    cut = said[:max_tokens]
    return Reply(iter(cut), len(cut), "stop" if len(cut) == len(said) else "length")


def _last_turn(prompt: Tokens, ends: Collection[int]) -> Tokens:
    """The ids up to the last end token, that included, from the one before."""
    if not any(token in prompt for token in ends):
        return prompt
    last = len(prompt) - 1
    while prompt[last] not in ends:
        last -= 1
    first = last
    while first and prompt[first - 1] not in ends:
        first -= 1
    return prompt[first : last + 1]
