"""The fields of an OpenAI request, sorted into what engines and routers read. Spec 5.6, 7.4."""

from __future__ import annotations

from typing import Any

from dynamo.errors import InvalidArgument, shorten
from dynamo.protocols.engine import OutputOptions, Routing, SamplingOptions, StopConditions
from dynamo.protocols.openai import GenerationRequest, NvExt

__all__ = ["asked_annotations", "output_options", "routing", "sampling_options", "stop_conditions"]

_LARGEST = 2**64 - 1
_ANNOTATIONS = frozenset(
    ("formatted_prompt", "llm_metrics", "query_instance_id", "request_id", "token_ids")
)
_NUMBERS = (
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
    "dp_rank",
    "prefill_dp_rank",
)


def asked_annotations(nvext: NvExt | None) -> list[str]:
    """The annotations that the request asks for, each once, without those that nothing knows."""
    if nvext is None or not nvext.annotations:
        return []
    found = dict.fromkeys(nvext.annotations)
    return [name for name in found if name.partition(":")[0] in _ANNOTATIONS]


def stop_conditions(
    request: GenerationRequest, max_tokens: int | None, eos_ids: list[int]
) -> StopConditions:
    """When to end. ``eos_ids`` are hidden stop ids unless the request ignores them."""
    stop = request.stop
    nvext = request.nvext
    ignore_eos = bool(request.ignore_eos)
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=[stop] if isinstance(stop, str) else stop or None,
        stop_token_ids=request.stop_token_ids or None,
        stop_token_ids_hidden=None if ignore_eos else eos_ids,
        ignore_eos=ignore_eos,
        max_thinking_tokens=nvext.max_thinking_tokens if nvext is not None else None,
    )


def sampling_options(request: GenerationRequest) -> SamplingOptions:
    """How to draw. ``n`` is 1 for the engine: each choice is a request of its own, and
    ``best_of``, which equals the client's ``n``, is left out."""
    greedy = request.nvext is not None and request.nvext.greed_sampling
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
        guided_decoding=_guided_decoding(request),
    )


def output_options(request: GenerationRequest, logprobs: int | None) -> OutputOptions:
    """What to report. ``logprobs`` is the number of alternatives, None for no logprobs."""
    return OutputOptions(
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        skip_special_tokens=request.skip_special_tokens,
    )


def routing(request: GenerationRequest, lora_name: str | None) -> Routing | None:
    """What the request says of where it should go, None if nothing."""
    nvext = request.nvext
    if nvext is None:
        if lora_name is None and request.cache_salt is None:
            return None
        return Routing(lora_name=lora_name, cache_namespace=request.cache_salt)
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
        cache_namespace=request.cache_salt,
    )


def _check_numbers(nvext: NvExt) -> None:
    """Ids and ranks fit into 64 bits, which the decoder cannot check."""
    for name in _NUMBERS:
        value = getattr(nvext, name)
        if value is not None and value > _LARGEST:
            raise InvalidArgument(f"nvext.{name} must be at most {_LARGEST}, got {shorten(value)}")
    for value in nvext.allowed_worker_ids or ():
        if value > _LARGEST:
            text = f"nvext.allowed_worker_ids must be at most {_LARGEST}, got {shorten(value)}"
            raise InvalidArgument(text)


def _guided_decoding(request: GenerationRequest) -> dict[str, Any] | None:
    form = request.response_format
    if (
        form is None
        and request.guided_json is None
        and request.guided_regex is None
        and request.guided_choice is None
        and request.guided_grammar is None
    ):
        return None
    json_schema = request.guided_json if form is None else _response_schema(form)
    given = {
        "json": json_schema,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(found)
        raise InvalidArgument(f"Validation: only one guided decoding constraint, got {names}")
    if request.guided_decoding_backend is not None:
        found["backend"] = request.guided_decoding_backend
    if request.guided_whitespace_pattern is not None:
        found["whitespace_pattern"] = request.guided_whitespace_pattern
    return found


def _response_schema(form: dict[str, Any]) -> Any:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = form.get("json_schema")
    if kind == "json_schema" and isinstance(described, dict) and "schema" in described:
        return described["schema"]
    raise InvalidArgument(
        "Validation: 'response_format' must be of type text, json_object, or json_schema with a "
        f"`json_schema.schema`, got type `{shorten(kind)}`"
    )
