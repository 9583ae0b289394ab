"""The fields of a request in the form of engines and routers."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import MAX_ENGINE_BYTES
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import (
    PreprocessedRequest,
    Routing,
    SamplingOptions,
    StopConditions,
)
from dynamo.protocols.openai import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    NvExt,
    PassingChatCompletionRequest,
    PassingCompletionRequest,
    StructuredOutputs,
)

_LARGEST = 2**64 - 1
QUERY_ANNOTATION = "query_instance_id"
"""Asks where a prompt would go."""
_ANNOTATIONS = frozenset(
    ("formatted_prompt", "llm_metrics", QUERY_ANNOTATION, "request_id", "token_ids")
)
_ENGINE_OPTIONS = (
    *("allowed_token_ids", "bad_words_token_ids", "logprob_token_ids", "watermarking"),
    *("vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
)
_NO_OUTPUTS = StructuredOutputs()
_PASSING = (PassingChatCompletionRequest, PassingCompletionRequest)
_NUMBERS = (
    "backend_instance_id", "prefill_worker_id", "decode_worker_id", "dp_rank", "prefill_dp_rank"
)  # fmt: skip


def expand_choices(requests: list[PreprocessedRequest], n: int) -> list[PreprocessedRequest]:
    """``n`` requests for each of ``requests``, which are one for each prompt.

    Raises InvalidArgument if together they are too large for the engines.
    """
    first = requests[0]
    # Options are the same in all requests: encode one. A token takes four bytes.
    options_bytes = len(encode(first)) - 4 * len(first.token_ids)
    tokens = sum([len(request.token_ids) for request in requests])
    total_bytes = n * (4 * tokens + options_bytes * len(requests))
    if total_bytes > MAX_ENGINE_BYTES:
        raise InvalidArgument(
            f"Validation: the prompts and options of {n * len(requests)} choices ('n' for each "
            f"prompt) are {total_bytes} bytes for the engines, at most {MAX_ENGINE_BYTES}; ask for "
            "fewer choices in a request"
        )
    if n == 1:
        return requests
    return [_choice(request, number) for request in requests for number in range(n)]


def known_annotations(annotations: list[str]) -> list[str]:
    """The annotations that exist, each once."""
    names = dict.fromkeys(annotations)
    return [name for name in names if name.partition(":")[0] in _ANNOTATIONS]


def guided_decoding(request: GenerationRequest) -> dict[str, Any] | None:
    """The grammar that the answer must follow, None without one. Raises InvalidArgument."""
    form = request.response_format
    schema = None if form is None else _response_schema(form)
    # Two fields of one key, which the count below would not notice.
    if schema is not None and request.guided_json is not None:
        raise InvalidArgument(
            "Validation: only one guided decoding constraint, got response_format, guided_json"
        )
    if form is not None and form.get("type") == "structural_tag":
        if request.structural_tag is not None:
            raise InvalidArgument(
                "Validation: only one guided decoding constraint, got response_format, "
                "structural_tag"
            )
        request.structural_tag = msgspec.json.encode(form).decode()
    constraints = {
        "json": request.guided_json if schema is None else schema,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
        "structural_tag": request.structural_tag,
    }
    constraints = {name: value for name, value in constraints.items() if value is not None}
    if not constraints:
        return None
    if len(constraints) > 1:
        names = ", ".join(constraints)
        raise InvalidArgument(f"Validation: only one guided decoding constraint, got {names}")
    outputs = request.structured_outputs or _NO_OUTPUTS
    details = {
        "backend": request.guided_decoding_backend,
        "whitespace_pattern": request.guided_whitespace_pattern,
        "disable_any_whitespace": outputs.disable_any_whitespace or None,
        "disable_additional_properties": outputs.disable_additional_properties or None,
    }
    constraints.update({name: value for name, value in details.items() if value is not None})
    return constraints


def engine_options(request: GenerationRequest) -> dict[str, Any] | None:
    """The fields that the engine gets as the client sent them, by vLLM's names; None without."""
    options = {
        name: value for name in _ENGINE_OPTIONS if (value := getattr(request, name)) is not None
    }
    if request.repetition_detection is not None:
        options["repetition_detection"] = msgspec.to_builtins(request.repetition_detection)
    if isinstance(request, _PASSING):
        options["passed_fields"] = request.passed_fields
    return options or None


def routing_of(nvext: NvExt | None, lora_name: str | None, salt: str | None) -> Routing | None:
    """The client's constraints on the choice of a worker, None without any."""
    if nvext is None:
        if lora_name is None and salt is None:
            return None
        return Routing(lora_name=lora_name, cache_namespace=salt)
    _check_numbers(nvext)
    hints = nvext.agent_hints
    constraints = nvext.routing_constraints
    return Routing(
        backend_instance_id=nvext.backend_instance_id,
        prefill_worker_id=nvext.prefill_worker_id,
        decode_worker_id=nvext.decode_worker_id,
        dp_rank=nvext.dp_rank,
        prefill_dp_rank=nvext.prefill_dp_rank,
        allowed_worker_ids=nvext.allowed_worker_ids,
        required_taints=constraints.required_taints if constraints else None,
        preferred_taints=constraints.preferred_taints if constraints else None,
        priority_jump=hints.latency_sensitivity if hints else None,
        priority=hints.priority if hints else None,
        strict_priority=hints.strict_priority if hints else None,
        expected_output_tokens=hints.osl if hints else None,
        lora_name=lora_name,
        cache_namespace=salt,
    )


def prompt_logprobs(request: GenerationRequest, logprobs: int | None) -> int | None:
    """Those asked for; an echoed prompt of a completion has as many as the answer."""
    echoed = logprobs is not None and isinstance(request, CompletionRequest) and request.echo
    return logprobs if echoed and request.prompt_logprobs is None else request.prompt_logprobs


def stop_conditions(
    request: GenerationRequest, max_tokens: int | None, eos_ids: list[int]
) -> StopConditions:
    """When to end. ``eos_ids`` are hidden stop ids unless the request ignores them."""
    stop, least, nvext = request.stop, request.min_tokens, request.nvext
    thinking = request.thinking_token_budget
    if nvext is not None and nvext.max_thinking_tokens is not None:
        thinking = nvext.max_thinking_tokens
    if least is not None and max_tokens is not None:
        least = min(least, max_tokens)  # engines refuse more tokens than fit
    ignore_eos = request.ignore_eos is True
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=least,
        stop=[stop] if isinstance(stop, str) else stop or None,
        stop_token_ids=request.stop_token_ids or None,
        stop_token_ids_hidden=None if ignore_eos else eos_ids,
        ignore_eos=ignore_eos,
        max_thinking_tokens=None if thinking == -1 else thinking,  # vLLM's -1: no limit
    )


def sampling_options(request: GenerationRequest) -> SamplingOptions:
    """How to sample. ``n`` is 1 for the engine, which gets a request for each choice, and there is
    no ``best_of``, by which the answer chooses."""
    greedy = request.nvext is not None and request.nvext.greed_sampling
    constrained = (
        request.response_format is not None
        or request.guided_json is not None
        or request.guided_regex is not None
        or request.guided_choice is not None
        or request.guided_grammar is not None
        or request.structural_tag is not None
    )
    extended = (
        request.allowed_token_ids is not None
        or request.bad_words_token_ids is not None
        or request.logprob_token_ids is not None
        or request.repetition_detection is not None
        or request.watermarking is not None
        or request.vllm_xargs is not None
        or request.kv_transfer_params is not None
        or request.ec_transfer_params is not None
        or type(request) in _PASSING
    )
    return SamplingOptions(
        n=1,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        temperature=0.0 if greedy else request.temperature,
        top_p=None if greedy else request.top_p,
        top_k=None if greedy else request.top_k,
        min_p=None if greedy else request.min_p,
        use_beam_search=request.use_beam_search,
        length_penalty=request.length_penalty,
        seed=request.seed,
        include_stop_str_in_output=request.include_stop_str_in_output,
        logit_bias=request.logit_bias,
        guided_decoding=guided_decoding(request) if constrained else None,
        bad_words=request.bad_words,
        engine_options=engine_options(request) if extended else None,
    )


def image_options(request: ChatCompletionRequest, trusted: bool) -> dict[str, Any]:
    """The options of vLLM's processor and decoder of images; most requests have none.

    Raises InvalidArgument unless clients are ``trusted``.
    """
    if not request.mm_processor_kwargs and not request.media_io_kwargs:
        return {}
    options = {
        "mm_processor_kwargs": request.mm_processor_kwargs,
        "media_io_kwargs": request.media_io_kwargs,
    }
    options = {name: value for name, value in options.items() if value}
    if not trusted:
        raise InvalidArgument(
            f"Validation: '{next(iter(options))}' of a request could take far more memory and "
            "time; leave it out, or ask the operator for --trust-request-mm-kwargs"
        )
    return options


def request_routing(request: GenerationRequest, lora_name: str | None) -> Routing | None:
    """As :func:`routing_of`, with vLLM's fields of the request: a low ``priority`` goes first."""
    routing = routing_of(request.nvext, lora_name, request.cache_salt)
    if request.priority is None and request.session_id is None:
        return routing
    routing = routing or Routing()
    if request.priority and routing.priority is None:
        routing.priority = min(max(-request.priority, -(2**31)), 2**31 - 1)
    routing.session_id = request.session_id
    return routing


def _check_numbers(nvext: NvExt) -> None:
    """Check that ids and ranks fit into 64 bits, which the decoder cannot."""
    numbers = [(name, getattr(nvext, name)) for name in _NUMBERS]
    numbers += [("allowed_worker_ids", worker_id) for worker_id in nvext.allowed_worker_ids or ()]
    for name, number in numbers:
        if number is not None and number > _LARGEST:
            raise InvalidArgument(f"nvext.{name} must be at most {_LARGEST}, got {shorten(number)}")


def _response_schema(form: dict[str, Any]) -> Any:
    kind = form.get("type")
    if kind in ("text", "structural_tag"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = form.get("json_schema")
    if kind == "json_schema" and isinstance(described, dict) and "schema" in described:
        return described["schema"]
    raise InvalidArgument(
        "Validation: 'response_format' must be of type text, json_object, structural_tag, or "
        f"json_schema with a `json_schema.schema`, got type `{shorten(kind)}`"
    )


def _choice(request: PreprocessedRequest, number: int) -> PreprocessedRequest:
    """A copy for choice ``number`` with another seed: with one seed all choices are the same."""
    sampling = request.sampling_options
    seed = sampling.seed
    if number and seed is not None:
        # Seeds are 64 bits with a sign; the one after the largest is the smallest.
        wrapped = (seed + number + 2**63) % 2**64 - 2**63
        sampling = msgspec.structs.replace(sampling, seed=wrapped)
    return msgspec.structs.replace(request, sampling_options=sampling)
