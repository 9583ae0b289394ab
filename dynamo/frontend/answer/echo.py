"""What an answer repeats of its prompt: echoed text and image tokens.

Later requests with the same image, most often the next turn of the conversation, are then routed by
the prompt as the engine caches it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from dynamo.errors import InvalidArgument
from dynamo.frontend.answer.logprobs import CompletionToken, LogprobsCollector
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.detokenizer import make_detokenizer
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.openai import MAX_ECHOED_CHARACTERS, MAX_ECHOED_TOKENS, CompletionRequest

_KEY = "mm_expansions"
log = logging.getLogger(__name__)


class ImageTokens:
    """A collector for one choice: keeps the tokens of images, and passes outputs to ``inner``."""

    def __init__(self, prepared: Prepared, inner: LogprobsCollector | None) -> None:
        self._prepared = prepared
        self._inner = inner

    def add(self, output: EngineOutput, count: int) -> None:
        """Add ``output``."""
        given = None if output.extra_args is None else output.extra_args.get(_KEY)
        if given is not None:
            self._learn(given)
        if self._inner is not None:
            self._inner.add(output, count)

    def drain(self) -> dict[str, Any] | None:
        """Return the entries of ``inner`` since the last call."""
        return None if self._inner is None else self._inner.drain()

    def _learn(self, given: Any) -> None:
        images = self._prepared.images
        assert images is not None, "collect_image_tokens is for requests with images"
        try:
            found = [_ids(each) for each in given]
        except (TypeError, ValueError, OverflowError) as error:
            log.warning("ignoring %s of an engine: %s", _KEY, error)
            return
        if len(found) == len(images.hashes):
            for image_hash, ids in zip(images.hashes, found, strict=True):
                images.expansions.put(image_hash, ids)


def collect_image_tokens(
    prepared: Prepared, collectors: Sequence[LogprobsCollector]
) -> Sequence[LogprobsCollector]:
    """Wrap ``collectors``, one for each choice or none, for a prompt with images."""
    found: Sequence[LogprobsCollector | None] = collectors or [None] * len(prepared.requests)
    return [ImageTokens(prepared, each) for each in found]


def _ids(given: Any) -> Tokens:
    """Raise TypeError or OverflowError for a value that is no list of ids."""
    if not isinstance(given, array | list):
        raise TypeError(f"expected token ids, got {type(given).__name__}")
    return tokens(given)


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
