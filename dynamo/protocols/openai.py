"""Requests of the OpenAI API as typed structs: one decode, no intermediate dicts.

Ranges live in :data:`RANGES` and are checked while decoding; ``frontend.prompt.validation`` turns
a failure into the text of the HTTP response. Chat messages stay plain dicts, because the
chat template reads them unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dynamo.protocols.engine import TokenId

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
MAX_TOKENS_LIMIT = 1_048_576
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 512
"""Length limit of each stop string."""
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 19
MAX_BAD_WORDS_TOKENS = 8_192
"""Limit on all of ``bad_words_token_ids`` together."""
MAX_SESSION_CHARACTERS = 256
MAX_TEMPLATE_CHARACTERS = 65_536
MAX_BAD_WORDS_CHARACTERS = 32_768
"""Limit on all bad words together: a worker tokenizes each twice."""
MAX_REGEX_CHARACTERS = 16_384
MAX_GRAMMAR_CHARACTERS = 262_144
"""Limit on a grammar, and on all choices together: the engine compiles them."""
MAX_SALT_CHARACTERS = 4_096
MAX_ECHOED_CHARACTERS = 16 << 20
"""Limit on the echoed prompt, over all choices: with ``n`` it is repeated up to 128 times."""
MAX_ECHOED_TOKENS = 32_768
"""The same limit with ``logprobs``, which add one entry per token."""
MAX_EMBEDDING_INPUTS = 2048
"""Inputs in a request; OpenAI's limit."""
MAX_PROMPT_LOGPROBS = 65_536
"""Limit on the log probabilities of prompts, over all choices, alternatives counted."""

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0, 1_000_000),
    "n": (1, 128),
    "best_of": (0, 128),
    "top_logprobs": (0, 128),
    "logprobs": (0, 128),
    "logit_bias": (-1_000_000, 1_000_000),
}
"""Inclusive bounds by field name; ``repetition_penalty`` excludes its lower one. Engines bound
log probabilities themselves, vLLM by ``--max-logprobs``."""


def _between(name: str) -> Meta:
    low, high = RANGES[name]
    return Meta(ge=low, le=high)


TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]
MaxTokens = Annotated[int, Meta(gt=0, le=MAX_TOKENS_LIMIT)]
WorkerId = Annotated[int, Meta(ge=0)]
PriorityLevel = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TemplateText = Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)]
SessionId = Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARACTERS)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
"""A number. Where texts are read as numbers, "nan" and "inf" would be numbers, too."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKEN_IDS)]
Bias = Annotated[float, _between("logit_bias")]
Penalty = Annotated[float, _between("frequency_penalty")]
Fraction = Annotated[float, _between("top_p")]


class StreamOptions(msgspec.Struct, omit_defaults=True):
    """``include_usage`` asks for one more chunk with the token counts."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``: the same constraints as ``guided_*``, in one object."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class RepetitionDetection(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """vLLM's ``repetition_detection``: end an answer that repeats a pattern of tokens."""

    max_pattern_size: TokenCount = 0
    min_pattern_size: TokenCount = 0
    min_count: TokenCount = 0


class AgentHints(msgspec.Struct, omit_defaults=True):
    """Hints of an agent about its request."""

    latency_sensitivity: Finite | None = None
    priority: PriorityLevel | None = None
    strict_priority: PriorityLevel | None = None
    osl: TokenCount | None = None
    speculative_prefill: bool | None = None


class RoutingConstraints(msgspec.Struct, omit_defaults=True):
    """Taints that a worker must have (``required_taints``, all of them) or should have
    (``preferred_taints``: name to weight, negative to avoid)."""

    required_taints: Annotated[list[str], Meta(max_length=64)] | None = None
    preferred_taints: Annotated[dict[str, Finite], Meta(max_length=64)] | None = None


class NvExt(msgspec.Struct, omit_defaults=True):
    """Dynamo's extension object ``nvext``."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    backend_instance_id: WorkerId | None = None
    prefill_worker_id: WorkerId | None = None
    decode_worker_id: WorkerId | None = None
    dp_rank: WorkerId | None = None
    prefill_dp_rank: WorkerId | None = None
    routing_constraints: RoutingConstraints | None = None
    allowed_worker_ids: Annotated[list[WorkerId], Meta(min_length=1, max_length=1024)] | None = None
    router_config_override: dict[str, Any] | None = None
    token_data: list[TokenId] | None = None
    max_thinking_tokens: TokenCount | None = None
    extra_fields: list[str] | None = None
    agent_context: Any = None
    session_control: Any = None
    agent_hints: AgentHints | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields that chat and text completions share.

    A request with an empty ``model`` is for the only one that has the API. Clients send the fields
    of the last group; they are accepted and have no effect.
    """

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: TokenCount | None = None
    n: Annotated[int, _between("n")] | None = None
    best_of: Annotated[int, _between("best_of")] | None = None
    temperature: Annotated[float, _between("temperature")] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, _between("top_k")] | None = None
    min_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    length_penalty: Finite | None = None
    use_beam_search: bool | None = None
    seed: Int64 | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: Annotated[list[str], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: TokenCount | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    nvext: NvExt | None = None

    # vLLM's: `engine_options` of the engine's request, then those of prompt, routing and answer.
    allowed_token_ids: TokenIds | None = None
    bad_words_token_ids: Annotated[list[list[TokenId]], Meta(max_length=1024)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    repetition_detection: RepetitionDetection | None = None
    watermarking: bool | None = None
    vllm_xargs: dict[str, str | int | float | list[str | int | float]] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1, le=MAX_TOKENS_LIMIT)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    session_id: SessionId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    user: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    routed_experts_prompt_start: TokenCount | None = None
    return_token_offsets: bool | None = None
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    return_weight_versions: bool | None = None

    @property
    def generated_choices(self) -> int:
        """The choices to generate for each prompt: ``best_of``, or else ``n``."""
        return self.best_of or self.n or 1


class ChatCompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, _between("top_logprobs")] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_args: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    chat_template: TemplateText | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    return_prompt_text: bool | None = None

    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    verbosity: str | None = None
    web_search_options: Any = None


class CompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    """Body of POST /v1/completions.

    ``prompt`` is a text, a list of texts, a list of token ids, or a list of lists of token ids;
    ``frontend.prompt.validation`` refuses mixtures. ``max_tokens`` is 0 with ``echo`` alone.
    """

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: TokenCount | None = None
    logprobs: Annotated[int, _between("logprobs")] | None = None
    echo: bool | None = None
    suffix: str | None = None


class ModelId(msgspec.Struct):
    """A row of the body of GET /v1/models, as far as clients read it."""

    id: str


class ModelList(msgspec.Struct):
    """Body of GET /v1/models."""

    data: list[ModelId]


class PassingChatCompletionRequest(ChatCompletionRequest, kw_only=True, omit_defaults=True):
    """As its parent, with the unknown fields of its body, for the engine."""

    passed_fields: dict[str, Any] = {}


class PassingCompletionRequest(CompletionRequest, kw_only=True, omit_defaults=True):
    """As its parent, with the unknown fields of its body, for the engine."""

    passed_fields: dict[str, Any] = {}
