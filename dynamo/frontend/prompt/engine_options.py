"""Options that few requests have, in the form of engines and routers.

``preprocessor`` translates the common ones.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.errors import InvalidArgument, shorten
from dynamo.frontend.prompt.bounds import MAX_ENGINE_BYTES
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.openai import GenerationRequest, NvExt

_LARGEST = 2**64 - 1
QUERY_ANNOTATION = "query_instance_id"
"""Asks where a prompt would go."""
_ANNOTATIONS = frozenset(
    ("formatted_prompt", "llm_metrics", QUERY_ANNOTATION, "request_id", "token_ids")
)
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
    constraints = {
        "json": request.guided_json if schema is None else schema,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    constraints = {name: value for name, value in constraints.items() if value is not None}
    if not constraints:
        return None
    if len(constraints) > 1:
        names = ", ".join(constraints)
        raise InvalidArgument(f"Validation: only one guided decoding constraint, got {names}")
    if request.guided_decoding_backend is not None:
        constraints["backend"] = request.guided_decoding_backend
    if request.guided_whitespace_pattern is not None:
        constraints["whitespace_pattern"] = request.guided_whitespace_pattern
    return constraints


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


def _check_numbers(nvext: NvExt) -> None:
    """Check that ids and ranks fit into 64 bits, which the decoder cannot."""
    numbers = [(name, getattr(nvext, name)) for name in _NUMBERS]
    numbers += [("allowed_worker_ids", worker_id) for worker_id in nvext.allowed_worker_ids or ()]
    for name, number in numbers:
        if number is not None and number > _LARGEST:
            raise InvalidArgument(f"nvext.{name} must be at most {_LARGEST}, got {shorten(number)}")


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


def _choice(request: PreprocessedRequest, number: int) -> PreprocessedRequest:
    """A copy for choice ``number`` with another seed: with one seed all choices are the same."""
    sampling = request.sampling_options
    seed = sampling.seed
    if number and seed is not None:
        # Seeds are 64 bits with a sign; the one after the largest is the smallest.
        wrapped = (seed + number + 2**63) % 2**64 - 2**63
        sampling = msgspec.structs.replace(sampling, seed=wrapped)
    return msgspec.structs.replace(request, sampling_options=sampling)
