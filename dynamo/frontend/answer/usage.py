"""Token counts of an answer: generated tokens are counted here, the prompt as the engine says."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dynamo.frontend.answer.choice import Choice
from dynamo.frontend.prompt.preprocessor import Prepared

__all__ = ["Usage", "count_usage"]


class Usage(NamedTuple):
    """Tokens of all prompts (each counted once), of all choices, and those of the prompts that the
    engines did not have to compute (None if no engine said)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    def to_json(self) -> bytes:
        """The ``usage`` object."""
        prompt, completion, cached = self
        return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b}' % (
            prompt,
            completion,
            prompt + completion,
            b"" if cached is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % cached,
        )


def count_usage(prepared: Prepared, choices: Sequence[Choice], own_count: Collection[int]) -> Usage:
    """What was used so far. A prompt's tokens are the engine's count where it gave one, ours for
    the choices in ``own_count``. Spec 5.8."""
    prompt_tokens = 0
    cached_tokens: int | None = None
    for place, prompt in enumerate(prepared.prompts):
        index = place * prepared.n
        said = choices[index].usage
        if said is None or not said.prompt_tokens or index in own_count:
            prompt_tokens += len(prompt.token_ids)
        else:
            prompt_tokens += said.prompt_tokens
        details = said.prompt_tokens_details if said is not None else None
        if details is not None and details.cached_tokens is not None:
            cached_tokens = (cached_tokens or 0) + details.cached_tokens
    completion_tokens = sum([choice.tokens for choice in choices])
    return Usage(prompt_tokens, completion_tokens, cached_tokens)
