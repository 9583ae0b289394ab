"""What vLLM's server takes is taken here, or refused with a reason that is listed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import vllm_surface
from answers_kit import CHAT, COMPLETIONS
from servers_kit import EngineDeployment

_TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_USER = {"role": "user", "content": "Hello"}
_ONE = {"role": "assistant", "content": "One"}
# Values of each field: valid ones, numbers as texts, and bounds. A tuple has more fields with it.
BOTH: dict[str, list[Any]] = {
    "add_special_tokens": [True, "false"],
    "allowed_token_ids": [[5, 6], ["5", 6.0]],
    "bad_words": [["the"]],
    "cache_salt": ["s"],
    "ec_transfer_params": [{"a": 1}],
    "frequency_penalty": [1, "0.5", -2, 2],
    "ignore_eos": [True, 1],
    "include_stop_str_in_output": [True],
    "kv_transfer_params": [{"a": 1}],
    "length_penalty": [1.0, "2"],
    "logit_bias": [{"5": 1}, {"5": 100.5}, {"5": "-300"}],
    "max_tokens": [1, "2", 3.0],
    "min_p": [0, "0.5", 1],
    "min_tokens": [0, "1"],
    "mm_payload": ["none", "tensors"],
    "model": [None, "tiny"],
    "n": [1, "2", 2.0],
    "presence_penalty": [1, "0.5"],
    "priority": [0],
    "prompt_logprobs": [],  # refused beside adapters
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 3}],
    "repetition_penalty": [0.1, 1.5, 2.5, 20, "1.1"],
    "request_id": ["mine", "ü"],
    "response_format": [{"type": "text"}, {"type": "json_object"}, _TAG],
    "return_mm_kwargs": [True],
    "return_token_ids": [True, "true"],
    "return_token_offsets": [True],
    "return_tokens_as_token_ids": [True],
    "routed_experts_prompt_start": [0],
    "seed": [0, "7", -(2**63), 2**63 - 1],
    "session_id": ["s"],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "stop": ["x", ["x", "y"], [], ["x"] * 32, [f"{at}!" for at in range(33)]],
    "stop_token_ids": [[5], ["5"], []],
    "stream": [False, "false", 0],
    "stream_interval": [1, "5"],
    "stream_options": [None],
    "structured_outputs": [
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"json": {"type": "object"}},
        {"json_object": True},
        {"structural_tag": json.dumps(_TAG)},
        {"json": {"type": "object"}, "disable_any_whitespace": True},
        {"json": {"type": "object"}, "whitespace_pattern": " "},
    ],
    "temperature": [0, "0.5", 1, 2, 2.5],
    "thinking_token_budget": [-1],
    "top_k": [-1, 0, "5"],
    "top_p": ["0.5", 1],
    "truncate_prompt_tokens": [-1, 1, "3", 2048],
    "truncation_side": [("left", {"truncate_prompt_tokens": 2})],
    "use_beam_search": [False, "false", (True, {"n": 2})],
    "user": ["u"],
    "vllm_xargs": [{"a": 1, "b": "c", "d": [1.5, "x"]}],
    "watermarking": [False],
    "not_a_field": [1],
}
VALUES: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "add_generation_prompt": [False],
        "chat_template": [],  # refused by both without --trust-request-chat-template
        "chat_template_kwargs": [{"a": 1}],
        "continue_final_message": [
            (True, {"add_generation_prompt": False, "messages": [_USER, _ONE]})
        ],
        "documents": [[{"title": "a", "text": "b"}]],
        "echo": [True, (True, {"add_generation_prompt": False, "messages": [_USER, _ONE]})],
        "include_reasoning": [False, "false"],
        "logprob_token_ids": [([5, 6], {"logprobs": True})],
        "logprobs": [True, "true", 1],
        "max_completion_tokens": [2, "2"],
        "media_io_kwargs": [{"image": {"a": 1}}],
        "messages": [[_USER], [_USER, _ONE, _USER], [{"role": "user", "content": []}]],
        "mm_processor_kwargs": [{"a": 1}],
        "parallel_tool_calls": [False],
        "reasoning_effort": ["low", "none"],
        "return_prompt_text": [True],
        "tool_choice": [("none", {"tools": [_TOOL]}), ("auto", {"tools": [_TOOL]})],
        "tools": [[_TOOL]],
        "top_logprobs": [(0, {"logprobs": True}), (20, {"logprobs": True}), 0],
    },
    COMPLETIONS: {
        "echo": [True, (True, {"max_tokens": 0})],
        "logprob_token_ids": [([5, 6], {"logprobs": 1})],
        "logprobs": [0, 5, 20, "3", True, 2.0],
        "prompt": ["a", ["a", "b"], [5, 6], [[5], [6, 7]]],
        "prompt_embeds": [base64.b64encode(b"x").decode()],
        "suffix": [None, ""],
    },
}
REFUSED_HERE = {
    "use_beam_search": "answers are sampled; n and best_of choose among them",
    "logprob_token_ids": "with model runner V1 other requests get wrong log probabilities",
    "not_a_field": "refused where --unknown-fields is refuse; a name that is mistyped is found",
}
"""Fields of which a value that vLLM takes is refused here, with the reason."""


def cases(path: str) -> list[tuple[str, Any]]:
    values = BOTH | VALUES[path]
    return [(field, value) for field in values for value in values[field]]


def body(path: str, field: str, value: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    base |= {"messages": [_USER]} if path == CHAT else {"prompt": "Hello"}
    value, more = value if isinstance(value, tuple) else (value, {})
    return {**base, **more, field: value}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_vllm_takes(path: str, ours: EngineDeployment, vllm_tiny: EngineDeployment) -> None:
    refused: dict[str, str] = {}
    taken = 0
    for field, value in cases(path):
        if field == "model" and value is None:
            continue  # ours has several
        request = body(path, field, value)
        theirs = vllm_tiny.request("POST", path, request)
        mine = ours.request("POST", path, request)
        taken += theirs[0] == 200
        if theirs[0] == 200 and mine[0] != 200:
            refused[f"{field} = {value!r}"] = f"{mine[0]} {mine[2].decode()[:300]}"
        assert mine[0] < 500, f"{field} = {value!r}: {mine[2].decode()}"
    fields = {case.partition(" ")[0] for case in refused}
    assert fields <= REFUSED_HERE.keys(), refused
    # An excuse that is not needed any more has to go.
    assert REFUSED_HERE.keys() & (BOTH | VALUES[path]).keys() <= fields, (taken, refused)
    assert taken > 70


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_field_is_tried(path: str) -> None:
    name = "ChatCompletionRequest" if path == CHAT else "CompletionRequest"
    fields = next(
        names for place, names in vllm_surface.recorded().items() if place.endswith(f":{name}")
    )
    known = {name for name in fields if name[0] not in "(_"}
    assert known - (BOTH | VALUES[path]).keys() == set()
