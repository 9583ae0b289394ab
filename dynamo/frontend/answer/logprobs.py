"""Log probabilities in the shapes of the OpenAI API, and what an answer repeats of its prompt."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec

from dynamo.errors import EngineFailure, InvalidArgument, shorten
from dynamo.frontend.prompt.preprocessor import Prepared
from dynamo.frontend.text.detokenizer import make_detokenizer
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.engine import KV_TRANSFER, EngineOutput
from dynamo.protocols.openai import (
    MAX_ECHOED_CHARACTERS,
    MAX_ECHOED_TOKENS,
    MAX_PROMPT_LOGPROBS,
    CompletionRequest,
)

_LOWEST = -9999.0
"""In place of minus infinity, which JSON cannot express."""
_KEY = "prompt_logprobs"
_ECHO_KEY = "mm_expansions"
log = logging.getLogger(__name__)


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at one place of the prompt; ``rank`` 1 is the most likely token."""

    token_id: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    logprob: float
    rank: int | None = None


_Rows = list[list[PromptLogprob] | None]


class WrappingCollector(ABC):
    """A collector for one choice that adds to ``inner``, the one of log probabilities if any."""

    def __init__(self, inner: LogprobsCollector | None) -> None:
        self.inner = inner

    @abstractmethod
    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""

    def drain(self) -> dict[str, Any] | None:
        """Return the entries of ``inner`` since the last call."""
        return None if self.inner is None else self.inner.drain()


Kind = TypeVar("Kind", bound=WrappingCollector)


def collector_of(collector: LogprobsCollector | None, kind: type[Kind]) -> Kind | None:
    """The collector of ``kind`` among those that ``collector`` wraps, itself included."""
    while isinstance(collector, WrappingCollector):
        if isinstance(collector, kind):
            return collector
        collector = collector.inner
    return None


class OutputRecord(WrappingCollector):
    """Keeps what few requests show of outputs: token ids, transfer parameters, likelihood."""

    def __init__(self, inner: LogprobsCollector | None) -> None:
        super().__init__(inner)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self.kv_transfer_params: Any = None

    def add(self, output: EngineOutput, count: int) -> None:
        """Add ``output``."""
        self._ids += output.token_ids[:count]
        self._logprobs += (output.log_probs or ())[:count]
        if output.disaggregated_params is not None:
            self.kv_transfer_params = output.disaggregated_params.get(KV_TRANSFER)
        if self.inner is not None:
            self.inner.add(output, count)

    def take_ids(self) -> list[int]:
        """Return the ids since the last call."""
        ids, self._ids = self._ids, []
        return ids

    @property
    def likelihood(self) -> float:
        """The mean log probability of the tokens."""
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else -math.inf


class PromptLogprobs(WrappingCollector):
    """The prompt's log probabilities beside those of ``inner``.

    An engine sends them once, with the first output, in ``extra_args["prompt_logprobs"]``: for each
    token of the prompt None (the first has no probability), or the token itself and then the most
    likely ones, each with ``token_id``, ``logprob`` and ``rank``.
    """

    def __init__(self, tokenizer: Tokenizer, inner: LogprobsCollector | None) -> None:
        super().__init__(inner)
        self._tokenizer = tokenizer
        self._rows: _Rows | None = None

    def add(self, output: EngineOutput, count: int) -> None:
        """Add ``output``. Raises EngineFailure for values that are not log probabilities."""
        if output.extra_args is not None and self._rows is None:
            entries = output.extra_args.get(_KEY)
            if entries is not None:
                rows = self._rows = _rows(entries)
                if isinstance(self.inner, CompletionLogprobs):
                    self.inner.set_echoed(rows)
        if self.inner is not None:
            self.inner.add(output, count)

    def shown(self) -> list[dict[str, Any] | None] | None:
        """What the client reads: for each token None or ``{"id": {logprob, rank, decoded_token}}``,
        as from vLLM's server; None if the engine has sent nothing."""
        if self._rows is None:
            return None
        text = self._tokenizer.token_text
        return [
            None if row is None else dict(_shown(text, token) for token in row)
            for row in self._rows
        ]


def collect_prompt_logprobs(
    prepared: Prepared,
    tokenizer: Tokenizer,
    collectors: Sequence[LogprobsCollector],
    alternatives: int,
) -> Sequence[LogprobsCollector]:
    """Wrap ``collectors``, one for each choice or none, to collect those of the prompt, too.

    Raises InvalidArgument for more entries than an answer may have.
    """
    # Each choice lists each token of its prompt, and its alternatives.
    entries = prepared.n * prepared.prompt_tokens * (alternatives + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            f"Validation: 'prompt_logprobs', or 'echo' with 'logprobs', lists at most "
            f"{MAX_PROMPT_LOGPROBS} tokens and alternatives of prompts in all choices, got "
            f"{entries}; send a shorter prompt or a smaller number"
        )
    inners: Sequence[LogprobsCollector | None] = collectors or [None] * len(prepared.requests)
    return [PromptLogprobs(tokenizer, inner) for inner in inners]


def _rows(value: Any) -> _Rows:
    try:
        return msgspec.convert(value, _Rows)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise EngineFailure(f"{_KEY} are invalid: {shorten(error, 200)}") from None


def _shown(text: Callable[[int], str], token: PromptLogprob) -> tuple[str, dict[str, Any]]:
    decoded = text(token.token_id)
    entry = {"logprob": finite(token.logprob), "rank": token.rank, "decoded_token": decoded}
    return str(token.token_id), entry


class LogprobsCollector(Protocol):
    """Collects what engine outputs report until a chunk is written."""

    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""

    def drain(self) -> dict[str, Any] | None:
        """Return everything since the last call, as the API shows it; None if that is nothing."""


class ChatLogprobs:
    """``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._entries: list[dict[str, Any]] = []

    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""
        for token_id, logprob, top in _tokens(output, count):
            entry = _entry(self._tokenizer, token_id, logprob)
            entry["top_logprobs"] = [
                _entry(self._tokenizer, token.get("token_id"), token["logprob"], token.get("token"))
                for token in top[: self._alternatives]
            ]
            self._entries.append(entry)

    def drain(self) -> dict[str, Any] | None:
        """Return everything since the last call; None if that is nothing."""
        if not self._entries:
            return None
        taken, self._entries = self._entries, []
        return {"content": taken, "refusal": None}


class CompletionToken(NamedTuple):
    """A token of a completion: text, log probability, alternatives, offset in the text."""

    token: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int


class CompletionLogprobs:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, four columns of one length.

    With ``echo`` the text begins with the prompt: ``echoed`` are its tokens, ``offset`` is the
    number of its characters. A character of several tokens counts once, with the last of them, and
    with ``skip_special`` special tokens have no characters, as in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        alternatives: int,
        skip_special: bool = True,
        echoed: Iterable[CompletionToken] = (),
        offset: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._detokenizer = make_detokenizer(tokenizer, skip_special)
        self._offset = offset
        self._rows = list(echoed)

    def set_echoed(self, rows: _Rows) -> None:
        """Set the log probabilities of the echoed tokens: a row for each, itself first."""
        # An engine may send fewer rows than there are tokens.
        for index, (echoed, row) in enumerate(zip(self._rows, rows, strict=False)):
            if row:
                decode = self._tokenizer.token_text
                top = {decode(token.token_id): finite(token.logprob) for token in row}
                self._rows[index] = echoed._replace(logprob=finite(row[0].logprob), top=top)

    def add(self, output: EngineOutput, count: int) -> None:
        """Add the first ``count`` tokens of ``output``."""
        for token_id, logprob, top in _tokens(output, count):
            token = self._tokenizer.token_parts(token_id)[0]
            ranked = {
                _name(self._tokenizer, alternative): finite(alternative["logprob"])
                for alternative in top[: self._alternatives]
            }
            self._rows.append(CompletionToken(token, finite(logprob), ranked or None, self._offset))
            # A part of a character adds nothing: the offset moves with its last token.
            self._offset += len(self._detokenizer.push((token_id,)))

    def drain(self) -> dict[str, Any] | None:
        """Return everything since the last call; None if that is nothing."""
        if not self._rows:
            return None
        taken, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return dict(zip(names, zip(*taken, strict=True), strict=True))


def finite(value: float) -> float:
    """``value``, or the lowest one that JSON can express in place of minus infinity."""
    return value if math.isfinite(value) else _LOWEST


def _tokens(
    output: EngineOutput, count: int
) -> list[tuple[int, float, Sequence[Mapping[str, Any]]]]:
    """(id, log probability, alternatives) for each token that has a log probability."""
    ids, logprobs = output.token_ids[:count], output.log_probs or []
    top: list[list[dict[str, Any]]] = output.top_logprobs or []
    return [
        (token_id, logprobs[index], top[index] if index < len(top) else ())
        for index, token_id in enumerate(ids[: len(logprobs)])
    ]


def _entry(
    tokenizer: Tokenizer, token_id: int | None, logprob: float, name: Any = None
) -> dict[str, Any]:
    """A token with the text ``name``, or else its own."""
    token, raw = tokenizer.token_parts(token_id) if token_id is not None else ("", None)
    if isinstance(name, str):
        token = name
    raw = list(token.encode()) if raw is None else raw
    return {"token": token, "logprob": finite(logprob), "bytes": raw}


def _name(tokenizer: Tokenizer, alternative: Mapping[str, Any]) -> str:
    token = alternative.get("token")
    if isinstance(token, str):
        return token
    token_id = alternative.get("token_id")
    return tokenizer.token_parts(token_id)[0] if token_id is not None else ""


class ImageTokens(WrappingCollector):
    """Keeps the tokens of images, and passes outputs to ``inner``.

    Later requests with the same image, most often the next turn of the conversation, are then
    routed by the prompt as the engine caches it.
    """

    def __init__(self, prepared: Prepared, inner: LogprobsCollector | None) -> None:
        super().__init__(inner)
        self._prepared = prepared

    def add(self, output: EngineOutput, count: int) -> None:
        """Add ``output``."""
        id_lists = None if output.extra_args is None else output.extra_args.get(_ECHO_KEY)
        if id_lists is not None:
            self._learn(id_lists)
        if self.inner is not None:
            self.inner.add(output, count)

    def _learn(self, id_lists: Any) -> None:
        images = self._prepared.images
        assert images is not None, "collect_image_tokens is for requests with images"
        try:
            # They only make routing better: the answer goes on without them.
            expansions = list(map(_ids, id_lists))
        except (TypeError, ValueError, OverflowError) as error:
            log.warning("ignoring %s of an engine: %s", _ECHO_KEY, error)
            return
        if len(expansions) == len(images.hashes):
            for image_hash, ids in zip(images.hashes, expansions, strict=True):
                images.expansions.put(image_hash, ids)


def collect_image_tokens(
    prepared: Prepared, collectors: Sequence[LogprobsCollector]
) -> Sequence[LogprobsCollector]:
    """Wrap ``collectors``, one for each choice or none, for a prompt with images."""
    inners: Sequence[LogprobsCollector | None] = collectors or [None] * len(prepared.requests)
    return [ImageTokens(prepared, inner) for inner in inners]


def record_outputs(
    prepared: Prepared, collectors: Sequence[LogprobsCollector]
) -> Sequence[LogprobsCollector]:
    """Wrap ``collectors``, one for each choice or none, to record the outputs."""
    inners: Sequence[LogprobsCollector | None] = collectors or [None] * len(prepared.requests)
    return list(map(OutputRecord, inners))


def _ids(ids: Any) -> Tokens:
    """Raise TypeError or OverflowError for a value that is no list of ids."""
    if not isinstance(ids, array | list):
        raise TypeError(f"expected token ids, got {type(ids).__name__}")
    return tokens(ids)


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
        tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text
        for prompt in prompts
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
        EchoedPrompt(text, _echo_rows(tokenizer, prompt.token_ids, text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def _echo_rows(tokenizer: Tokenizer, ids: Iterable[int], text: str) -> list[CompletionToken]:
    """The tokens of a prompt echoed as ``text``. O(tokens).

    Log probabilities are None until an engine sends those of the prompt. A special token that the
    tokenizer added (``<s>`` at the beginning) takes no characters of the text.
    """
    rows, offset = [], 0
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=False)
    for token_id in ids:
        rows.append(CompletionToken(tokenizer.token_text(token_id), None, None, offset))
        own_text = tokenizer.token_bytes(token_id).decode(errors="replace")
        if token_id not in tokenizer.special_ids or text.startswith(own_text, offset):
            offset += len(detokenizer.push((token_id,)))
    return rows
