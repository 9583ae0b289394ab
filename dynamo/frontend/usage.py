"""Token counts of an answer: generated tokens are counted here, the prompt as the engine says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dynamo.frontend.choice import Choice
from dynamo.frontend.preprocessor import Prepared

__all__ = ["cached_tokens", "completion_tokens", "prompt_tokens", "usage_json"]


def completion_tokens(choices: Sequence[Choice]) -> int:
    """Tokens generated so far, all choices."""
    return sum([choice.tokens for choice in choices])


def prompt_tokens(prepared: Prepared, choices: Sequence[Choice], own_count: Collection[int]) -> int:
    """Tokens of all prompts, each counted once: the engine's count where it gave one, ours for
    the choices in ``own_count``. Spec 5.8."""
    total = 0
    for place, prompt in enumerate(prepared.prompts):
        index = place * prepared.n
        usage = choices[index].usage
        if usage is not None and usage.prompt_tokens and index not in own_count:
            total += usage.prompt_tokens
        else:
            total += len(prompt.token_ids)
    return total


def cached_tokens(prepared: Prepared, choices: Sequence[Choice]) -> int | None:
    """Prompt tokens that the engines did not have to compute, None if none of them said."""
    found = [
        usage.prompt_tokens_details.cached_tokens
        for choice in choices[:: prepared.n]
        if (usage := choice.usage) is not None
        and usage.prompt_tokens_details is not None
        and usage.prompt_tokens_details.cached_tokens is not None
    ]
    return sum(found) if found else None


def usage_json(prompt: int, completion: int, cached: int | None) -> bytes:
    """The ``usage`` object."""
    return b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d%b}' % (
        prompt,
        completion,
        prompt + completion,
        b"" if cached is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % cached,
    )
