"""The APIs of models that pool: embeddings, scores, rerankings, classes and plain vectors.

The paths of each API are declared here alone: the frontend's own routes, the relay to other servers
and ``dynamo.attach`` read this table. Bodies have the fields of vLLM's server; ``/rerank`` is also
that of Cohere (v2) and Jina.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from dynamo.protocols.engine import TokenId
from dynamo.protocols.openai import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    MAX_SALT_CHARACTERS,
    Int64,
    NvExt,
    SessionId,
)

EMBEDDINGS, RERANK, SCORE = "embeddings", "rerank", "score"
CLASSIFY, POOLING = "classify", "pooling"

POOLING_PATHS = {
    EMBEDDINGS_PATH: EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/rerank": RERANK,
    "/v1/score": SCORE,
    "/score": SCORE,
    "/classify": CLASSIFY,
    "/v1/classify": CLASSIFY,
    "/pooling": POOLING,
    "/v1/pooling": POOLING,
}
"""The API of each path, which is also its ``endpoint`` in metrics; its usual path comes first."""

POOLING_TYPES = {
    EMBEDDINGS: "Embedding",
    RERANK: "Rerank",
    SCORE: "Rerank",
    CLASSIFY: "Classify",
    POOLING: "Pooling",
}
"""The model type (of the card) that has each API."""

POOLING_KEY = "pooling"
"""Key of a card's ``runtime_data`` with :class:`PoolingFacts`."""

COMPARED = {"embed": "bi-encoder", "token_embed": "late-interaction"}
"""How a model of each task scores two texts: by two vectors, or by two lists of vectors."""

CROSS_ENCODER = "cross-encoder"
"""The score of two texts in one input."""

MAX_LABEL_BYTES = 64 << 10
"""Limit on the names of classes in a card; a model with more of them answers without names."""

_Salt = Annotated[str, Meta(max_length=MAX_SALT_CHARACTERS)]
_TokenLimit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
_Int31 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = str | dict[str, Any]


def paths_of_type(model_type: str) -> tuple[str, ...]:
    """Return the usual paths of a model type, one for each of its APIs; none for another type."""
    if model_type in _GENERATION:
        return (_GENERATION[model_type],)
    apis = [api for api, kind in POOLING_TYPES.items() if kind == model_type]
    return tuple(aliases(api)[0] for api in apis)


def aliases(api: str) -> list[str]:
    """Return the paths of an API, the usual one first."""
    return [path for path, owner in POOLING_PATHS.items() if owner == api]


def offered_path(path: str, offered: Collection[str]) -> str | None:
    """Return ``path`` if a server offers it, else another of its API that it offers, or None.

    The bodies are the same: a client of Cohere's ``/v2/rerank`` is served by ``/v1/rerank``.
    """
    if path in offered:
        return path
    api = POOLING_PATHS.get(path)
    return next((other for other in aliases(api) if other in offered), None) if api else None


_GENERATION = {"Chat": CHAT_PATH, "Completions": COMPLETIONS_PATH}


class PoolingFacts(msgspec.Struct, omit_defaults=True):
    """What the card of a pooling model says, for the frontend to make its inputs."""

    #: vLLM's name of what the model computes: embed, classify, token_embed or token_classify.
    task: str = "embed"
    #: How two texts are scored: by one of ``COMPARED``, by ``CROSS_ENCODER``, "" if not at all.
    scoring: str = ""
    #: Whether a cross-encoder has a separating token between the texts; else they are joined.
    separates: bool = True
    #: Whether a cross-encoder is told which tokens are those of the second text.
    token_types: bool = False
    #: Whether a text that is cut loses its beginning.
    truncates_left: bool = False
    #: The names of the classes, in the order of their numbers.
    labels: list[str] = []


class _PoolingBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of all bodies."""

    model: str = ""
    #: Longer inputs are cut to so many tokens; -1 is the context.
    truncate_prompt_tokens: _TokenLimit | None = None
    truncation_side: Literal["left", "right"] | None = None
    #: False returns the numbers before the model's last function.
    use_activation: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    session_id: SessionId | None = None
    cache_salt: _Salt | None = None
    nvext: NvExt | None = None


class InputBody(_PoolingBody, kw_only=True, omit_defaults=True):
    """A body of ``input``: a text, a list of texts, a list of token ids, or a list of lists of
    token ids. Or of ``messages``: a chat that the template turns into one input, or several."""

    input: str | list[str | TokenId | list[TokenId]] | None = None
    messages: list[dict[str, Any] | list[dict[str, Any]]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs: each is a text or a list of token ids."""
        whole = isinstance(self.input, str) or isinstance((self.input or [""])[0], int)
        return cast("list[str | list[int]]", [self.input] if whole else self.input)

    @property
    def chats(self) -> list[list[dict[str, Any]]]:
        """The chats, one for each input."""
        whole = isinstance((self.messages or [{}])[0], dict)
        return cast("list[list[dict[str, Any]]]", [self.messages] if whole else self.messages)


class _EncodedBody(InputBody, kw_only=True, omit_defaults=True):
    """A body whose answer has vectors. Of their encodings the frontend has one each."""

    encoding_format: Literal["float", "base64"] = "float"
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class EmbeddingBody(_EncodedBody, kw_only=True, omit_defaults=True):
    """Body of POST /v1/embeddings; ``dimensions`` shortens the vectors where the model can."""

    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None


class PoolingBody(_EncodedBody, kw_only=True, omit_defaults=True):
    """Body of POST /pooling: ``task`` is the only one of the model, if it is given."""

    task: str | None = None


class ClassifyBody(InputBody, kw_only=True, omit_defaults=True):
    """Body of POST /classify."""


class _PairBody(_PoolingBody, kw_only=True, omit_defaults=True):
    """The fields of bodies with pairs of texts."""

    #: Limits on the tokens of each text; 0: none.
    max_tokens_per_query: _Int31 = 0
    max_tokens_per_doc: _Int31 = 0
    #: For the template of a model that has one.
    instruction: str | None = None


class ScoreBody(_PairBody, kw_only=True, omit_defaults=True):
    """Body of POST /v1/score, whose pairs have four pairs of names on vLLM's server."""

    text_1: Text | list[Text] | None = None
    text_2: Text | list[Text] | None = None
    queries: Text | list[Text] | None = None
    documents: Text | list[Text] | None = None
    items: Text | list[Text] | None = None
    data_1: Text | list[Text] | None = None
    data_2: Text | list[Text] | None = None

    @property
    def pair_texts(self) -> tuple[list[str], list[str]]:
        """The first texts and the second ones. Raises ValueError, which names the field."""
        for first, second in _SCORE_NAMES:
            texts, others = getattr(self, first), getattr(self, second)
            if texts is not None and others is not None:
                return _texts(first, texts), _texts(second, others)
        raise ValueError(
            "give the pairs as 'text_1' and 'text_2', 'queries' and 'documents', 'queries' and "
            "'items', or 'data_1' and 'data_2'"
        )


_SCORE_NAMES = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)


class RerankBody(_PairBody, kw_only=True, omit_defaults=True):
    """Body of POST /v1/rerank; ``top_n`` 0 or null returns all documents."""

    query: Text
    documents: list[Text]
    top_n: _Int31 | None = None
    return_documents: bool | None = None

    @property
    def pair_texts(self) -> tuple[list[str], list[str]]:
        """As of :class:`ScoreBody`."""
        return _texts("query", self.query), _texts("documents", self.documents)


PairBody = ScoreBody | RerankBody
AnyPoolingBody = InputBody | PairBody
POOLING_BODIES: dict[str, type[AnyPoolingBody]] = {
    EMBEDDINGS: EmbeddingBody,
    RERANK: RerankBody,
    SCORE: ScoreBody,
    CLASSIFY: ClassifyBody,
    POOLING: PoolingBody,
}
"""The body of each API."""


def _texts(field: str, value: Text | list[Text]) -> list[str]:
    """The texts of a field; Jina's and Cohere's documents may be objects with a ``text``."""
    texts = []
    for entry in value if isinstance(value, list) else [value]:
        text = entry if isinstance(entry, str) else entry.get("text")
        if not isinstance(text, str):
            raise ValueError(
                f"'{field}' takes texts, or objects with a `text`; images and other content are "
                "not scored"
            )
        texts.append(text)
    return texts
