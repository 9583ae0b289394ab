"""From a body of a pooling API to token ids: texts, lists of ids, chats, and pairs of texts.

Two texts for a cross-encoder are one input, made as vLLM's server makes it: by the template that
the worker was given, with the tokenizer's own tokens around and between them, or simply joined. For
a model of embeddings they are two inputs, whose vectors the worker compares.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.template import template_variables
from dynamo.frontend.prompt.validation import check_chat
from dynamo.frontend.text.token_frames import Cut, Side, TokenFrame, shortened
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.openai import MAX_EMBEDDING_INPUTS, ChatCompletionRequest
from dynamo.protocols.pooling import CROSS_ENCODER, InputBody, PairBody, PoolingFacts

MAX_BATCH_TOKENS = 1 << 20
"""Tokens of all inputs of a request, before they are cut."""
_ROLES = ("query", "document")
"""The messages of a pair in a template for scores."""


class Inputs(NamedTuple):
    """What the worker gets; the fields are those of its message."""

    token_ids: list[Tokens]
    queries: int = 0
    type_one_at: list[int] | None = None

    @property
    def vectors(self) -> int:
        """The vectors, or scores, that the worker returns."""
        return len(self.token_ids) - self.queries

    @property
    def joined(self) -> Tokens:
        """The ids of all inputs one after another: what the router counts as the prompt."""
        if len(self.token_ids) == 1:
            return self.token_ids[0]
        ids = array("I")
        for input_ids in self.token_ids:
            ids.extend(input_ids)
        return ids


def text_inputs(preprocessor: Preprocessor, facts: PoolingFacts, request: InputBody) -> Inputs:
    """Return the ids of each input. Thread-safe. Raises InvalidArgument. O(characters)."""
    field = "input" if request.messages is None else "messages"
    encoder = _Encoder(preprocessor, facts, request, field)
    return Inputs(encoder.bounded(_entries(encoder, request)))


def pair_inputs(preprocessor: Preprocessor, facts: PoolingFacts, request: PairBody) -> Inputs:
    """Return the ids of pairs, or of queries and of the texts that are compared with them.

    As :func:`text_inputs`.
    """
    try:
        first, second = request.pair_texts
    except ValueError as error:
        raise InvalidArgument(f"Validation: {error}") from None
    if not first or not second:
        raise InvalidArgument("Validation: at least one text and one to compare it with are needed")
    if len(second) > MAX_EMBEDDING_INPUTS:
        raise InvalidArgument(
            f"Validation: at most {MAX_EMBEDDING_INPUTS} documents in a request, got {len(second)}"
        )
    if len(first) not in (1, len(second)):
        raise InvalidArgument(
            f"Validation: {len(first)} first texts and {len(second)} second ones; give one for all "
            "or as many as there are second ones"
        )
    if not facts.scoring:
        raise InvalidArgument(
            f"Model `{shorten(request.model)}` cannot score texts: its workers do not say how "
            "(`pooling` in the runtime_data of their cards)"
        )
    encoder = _Encoder(preprocessor, facts, request, "documents")
    if facts.scoring != CROSS_ENCODER:
        limits = (*[request.max_tokens_per_query] * len(first),
                  *[request.max_tokens_per_doc] * len(second))  # fmt: skip
        texts = zip((*first, *second), limits, strict=True)
        rows = (encoder.limited(text, limit) for text, limit in texts)
        return Inputs(encoder.bounded(rows), queries=len(first))
    pairs = _Pairs(encoder, request)
    first = first * len(second) if len(first) == 1 else first
    rows = (pairs.encode(*texts) for texts in zip(first, second, strict=True))
    ids = encoder.bounded(rows)
    return Inputs(ids, type_one_at=pairs.type_one_at if facts.token_types else None)


class _Encoder:
    """Makes the ids of one request's texts. Errors name ``field``."""

    def __init__(
        self,
        preprocessor: Preprocessor,
        facts: PoolingFacts,
        request: InputBody | PairBody,
        field: str,
    ) -> None:
        self.preprocessor = preprocessor
        self.field = field
        self.facts = facts
        self.total = 0  # ids before any text is cut
        self.request = request
        self.side: Side = "left" if facts.truncates_left else "right"
        self.cut = self._cut(request.truncate_prompt_tokens)

    def plain(self, text: str) -> Tokens:
        """The ids of a text without special tokens, counted. Raises InvalidArgument."""
        return self.count(self.preprocessor.tokenizer.encode(text))

    def text(self, text: str, special: bool = True) -> Tokens:
        """The ids of one text, cut if the request asks for it."""
        tokenizer, cut = self.preprocessor.tokenizer, self.cut
        ids = self.count(tokenizer.encode(text, special))
        return ids if cut is None else tokenizer.frames.cut(ids, cut, special)

    def limited(self, text: str, limit: int) -> Tokens:
        """The ids of one text of which at most ``limit`` tokens count, if that is not 0."""
        return self.text(self.limited_text(text, limit))

    def limited_text(self, text: str, limit: int) -> str:
        """The text of its first ``limit`` tokens, if that is not 0."""
        if not limit:
            return text
        ids = self.plain(text)
        if len(ids) <= limit:
            return text
        return self.preprocessor.tokenizer.decode(ids[:limit], skip_special_tokens=False)

    def ids(self, entry: list[int]) -> Tokens:
        """The ids of an input of ids, checked."""
        tokenizer, largest = self.preprocessor.tokenizer, max(entry)
        if largest >= tokenizer.vocab_size:
            raise InvalidArgument(
                f"Validation: token id {shorten(largest)} is out of range, the vocabulary has "
                f"{tokenizer.vocab_size} tokens"
            )
        ids = self.count(tokens(entry))
        return ids if self.cut is None else shortened(ids, self.cut.limit, self.cut.side)

    def chat(self, messages: list[dict[str, Any]]) -> Tokens:
        """The ids of a chat, by the model's template."""
        request = self.request
        assert isinstance(request, InputBody)
        images = self.preprocessor.images
        if images is not None and images.read(messages) is not None:
            raise InvalidArgument(
                "Validation: 'messages' of this API have texts alone; images are not embedded"
            )
        chat = ChatCompletionRequest(
            model=request.model,
            messages=messages,
            add_special_tokens=request.add_special_tokens,
            add_generation_prompt=request.add_generation_prompt is True,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        ids = self.count(self.preprocessor.chat_tokens(check_chat(chat)))
        return ids if self.cut is None else shortened(ids, self.cut.limit, self.cut.side)

    def bounded(self, rows: Iterable[Tokens]) -> list[Tokens]:
        """Return the rows, of which each has to fit into the context. Raises InvalidArgument."""
        limit, inputs = self.preprocessor.context_length, []
        for number, ids in enumerate(rows):
            if limit is not None and len(ids) > limit:
                raise InvalidArgument(
                    f"This model's maximum context length is {limit} tokens. However, "
                    f"'{self.field}' {number} has {len(ids)} tokens. Please shorten it, or cut "
                    "it by 'truncate_prompt_tokens'."
                )
            if not ids:
                raise InvalidArgument(f"Validation: '{self.field}' {number} has no tokens")
            inputs.append(ids)
        return inputs

    def count(self, ids: Tokens) -> Tokens:
        """Add ids to the total, and return them. Raises InvalidArgument above the limit."""
        # Checked with each: the inputs behind the limit are not tokenized.
        self.total += len(ids)
        if self.total > MAX_BATCH_TOKENS:
            raise InvalidArgument(
                f"Validation: '{self.field}' takes at most {MAX_BATCH_TOKENS} tokens in all, got "
                "more; send fewer inputs in a request"
            )
        return ids

    def _cut(self, limit: int | None) -> Cut | None:
        if limit is None:
            return None
        context = self.preprocessor.context_length
        if limit == 0 or (context is not None and limit > context):
            raise InvalidArgument(
                f"Validation: 'truncate_prompt_tokens' is {limit}, it must be -1 or between 1 and "
                f"the {context} tokens of the context"
            )
        if limit < 0 and context is None:
            raise InvalidArgument(
                "Validation: 'truncate_prompt_tokens' is -1, but this model states no context; "
                "give a number of tokens"
            )
        side = self.request.truncation_side
        kept = limit if limit > 0 else context or 0
        return Cut(kept, side or self.side, slices=side is not None)


class _Pairs:
    """Makes one input of two texts, for a cross-encoder.

    ``type_one_at`` has for each pair so far where the second text begins.
    """

    def __init__(self, encoder: _Encoder, request: PairBody) -> None:
        self.type_one_at: list[int] = []
        self._encoder = encoder
        self._request = request
        self._firsts: dict[str, Tokens] = {}  # one text is often the first of all pairs
        self._form = self._choose_form()

    def encode(self, first: str, second: str) -> Tokens:
        """Return the ids of a pair. Raises InvalidArgument."""
        return self._form(first, second)

    def _choose_form(self) -> Callable[[str, str], Tokens]:
        encoder, request = self._encoder, self._request
        card, tokenizer = encoder.preprocessor.card, encoder.preprocessor.tokenizer
        if card.custom_template_path:
            return self._rendered
        if request.instruction is not None or request.chat_template_kwargs:
            raise InvalidArgument(
                f"Validation: 'instruction' and 'chat_template_kwargs' need a template for scores; "
                f"give the worker of `{shorten(request.model)}` one with --custom-jinja-template"
            )
        if not encoder.facts.separates:
            return self._concatenated
        if tokenizer.frames.pair is None:
            raise InvalidArgument(
                f"Model `{shorten(request.model)}` cannot score pairs: its tokenizer.json has no "
                "usable form of two texts (post_processor)"
            )
        return self._framed

    def _framed(self, first: str, second: str) -> Tokens:
        encoder, request = self._encoder, self._request
        frame: TokenFrame | None = encoder.preprocessor.tokenizer.frames.pair
        assert frame is not None, "checked in _choose_form"
        ids = self._firsts.get(first)
        if ids is None:
            limit = request.max_tokens_per_query
            ids = encoder.plain(first)
            ids = self._firsts[first] = ids[:limit] if limit else ids
        else:
            encoder.count(ids)
        other = encoder.plain(second)
        if request.max_tokens_per_doc:
            other = other[: request.max_tokens_per_doc]
        cut = encoder.cut
        if cut is not None and request.max_tokens_per_doc:
            cut = cut._replace(second_only=True)
        single = encoder.preprocessor.tokenizer.frames.single
        if not second and single is not None:  # the library of vLLM's tokenizers takes it for none
            pair = single.single(ids, encoder.cut)
            self.type_one_at.append(len(pair))
            return pair
        pair, begins = frame.pair(ids, other, cut)
        self.type_one_at.append(begins)
        return pair

    def _concatenated(self, first: str, second: str) -> Tokens:
        return self._encoder.text("".join(self._limited(first, second)))

    def _rendered(self, first: str, second: str) -> Tokens:
        encoder, request = self._encoder, self._request
        template = encoder.preprocessor.template
        assert template is not None, "a template of the card's path is loaded"
        variables = dict(request.chat_template_kwargs or {})
        if request.instruction is not None:
            variables.setdefault("instruction", request.instruction)
        texts = zip(_ROLES, self._limited(first, second), strict=True)
        messages = [{"role": role, "content": text} for role, text in texts]
        chat = ChatCompletionRequest(
            model=request.model, messages=messages, chat_template_kwargs=variables
        )
        prompt = template.render(
            messages, add_generation_prompt=False, variables=template_variables(chat)
        )
        return encoder.text(prompt)

    def _limited(self, first: str, second: str) -> tuple[str, str]:
        request, limited = self._request, self._encoder.limited_text
        return (
            limited(first, request.max_tokens_per_query),
            limited(second, request.max_tokens_per_doc),
        )


def _entries(encoder: _Encoder, request: InputBody) -> Iterable[Tokens]:
    if request.messages is not None:
        return map(encoder.chat, request.chats)
    special = request.add_special_tokens is not False
    return (
        encoder.text(entry, special) if isinstance(entry, str) else encoder.ids(entry)
        for entry in request.inputs
    )
