"""Requests as no client should send them: valid bodies with a few things changed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable
from typing import Any

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2.5]}'}}
COMMON: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 8,
    "min_tokens": 1,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "repetition_penalty": 1.1,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "seed": 7,
    "logit_bias": {"5": 1.5},
    "stop": ["END", "STOP"],
    "stop_token_ids": [5, 6],
    "include_stop_str_in_output": True,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "add_special_tokens": False,
    "prompt_logprobs": 1,
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "guided_json": {"type": "object", "maximum": 5},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= a",
    "guided_decoding_backend": "xgrammar",
    "guided_whitespace_pattern": " ",
    "cache_salt": "salt",
    "user": "u",
    "metadata": {"a": [1, None, {"b": "c"}]},
    "nvext": {
        "greed_sampling": True,
        "use_raw_prompt": False,
        "annotations": ["token_ids", "formatted_prompt", "request_id"],
        "backend_instance_id": 1,
        "prefill_worker_id": 1,
        "decode_worker_id": 1,
        "dp_rank": 0,
        "prefill_dp_rank": 0,
        "routing_constraints": {"required_taints": ["a"], "preferred_taints": {"b": 1.0}},
        "allowed_worker_ids": [7],
        "router_config_override": {"overlap_score_weight": 1.0, "router_temperature": 0},
        "token_data": [5, 6, 7],
        "max_thinking_tokens": 5,
        "extra_fields": ["timing", "worker_id", "stop_reason"],
        "agent_context": {"a": 1},
        "agent_hints": {"latency_sensitivity": 1.0, "priority": 1, "strict_priority": 2, "osl": 3},
    },
}
CHAT = COMMON | {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "u"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
        {"role": "user", "content": "and now?"},
    ],
    "max_completion_tokens": 8,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [TOOL],
    "tool_choice": "auto",
    "documents": [{"title": "t", "text": "x"}],
    "chat_template_kwargs": {"enable_thinking": True, "self": 1},
    "chat_template_args": {"x": [1]},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "reasoning_effort": "low",
}
COMPLETION = COMMON | {"prompt": ["a b", "c"], "logprobs": 2, "echo": True, "suffix": None}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "is_error": True}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 8,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hello", **EPHEMERAL}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1, 2.5]}},
            ],
        },
        {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "ok"}]}]},
        {"role": "user", "content": "and now?"},
    ],
    "system": [{"type": "text", "text": "be brief"}],
    "stream": True,
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"a": 1}}},
    "chat_template_kwargs": {"enable_thinking": True},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "x"}]},
    "betas": ["a"],
    "thread": False,
}
TEXT = {"type": "input_text", "text": "hello"}
ITEM_CALL = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": "{}"}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "input": [
        {"type": "message", "role": "developer", "content": [TEXT], "status": "completed"},
        {"role": "user", "content": "hello", "id": "msg_1"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
        {**ITEM_CALL, "namespace": "n"},
        {"type": "function_call_output", "call_id": "1", "output": [TEXT]},
        {"type": "custom_tool_call", "call_id": "2", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "ok"},
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]},
        {"role": "user", "content": [{"type": "refusal", "refusal": "no"}]},
    ],
    "instructions": "be brief",
    "max_output_tokens": 8,
    "stream": True,
    "stream_options": {"include_obfuscation": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 7,
    "stop": ["END"],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "c", "description": "d",
         "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "image_generation"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto",
                    "tools": [{"type": "function", "name": "f", "namespace": "n"}]},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "w", "schema": {"a": 1}}},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 2,
    "truncation": "disabled",
    "metadata": {"a": "b"},
    "user": "u",
    "prompt_cache_key": "k",
    "store": True,
    "service_tier": "auto",
    "max_tool_calls": 3,
    "client_metadata": {"a": [1]},
    "background": False,
    "chat_template_kwargs": {"enable_thinking": True},
    "nvext": {"extra_fields": ["timing", "worker_id"], "agent_hints": {"osl": 3}},
}  # fmt: skip
SHAPES = {
    "/v1/responses": (RESPONSES, ("model", "input")),
    "/v1/messages": (MESSAGES, ("model", "messages", "max_tokens")),
    "/v1/chat/completions": (CHAT, ("model", "messages")),
    "/v1/completions": (COMPLETION, ("model", "prompt")),
}
RAW = [
    "0", "-0", "-1", "1.5", "1e999", "-1e-999", "1E+2", "null", "true", "false", '""', "[]", "{}",
    '"text"', '"5"', "[null]", "[[1]]", "[[],[1]]", '["a",1]', '{"a":1}', '{"":null}',
    *map(str, (2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**70, -(2**63), -(2**64), 10**30)),
    "1" * 400, "1" * 5000, "-" + "9" * 4300, "0." + "1" * 400,
    "[" * 200 + "]" * 200, "[" * 5000, "[" * 2000 + "]" * 2000, '{"a":' * 900 + "1" + "}" * 900,
    '"\\ud800"', '"\\u0000"', '"' + "x" * 3000 + '"', '"\\ud83d\\ude00"', "[" + "1," * 999 + "1]",
    '[{"type":"text"}]', '[{"type":"text","text":5}]', '[{"type":"image_url"}]', "[5]", "[{}]",
    '[{"function":{"arguments":5}}]', '[{"function":{"arguments":"[[[["}}]', '[{"function":5}]',
    '[{"function":{"arguments":"' + "[" * 3000 + '"}}]', '"query_instance_id:prefill"', "NaN",
    '["query_instance_id:"]', '["query_instance_id:x"]', '"self"', "4294967295", '[4102]', "[4103]",
]  # fmt: skip
MOST_REPEATED = 4800
VALUES = ["", "-1", "0", "1", "x", "1.5", "9" * 20, "9" * 4300, "9" * 5000, "\xe9", "2147483648"]
HEADERS = [
    "x-worker-instance-id",
    "x-prefill-instance-id",
    "x-dp-rank",
    "x-prefill-dp-rank",
    "x-dynamo-request-priority",
    "x-dynamo-request-strict-priority",
    "x-dynamo-session-id",
    "x-request-id",
]


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something could be changed in ``value``."""
    found = [here] if here else []
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, each in items:
        found += paths(each, (*here, key))
    return found


class Mutations:
    """Bodies as bytes, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.repeated = 1

    def body(self, path: str) -> bytes:
        chosen = self.random
        full, required = SHAPES[path]
        kept = [name for name in full if name in required or chosen.random() < 0.15]
        value = copy.deepcopy({name: full[name] for name in kept})
        raw: list[str] = []
        self.repeated = 1
        for _ in range(chosen.choice((0, 1, 1, 1, 2, 4))):
            self.change(value, raw)
        text = json.dumps(value, ensure_ascii=chosen.random() < 0.5)
        for number, each in enumerate(raw):
            text = text.replace(f'"@{number}@"', each)
        data = text.encode("utf-8", "surrogatepass")
        return self.damage(data) if chosen.random() < 0.2 else data

    def change(self, value: Any, raw: list[str]) -> None:
        chosen = self.random
        places = paths(value)
        if not places:
            return
        *way, last = chosen.choice(places)
        for key in way:
            value = value[key]
        kind = chosen.randrange(8)
        if kind == 0 and isinstance(value, dict):
            value[chosen.choice(("", "self", "nope", "é", "x" * 300))] = value.pop(last)
        elif kind == 1:
            times = chosen.choice((1, 2, 1200))
            if self.repeated * times > MOST_REPEATED:  # two lists of 1200 in each other: gigabytes
                times = 2
            self.repeated *= times
            value[last] = [value[last]] * times
        elif kind == 2:
            value[last] = {"a": value[last]}
        elif kind == 3:
            del value[last]
        else:
            value[last] = f"@{len(raw)}@"
            raw.append(chosen.choice(RAW))

    def damage(self, data: bytes) -> bytes:
        chosen = self.random
        place = chosen.randrange(len(data))
        extra = chosen.choice((b"\xff", b"\x00", b"\\", b'"', b"[", b"}", b",", b"\xed\xa0\x80"))
        return chosen.choice((data[:place], data[:place] + extra + data[place:], data[place:]))

    def headers(self) -> dict[str, str]:
        chosen = self.random
        if chosen.random() < 0.7:
            return {}
        names = chosen.sample(HEADERS, 2)
        return {name: chosen.choice(VALUES) for name in names}
