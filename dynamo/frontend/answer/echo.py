"""Prompts repeated before the answer: ``echo`` of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dynamo.errors import InvalidArgument
from dynamo.frontend.answer.logprobs import CompletionToken
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.detokenizer import make_detokenizer
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.openai import MAX_ECHOED_CHARACTERS, MAX_ECHOED_TOKENS, CompletionRequest

__all__ = ["EchoedPrompt", "echoed_prompts"]


class EchoedPrompt(NamedTuple):
    """The text of a prompt and, for ``logprobs``, its tokens."""

    text: str
    rows: list[CompletionToken]


def echoed_prompts(
    request: CompletionRequest, prepared: Prepared, tokenizer: Tokenizer
) -> list[EchoedPrompt]:
    """Return the prompts to repeat, shared by the choices.

    Raises InvalidArgument for more than an answer may repeat. O(tokens).
    """
    n, prompts = prepared.n, prepared.prompts
    texts = [
        tokenizer.decode(each.token_ids) if each.text is None else each.text for each in prompts
    ]
    characters = n * sum(map(len, texts))
    if characters > MAX_ECHOED_CHARACTERS:
        raise InvalidArgument(
            f"Validation: 'echo' repeats at most {MAX_ECHOED_CHARACTERS} characters of prompts "
            f"in all choices, got {characters}; send fewer prompts or a smaller 'n'"
        )
    if request.logprobs is None:
        return [EchoedPrompt(text, []) for text in texts]
    count = n * prepared.prompt_tokens
    if count > MAX_ECHOED_TOKENS:
        raise InvalidArgument(
            f"Validation: 'echo' with 'logprobs' lists at most {MAX_ECHOED_TOKENS} prompt "
            f"tokens in all choices, got {count}; leave 'echo' out or send a shorter prompt"
        )
    return [
        EchoedPrompt(text, _rows(tokenizer, each.token_ids, text))
        for each, text in zip(prompts, texts, strict=True)
    ]


def _rows(tokenizer: Tokenizer, ids: Iterable[int], text: str) -> list[CompletionToken]:
    """The tokens of a prompt echoed as ``text``. O(tokens).

    Log probabilities are None until an engine sends those of the prompt. A special token that the
    tokenizer added (``<s>`` at the beginning) takes no characters of the text.
    """
    rows, offset = [], 0
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
    for token_id in ids:
        token = tokenizer.token_text(token_id)
        rows.append(CompletionToken(token, None, None, offset))
        if token_id not in tokenizer.special_ids or text.startswith(token, offset):
            offset += len(detokenizer.push((token_id,)))
    return rows
