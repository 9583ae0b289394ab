"""``truncate_prompt_tokens``: keep a part of a prompt that is too long, as vLLM's server does."""

from __future__ import annotations

from dynamo.errors import InvalidArgument
from dynamo.frontend.text.token_frames import Cut
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.codec import Tokens
from dynamo.protocols.openai import GenerationRequest

_SPARE = 64
"""Tokens of a long text beyond those that are kept: the first ones of a cut text may differ."""


def prompt_cut(request: GenerationRequest, context: int | None) -> Cut | None:
    """Return how the prompts of ``request`` are cut, None if they are not.

    Raises InvalidArgument.
    """
    count = request.truncate_prompt_tokens
    if count == -1 and context is not None:
        count = context - 1  # leaves room for one token of output
    if count is None or count == -1:
        return None
    if context is not None and count > context:
        raise InvalidArgument(
            f"Validation: 'truncate_prompt_tokens' must be at most {context}, the context of the "
            f"model, got {count}"
        )
    if not count:
        raise InvalidArgument(
            "Validation: 'truncate_prompt_tokens' of 0 leaves no prompt; send at least 1, or -1 "
            "for what fits into the context"
        )
    side = request.truncation_side
    return Cut(count, side or "left", slices=side is not None)


def cut_ids(tokenizer: Tokenizer, text: str, cut: Cut, add_special_tokens: bool) -> Tokens:
    """The ids of the part of ``text`` to keep. O(tokens that are kept), or O(text)."""
    most = tokenizer.most_characters(cut.limit + _SPARE)
    if most is not None and len(text) > most:
        text = text[:most] if cut.side == "right" else text[-most:]
    return tokenizer.frames.cut(tokenizer.encode(text, add_special_tokens), cut, add_special_tokens)
