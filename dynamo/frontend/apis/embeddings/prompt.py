"""Bodies of /v1/embeddings to token ids. Errors name field, value and limit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import DESERIALIZE
from dynamo.frontend.prompt.preprocessor import Preprocessor
from dynamo.frontend.prompt.validation import check_json
from dynamo.protocols.codec import Tokens, tokens
from dynamo.protocols.embedding import MAX_INPUTS, EmbeddingBody, StrictEmbeddingBody

MAX_BATCH_TOKENS = 1 << 20
"""Tokens of all inputs of a request."""

_STRICT = msgspec.json.Decoder(StrictEmbeddingBody)
_LENIENT = msgspec.json.Decoder(EmbeddingBody)


def parse_embedding(body: bytes, *, ignore_unsupported: bool = False) -> EmbeddingBody:
    """Decode and check a request. Raises InvalidArgument. O(bytes)."""
    check_json(body)
    try:
        request = (_LENIENT if ignore_unsupported else _STRICT).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    entries = [request.input] if isinstance(request.input, str) else request.input
    if not entries or any(each in ("", []) for each in entries):
        raise InvalidArgument("Validation: 'input' and its entries cannot be empty")
    _check_entries(entries)
    return request


def embedding_inputs(preprocessor: Preprocessor, request: EmbeddingBody) -> list[Tokens]:
    """Return the token ids of each input. Thread-safe. Raises InvalidArgument. O(characters)."""
    given = request.input
    whole = isinstance(given, str) or isinstance(given[0], int)
    special = request.add_special_tokens is not False
    found, total = [], 0
    for number, each in enumerate([given] if whole else given):
        ids = _ids(preprocessor, each, special)
        limit = preprocessor.context_length
        if limit is not None and len(ids) > limit:
            raise InvalidArgument(
                f"This model's maximum context length is {limit} tokens. However, 'input' "
                f"{number} has {len(ids)} tokens. Please shorten it."
            )
        total += len(ids)
        if total > MAX_BATCH_TOKENS:
            raise InvalidArgument(
                f"Validation: 'input' takes at most {MAX_BATCH_TOKENS} tokens in all, got more; "
                "send fewer inputs in a request"
            )
        found.append(ids)
    return found


def joined(inputs: list[Tokens]) -> Tokens:
    """The ids of all inputs one after another: what the router counts as the prompt."""
    if len(inputs) == 1:
        return inputs[0]
    found = array("I")
    for each in inputs:
        found.extend(each)
    return found


def _check_entries(entries: Sequence[object]) -> None:
    if len({type(each) for each in entries}) > 1:
        raise InvalidArgument(
            "Validation: 'input' must be a string, a list of strings, a list of token ids or a "
            "list of lists of token ids, not a mixture"
        )
    if len(entries) > MAX_INPUTS and not isinstance(entries[0], int):
        raise InvalidArgument(
            f"Validation: 'input' takes at most {MAX_INPUTS} inputs, got {len(entries)}"
        )


def _ids(preprocessor: Preprocessor, given: object, special: bool) -> Tokens:
    tokenizer = preprocessor.tokenizer
    if isinstance(given, str):
        return tokenizer.encode(given, special)
    assert isinstance(given, list)
    largest = max(given)
    if largest >= tokenizer.vocab_size:
        raise InvalidArgument(
            f"Validation: token id {shorten(largest)} is out of range, the vocabulary has "
            f"{tokenizer.vocab_size} tokens"
        )
    return tokens(given)
