"""The requests that the frontend sends to an engine, and the items of its responses.

Tokens to complete, inputs to embed, and HTTP requests to relay to another server. Names as in
Dynamo.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Required, TypedDict

import msgspec
from msgspec import Meta

from dynamo.errors import EngineFailure, shorten
from dynamo.protocols.codec import Tokens, decoder, encode

GENERATED_TOKENS = "generated_tokens"
"""Key of ``PreprocessedRequest.extra_args``: so many of the last ``token_ids`` are no prompt of the
client but output of a worker that failed. ``max_tokens`` and ``min_tokens`` do not include them."""

KV_TRANSFER = "kv_transfer_params"
"""Key of ``disaggregated_params`` and of vLLM's ``extra_args`` for a transfer of KV blocks."""

HTTP_INPUT = "Http"
"""``model_input`` of a card whose worker takes ``HttpRequest``."""

DP_RANK = "x-data-parallel-rank"
"""Header of vLLM and SGLang with the rank that serves a request."""

ROUTES = "routes"
"""Key of the card's ``user_data`` with the paths that the server answers: a path for a POST whose
body names the model, ``/v1/embeddings``; method and path for all else, ``GET /v1/responses/{id}``,
where a name in braces stands for one segment."""

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
_Count = Annotated[int, Meta(ge=0)]

MAX_OUTPUT_BYTES = 1 << 20
"""Bound on an item of a response without log probabilities of the prompt: its text is parsed, and
its log probabilities are written, on the loop."""

_MAX_ITEM_TOKENS = 65_536  # 10 ms on the loop
_MAX_ITEM_LOGPROBS = 1024  # with five alternatives each, 20 ms

TOKEN_PREFIX = encode({"token_ids": [0]})[:-1]
"""An item of a response stream with one token and nothing else, up to the id."""


class StopConditions(msgspec.Struct, omit_defaults=True):
    """When generation ends. ``stop`` strings are matched by the frontend, ids by the engine."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    ignore_eos: bool = False
    max_thinking_tokens: int | None = None


GRAMMAR_OF_REASONING = "with_reasoning"
"""Key of ``guided_decoding``: the grammar describes the reasoning, too, so it begins at once."""


class SamplingOptions(msgspec.Struct, omit_defaults=True):
    """How the engine samples the next token.

    ``engine_options`` are fields of the request that vLLM alone has, by its names, and as
    ``passed_fields`` those that the frontend does not know. Other engines ignore them.
    """

    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    guided_decoding: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    engine_options: dict[str, Any] | None = None


class OutputOptions(msgspec.Struct, omit_defaults=True):
    """Further output that the client requested."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None


class MmObject(msgspec.Struct):
    """One image in a prompt: its 64-bit hash, and the ranges [start, end) of its tokens."""

    mm_hash: int
    offsets: list[tuple[int, int]]


class MmRoutingInfo(msgspec.Struct):
    """The prompt as an engine caches it: with the tokens that stand for images."""

    routing_token_ids: Tokens
    mm_objects: list[MmObject]


class Routing(msgspec.Struct, omit_defaults=True):
    """Constraints on the choice of workers, and the choice that the router made."""

    backend_instance_id: int | None = None
    prefill_worker_id: int | None = None
    decode_worker_id: int | None = None
    dp_rank: int | None = None
    prefill_dp_rank: int | None = None
    priority_jump: float | None = None
    priority: int | None = None
    strict_priority: int | None = None
    expected_output_tokens: int | None = None
    lora_name: str | None = None
    cache_namespace: str | None = None
    allowed_worker_ids: list[int] | None = None
    required_taints: list[str] | None = None
    preferred_taints: dict[str, float] | None = None
    session_id: str | None = None
    policy_class: str | None = None
    mm_routing_info: MmRoutingInfo | None = None


class PreprocessedRequest(msgspec.Struct, omit_defaults=True):
    """One prompt, tokenized. ``token_ids`` is ``array('I')``; user handlers see ``list[int]``.

    ``multi_modal_data`` is ``{"image_url": [{"Url": …}, …]}`` with a data: URL for each image, in
    the order of their places in the prompt. ``extra_args`` has for each its hash (``mm_hashes``,
    64 hex digits) and its place in the client's request (``mm_fields``).
    """

    model: str
    token_ids: Tokens
    stop_conditions: StopConditions = msgspec.field(default_factory=StopConditions)
    sampling_options: SamplingOptions = msgspec.field(default_factory=SamplingOptions)
    output_options: OutputOptions = msgspec.field(default_factory=OutputOptions)
    eos_token_ids: list[int] = []
    mdc_sum: str | None = None
    annotations: list[str] = []
    routing: Routing | None = None
    router_config_override: dict[str, Any] | None = None
    estimated_prefix_hit_num_blocks: int | None = None
    backend_instance_id: int | None = None
    prefill_result: dict[str, Any] | None = None
    bootstrap_info: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    multi_modal_data: dict[str, Any] | None = None


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """The part of the prompt that the engine found in its KV cache."""

    cached_tokens: _Count | None = None


class CompletionUsage(msgspec.Struct, omit_defaults=True):
    """Token counts of the engine."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    total_tokens: _Count = 0
    prompt_tokens_details: PromptTokensDetails | None = None


# The decoder checks each entry as a TypedDict; their users read plain dicts.
if TYPE_CHECKING:
    _TopLogprob = dict[str, Any]
else:

    class _TopLogprob(TypedDict, total=False):
        """A token that could have been at a place of the output, and its log probability."""

        token_id: TokenId | None
        token: str | None
        logprob: Required[float]
        rank: int | None


_TopLogprobs = Annotated[list[list[_TopLogprob]], Meta(max_length=_MAX_ITEM_LOGPROBS)]


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """One item of a response stream: new tokens and, in the last item, the reason why it ends.

    ``finish_reason`` is one of eos, length, stop, cancelled, content_filter or ``error: text``.
    Decoding checks that ids are unsigned 32-bit integers, counts are not negative, and an item has
    at most 65,536 tokens, or 1,024 with log probabilities.

    ``top_logprobs`` has one list per token.
    ``extra_args["prompt_logprobs"]``, in the first item with tokens, has one entry per token of the
    prompt: null for the first, for the others such a list, with the prompt's own token first.
    ``extra_args["mm_expansions"]``, there too, has for each image the ids that stand for it.
    """

    token_ids: Annotated[list[TokenId], Meta(max_length=_MAX_ITEM_TOKENS)] = []
    tokens: list[str | None] | None = None
    text: str | None = None
    cum_log_probs: float | None = None
    log_probs: Annotated[list[float], Meta(max_length=_MAX_ITEM_LOGPROBS)] | None = None
    top_logprobs: _TopLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    index: int | None = None
    completion_usage: CompletionUsage | None = None
    disaggregated_params: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None


_decode_output = decoder(EngineOutput).decode


class InvalidOutput(ValueError):
    """An item of a response that is no engine output, or too large for one."""

    def at(self, worker_id: int) -> EngineFailure:
        """Return the error of the request; it names the worker that sent the item."""
        return EngineFailure(f"worker {worker_id:x} sent an invalid output: {self}")


def decode_output(payload: bytes, request: PreprocessedRequest) -> EngineOutput:
    """Decode an item of the response to ``request``. Raises InvalidOutput."""
    # Those of a prompt make an item larger: their number is bounded instead, with the request.
    if len(payload) > MAX_OUTPUT_BYTES and request.output_options.prompt_logprobs is None:
        text = f"{len(payload)} bytes exceed {MAX_OUTPUT_BYTES}; send the output in parts"
        raise InvalidOutput(text)
    try:
        return _decode_output(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidOutput(shorten(error, 200)) from None


def with_every_key(request: Any) -> Any:
    """Add the keys that ``omit_defaults`` dropped from a decoded :class:`PreprocessedRequest`.

    Handlers written for Dynamo expect every key: None, [] or {} if unset. Other values are returned
    unchanged. O(keys), once per request.
    """
    if not isinstance(request, dict) or "token_ids" not in request or "model" not in request:
        return request
    full = {**_UNSET, "eos_token_ids": [], "annotations": [], **request}
    full["routing"] = full["routing"] or {}
    for name, unset in _UNSET_OF.items():
        options = request.get(name)
        full[name] = {**unset, **options} if isinstance(options, dict) else dict(unset)
    return full


def _unset(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields with a plain default, and that default."""
    return {
        field.encode_name: field.default
        for field in msgspec.structs.fields(kind)
        if field.default is not msgspec.NODEFAULT
    }


_UNSET = _unset(PreprocessedRequest)
_UNSET_OF = {
    "stop_conditions": _unset(StopConditions),
    "sampling_options": _unset(SamplingOptions),
    "output_options": {**_unset(OutputOptions), "return_tokens_as_token_ids": None},
}


class PreprocessedEmbeddingRequest(msgspec.Struct, omit_defaults=True):
    """The inputs, tokenized: ``token_ids`` has one list for each.

    The first ``queries`` inputs are scored with the others: one with each of them, several with one
    each. ``type_one_at`` has for each input where the tokens of its second text begin. ``task`` is
    what the model has to compute, if it is not that of embeddings.
    """

    model: str
    token_ids: list[Tokens]
    encoding_format: str | None = None
    dimensions: int | None = None
    mdc_sum: str | None = None
    annotations: list[str] = []
    routing: Routing | None = None
    task: str | None = None
    use_activation: bool | None = None
    queries: int = 0
    type_one_at: list[int] | None = None


class EmbeddingsEngineOutput(msgspec.Struct, omit_defaults=True):
    """One vector for each input, in their order: numbers, or their little-endian float32 bytes.

    A score and the probabilities of classes are vectors, too. Of a model with a vector for each
    token, an input has all of them one after another; ``row_sizes`` has the numbers in one.
    """

    embeddings: list[list[float] | bytes]
    prompt_tokens: _Count = 0
    total_tokens: _Count = 0
    row_sizes: list[int] = []


class HttpRequest(msgspec.Struct, omit_defaults=True):
    """One client request, relayed to a worker in front of another OpenAI-compatible server.

    ``path`` has no host; ``headers`` are those worth relaying, in lower case; ``body`` is the
    client's, unchanged. The stream of the response has one ``HttpResponseHead`` first, then parts
    of the body: raw bytes, cut anywhere, never empty. The end frame follows the last byte; an error
    frame means that the server is unreachable (before the head) or broke off (after it). An error
    status of the server is a normal response.
    """

    method: str
    path: str
    headers: list[tuple[str, str]] = []
    body: bytes = b""


class HttpResponseHead(msgspec.Struct, omit_defaults=True):
    """Status and headers of the server's response, without those of the connection."""

    status: int
    headers: list[tuple[str, str]] = []


# An item with one token differs only in the id at its end: a prefix and a cache cost less than
# encoding a struct.
_U16 = struct.Struct(">BH")
_U32 = struct.Struct(">BI")


@lru_cache(maxsize=8192)
def token_item(token_id: int) -> bytes:
    """Return ``EngineOutput(token_ids=[token_id])`` as MessagePack."""
    # MessagePack's shortest form of an integer: one byte, 0xCD and 16 bits, 0xCE and 32.
    if token_id < 0x80:
        return TOKEN_PREFIX + bytes((token_id,))
    if token_id < 0x10000:
        return TOKEN_PREFIX + _U16.pack(0xCD, token_id)
    return TOKEN_PREFIX + _U32.pack(0xCE, token_id)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> CompletionUsage:
    """Return the usage of a request; ``cached_tokens`` of its prompt came from the KV cache,
    None if that is unknown."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )
