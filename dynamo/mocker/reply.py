"""What the pretended engine says: random token ids, or the prompt itself. Spec 10.5."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, repeat
from typing import NamedTuple

from dynamo.protocols.codec import Tokens

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


def echo_reply(prompt: Tokens, max_tokens: int) -> Reply:
    """The prompt's own ids, then "stop"; "length" if ``max_tokens`` cuts it short."""
    said = prompt[:max_tokens]
    return Reply(iter(said), len(said), "stop" if len(said) == len(prompt) else "length")
