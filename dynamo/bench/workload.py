"""Planned requests from a trace or synthetic settings. Pure: no clock, no socket.

A prompt is a list of *segments* (id, tokens); equal segments at equal positions become equal text,
so that prefix caches get the same hits in the replay as in production.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo.bench.trace_formats import TraceRequest

_VOCABULARY = (
    "the of and to in is that for it was on are as with his they at be this from have or by "
    "one had not but what all were when we there can an your which their said if do will each "
    "about how up out them then she many some so these would other into has more her two like "
    "him see time could no make than first been its who now people my made over did down only "
    "way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look "
    "think also around another came come work three word must because does part even place "
    "well such here take why things help put years"
)
WORDS = _VOCABULARY.split()
FIRST_TOKEN_ID, TOKEN_IDS = 1000, 1000
_UNSHARED = -10  # and below: ids of prompts that share nothing; those above have other uses


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: due ``at_s`` seconds after the start, or at once when None.

    ``segments`` of the prompt are pairs (id, tokens). A turn of a session is due ``delay_s`` after
    the answer to request number ``after``, if that is later.
    """

    at_s: float | None
    segments: tuple[tuple[int, int], ...]
    output_tokens: int
    after: int | None = None
    delay_s: float = 0.0

    @property
    def input_tokens(self) -> int:
        """Planned length of the prompt in tokens."""
        return sum(tokens for _, tokens in self.segments)


def from_trace(
    requests: Sequence[TraceRequest],
    *,
    block_tokens: int = 512,
    original_block_tokens: int = 512,
    speedup: float = 1.0,
    output_scale: float = 1.0,
) -> list[PlannedRequest]:
    """Plan the trace, ``speedup`` times faster, with ``block_tokens`` tokens per hash id.

    A prompt without hash ids shares nothing. A trace without times is not scheduled.
    """
    timed = any(request.timestamp for request in requests)
    planned: list[PlannedRequest] = []
    latest: dict[str, int] = {}
    shrink = block_tokens / original_block_tokens
    for request in requests:
        blocks = [(hash_id, block_tokens) for hash_id in request.hash_ids]
        if not blocks:
            whole = max(1, round((request.input_length or 1) * shrink))
            blocks = [(_UNSHARED - len(planned), whole)]
        elif request.input_length is not None:
            # The last block is partial: it holds the tokens beyond the full ones.
            full = (len(blocks) - 1) * original_block_tokens
            tail = max(1, round((request.input_length - full) * shrink))
            blocks[-1] = (blocks[-1][0], min(block_tokens, tail))
        session, after = request.session_id, None
        if session is not None:
            after, latest[session] = latest.get(session), len(planned)
        planned.append(
            PlannedRequest(
                at_s=request.timestamp / 1000 / speedup if timed else None,
                segments=tuple(blocks),
                output_tokens=max(1, round(request.output_length * output_scale)),
                after=after,
                delay_s=request.delay / 1000 / speedup,
            )
        )
    return planned


def synthetic(
    count: int,
    *,
    isl: int,
    osl: int,
    prefix_ratio: float = 0.0,
    rate: float | None = None,
    seed: int = 0,
) -> list[PlannedRequest]:
    """Plan ``count`` prompts of ``isl`` tokens that share their first ``prefix_ratio``.

    Arrivals are Poisson at ``rate`` per second, or unscheduled without a rate (closed loop).
    """
    rng = random.Random(seed)
    shared = round(isl * prefix_ratio)
    at_s, planned = 0.0, []
    for number in range(count):
        segments = [(-1, shared)] if shared else []
        if isl > shared:
            segments.append((number, isl - shared))
        if rate is not None:
            # The gaps of Poisson arrivals have an exponential distribution.
            at_s += rng.expovariate(rate)
        planned.append(PlannedRequest(None if rate is None else at_s, tuple(segments), osl))
    return planned


class Prompts:
    """Renders segments as words or token ids; equal (seed, id, length) gives equal text.

    ``tokens_per_word`` is measured on the endpoint (see ``runner.calibrate``).
    """

    def __init__(self, seed: int = 0, tokens_per_word: float = 1.0, cache_segments: int = 4096):
        self._seed = seed
        self.tokens_per_word = tokens_per_word
        self._cache: dict[tuple[int, int], str] = {}
        self._cache_segments = cache_segments

    def text(self, segments: Iterable[tuple[int, int]]) -> str:
        """Return the prompt as words, of about as many tokens as the segments."""
        return " ".join(self._segment_text(segment) for segment in segments)

    def token_ids(self, segments: Iterable[tuple[int, int]]) -> list[int]:
        """Return the prompt as token ids in [1000, 2000), exactly as many as the segments."""
        ids: list[int] = []
        for identity, tokens in segments:
            rng = self._rng(identity)
            ids.extend(FIRST_TOKEN_ID + rng.randrange(TOKEN_IDS) for _ in range(tokens))
        return ids

    def _segment_text(self, segment: tuple[int, int]) -> str:
        text = self._cache.get(segment)
        if text is None:
            identity, tokens = segment
            rng = self._rng(identity)
            text = " ".join(rng.choices(WORDS, k=max(1, round(tokens / self.tokens_per_word))))
            if len(self._cache) >= self._cache_segments:
                self._cache.pop(next(iter(self._cache)))
            self._cache[segment] = text
        return text

    def _rng(self, identity: int) -> random.Random:
        return random.Random(f"{self._seed}/{identity}")
