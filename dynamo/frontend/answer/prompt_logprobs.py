"""Log probabilities of the prompt's tokens: ``prompt_logprobs``, and ``echo`` with ``logprobs``.

An engine sends them once, with the first output, in ``extra_args["prompt_logprobs"]``: for each
token of the prompt None (the first has no probability), or the token itself and then the most
likely ones, each with ``token_id``, ``logprob`` and ``rank``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from dynamo.errors import EngineFailure, InvalidArgument, shorten
from dynamo.frontend.answer.logprobs import CompletionLogprobs, LogprobsCollector, finite
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.engine import EngineOutput
from dynamo.protocols.openai import MAX_PROMPT_LOGPROBS

__all__ = ["PromptLogprob", "PromptLogprobs", "collect_prompt_logprobs"]

_KEY = "prompt_logprobs"


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at one place of the prompt; ``rank`` 1 is the most likely token."""

    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    logprob: float
    rank: int | None = None


_Rows = list[list[PromptLogprob] | None]


class PromptLogprobs:
    """A collector for one choice: the prompt's log probabilities beside those of ``inner``."""

    def __init__(self, tokenizer: Tokenizer, inner: LogprobsCollector | None) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._rows: _Rows | None = None

    def add(self, output: EngineOutput, count: int) -> None:
        """Add ``output``. Raises EngineFailure for values that are not log probabilities."""
        if output.extra_args is not None and self._rows is None:
            given = output.extra_args.get(_KEY)
            if given is not None:
                rows = self._rows = _rows(given)
                if isinstance(self._inner, CompletionLogprobs):
                    self._inner.set_echoed(list(map(_probabilities, rows)))
        if self._inner is not None:
            self._inner.add(output, count)

    def drain(self) -> dict[str, Any] | None:
        """Return the entries of ``inner`` since the last call."""
        return None if self._inner is None else self._inner.drain()

    def shown(self) -> list[dict[str, Any] | None] | None:
        """What the client reads: for each token None or ``{"id": {logprob, rank, decoded_token}}``,
        as from vLLM's server; None if the engine has sent nothing."""
        if self._rows is None:
            return None
        text = self._tokenizer.token_text
        return [
            None if row is None else dict(_shown(text, each) for each in row) for row in self._rows
        ]


def collect_prompt_logprobs(
    prepared: Prepared, tokenizer: Tokenizer, collectors: Sequence[LogprobsCollector]
) -> Sequence[LogprobsCollector]:
    """Wrap ``collectors``, one for each choice or none, if the engine is asked for the prompt's.

    Raises InvalidArgument for more entries than an answer may have.
    """
    alternatives = prepared.requests[0].output_options.prompt_logprobs
    if alternatives is None:
        return collectors
    entries = prepared.n * prepared.prompt_tokens * (alternatives + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            f"Validation: 'prompt_logprobs', or 'echo' with 'logprobs', lists at most "
            f"{MAX_PROMPT_LOGPROBS} tokens and alternatives of prompts in all choices, got "
            f"{entries}; send a shorter prompt or a smaller number"
        )
    found: Sequence[LogprobsCollector | None] = collectors or [None] * len(prepared.requests)
    return [PromptLogprobs(tokenizer, each) for each in found]


def _rows(given: Any) -> _Rows:
    try:
        return msgspec.convert(given, _Rows)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineFailure(f"{_KEY} are invalid: {shorten(error, 200)}") from None


def _probabilities(row: list[PromptLogprob] | None) -> list[tuple[int, float]]:
    return [] if row is None else [(each.token_id, each.logprob) for each in row]


def _shown(text: Callable[[int], str], one: PromptLogprob) -> tuple[str, dict[str, Any]]:
    entry = {
        "logprob": finite(one.logprob),
        "rank": one.rank,
        "decoded_token": text(one.token_id),
    }
    return str(one.token_id), entry
