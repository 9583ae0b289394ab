"""Embeddings: the body of POST /v1/embeddings, and the messages between frontend and worker.

Names as in Dynamo. A worker gets all inputs of a request at once and sends one output.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import Routing

MAX_INPUTS = 2048
"""Inputs in a request; OpenAI's limit."""

_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
_Count = Annotated[int, Meta(ge=0)]


class EmbeddingBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Body of POST /v1/embeddings. ``input`` is a text, a list of texts, a list of token ids, or a
    list of lists of token ids; ``dimensions`` shortens the vectors where the model can."""

    model: str
    input: str | list[str | _TokenId | list[_TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    user: str | None = None
    add_special_tokens: bool | None = None


class StrictEmbeddingBody(
    EmbeddingBody, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """As its parent; an unknown field is an error."""


class PreprocessedEmbeddingRequest(msgspec.Struct, omit_defaults=True):
    """The inputs, tokenized: ``token_ids`` has one list for each."""

    model: str
    token_ids: list[Tokens]
    encoding_format: str | None = None
    dimensions: int | None = None
    mdc_sum: str | None = None
    annotations: list[str] = []
    routing: Routing | None = None


class EmbeddingsEngineOutput(msgspec.Struct, omit_defaults=True):
    """One vector for each input, in their order: numbers, or their little-endian float32 bytes."""

    embeddings: list[list[float] | bytes]
    prompt_tokens: _Count = 0
    total_tokens: _Count = 0
