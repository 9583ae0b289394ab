"""The requests of other APIs, of tools and of bad clients: what is sent, and its right answer.

Some boxes get them, among their other requests. Each has one right answer, whatever
happens beside it: texts that an undisturbed deployment gave, messages that ``answer_cases`` has, or
a status and a word of its text.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api_calls import api_calls
from caches import CLEAR
from call import FRONTEND, GENERATIONS, LISTING, PAD_BYTES, Call, has_whole_arguments
from exact_calls import access_calls, edges, proxied, stops, wire_edges
from pins import pin_calls
from reads import protocol, reads, refusals, watches
from wire_calls import wire_calls

if TYPE_CHECKING:
    from answer_cases import Case

__all__ = [
    "all_calls",
    "draw_call",
    "draw_calls",
    "exact_groups",
    "groups_of",
    "script_of",
    "unscripted",
    "with_format",
]

_MODEL = Path(__file__).resolve().parents[2] / "examples/model"
_SHARE = 0.4
"""Of the boxes."""
_RATE = 1.0
_MARK = "answer case {};"
"""What a prompt has so that a worker gives one of the answers of its format."""
_MOST_TOKENS, _CUT_TOKENS = 800, 4
"""``max_tokens`` of a message that is whole, and how many tokens a cut one lacks."""
_SLOW_SHARE, _CANCEL_SHARE = 0.15, 0.15
_REASONING = "We need 1 < 2."

FORMATS = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v3_1",
    "deepseek_v3_2": "",
    "deepseek_v4": "deepseek_v4",
    "gemma4": "",
    "glm45": "glm45",
    "harmony": "gpt_oss",
    "hermes": "qwen3",
    "jamba": "basic",
    "kimi_k2": "kimi_k2",
    "llama3_json": "",
    "minimax_m2": "minimax_m2",
    "minimax_m3": "minimax_m3",
    "mistral": "mistral",
    "nemotron_deci": "nemotron_deci",
    "phi4": "kimi",
    "pythonic": "",
    "qwen3_coder": "qwen3",
}
"""The parsers of tool calls, each with a parser of reasoning or none. Parsers that take the begin
of each answer as reasoning are not among them: their boxes would have other answers."""
_MARKERS = {
    "kimi": ("◁think▷", "◁/think▷"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


# -- generations


def _words(count: int, what: str) -> str:
    return f"call {what}: " + " ".join(f"word {number}" for number in range(count))


def _chat_calls() -> Iterator[Call]:
    def chat(name: str, words: int, tokens: int, pad: int = 0, **fields: Any) -> Call:
        messages = [{"role": "user", "content": _words(words, name)}]
        body = {"messages": messages, "max_tokens": tokens, **fields}
        return Call(f"chat {name}", "chat", "/v1/chat/completions", body, pad=pad)

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    yield chat("json", 5, 12, response_format={"type": "json_object"})
    yield chat(
        "schema",
        5,
        12,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    yield chat("regex", 5, 6, nvext={"guided_regex": "[a-z]+"})
    yield chat("choice", 5, 6, nvext={"guided_choice": ["yes", "no"]})
    yield chat("grammar", 5, 6, nvext={"guided_grammar": 'root ::= "a"'})
    yield chat("sampling", 9, 7, temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.5)
    yield chat("bias", 9, 7, logit_bias={"7": 3}, frequency_penalty=0.1, top_logprobs=2,
               logprobs=True)  # fmt: skip
    yield chat("four long", 20, 320, n=4)
    yield chat("limits", 9, 7, temperature=2, top_p=1, presence_penalty=2, frequency_penalty=-2,
               repetition_penalty=2, stop=[f"{at} never" for at in range(32)],
               min_tokens=7)  # fmt: skip
    yield chat("long prompt", 150, 5)
    yield chat("large body", 8, 5, pad=PAD_BYTES)
    parts = [{"type": "text", "text": "parts"}, {"type": "text", "text": "of a text"}]
    history = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "And now?"},
    ]
    yield replace(
        chat("history", 1, 9),
        body={"messages": history, "max_completion_tokens": 9, "metadata": {"a": "b"}},
    )
    messages = [*_tool_history(), {"role": "user", "content": "And in Rome?"}]
    yield replace(
        chat("tool history", 1, 9), body={"messages": messages, "tools": _tools(), "max_tokens": 9}
    )

    def completion(name: str, prompt: Any, **fields: Any) -> Call:
        body = {"prompt": prompt, "max_tokens": 8, **fields}
        return Call(f"completion {name}", "completions", "/v1/completions", body)

    yield completion("of ids", [1200, 1300, 1400, 1500])
    yield completion("echoed", "Say this again", echo=True)
    yield completion("logprobs", "Say this again", logprobs=2, stop=["\u2603"])


def _tool_history() -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    return [
        {"role": "user", "content": "The weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]


def _response_calls() -> Iterator[Call]:
    def response(name: str, given: Any, tokens: int, then: Any = (), **fields: Any) -> Call:
        body = {"input": given, "max_output_tokens": tokens, **fields}
        return Call(f"response {name}", "responses", "/v1/responses", body, then=tuple(then))

    def stored(name: str, method: str, suffix: str, says: str, status: int = 200) -> Call:
        path, kind = f"/v1/responses/{{id}}{suffix}", "read" if status == 200 else "refusal"
        return Call(f"stored {name}", kind, path, method=method, needs=FRONTEND, status=status,
                    says=says)  # fmt: skip

    yield response("short", _words(4, "response"), 16)
    yield response("long", _words(300, "response"), 60, store=False)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a part"}]},
        {"type": "message", "role": "assistant", "content": "An answer."},
        {"role": "user", "content": _words(9, "items")},
    ]
    yield response("items", items, 9, instructions="You are brief.", metadata={"a": "b"})
    called = [
        {"role": "user", "content": "The weather in Paris?"},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    ]
    yield response("called", called, 9, tools=_flat_tools())
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}
    yield response("schema", _words(3, "schema"), 7, text=text, temperature=0.2, top_p=0.9)
    gone = stored("gone", "GET", "", "not found", 404)
    removed = stored("deleted", "DELETE", "", '"deleted":true', 200)
    for_all = [
        stored("read", "GET", "", '"object":"response"'),
        stored("items", "GET", "/input_items?limit=2&order=asc", '"object":"list"'),
        stored("cancelled", "POST", "/cancel", "Cannot cancel", 400),
    ]
    third = response("third", "And last?", 20, [removed, gone], previous_response_id="{id}")
    later = response("later", "And then?", 20, [third], previous_response_id="{id}")
    yield response("first", _words(6, "first"), 20, [*for_all, later])
    yield Call(
        "input tokens",
        "read",
        "/v1/responses/input_tokens",
        {"input": "Count these words"},
        needs=LISTING,
        says='"object":"response.input_tokens","input_tokens":',
    )


def _message_calls() -> Iterator[Call]:
    def message(name: str, messages: Any, tokens: int, **fields: Any) -> Call:
        body = {"messages": messages, "max_tokens": tokens, **fields}
        return Call(f"message {name}", "messages", "/v1/messages", body)

    def user(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": text}]

    yield message("short", user(_words(4, "message")), 16)
    yield message("long", user(_words(300, "message")), 60, system="You are brief.")
    blocks = [{"type": "text", "text": "Block."}, {"type": "text", "text": "Block."}]
    history = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [{"type": "text", "text": "An answer."}]},
        {"role": "user", "content": _words(9, "blocks")},
    ]
    yield message("blocks", history, 9, stop_sequences=["\u2603"], temperature=0.5, top_k=5,
                  metadata={"user_id": "a"})  # fmt: skip
    used = [
        {"role": "user", "content": "The weather in Paris?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Rain."}],
        },
    ]
    yield message("used", used, 9, tools=_message_tools())
    yield message("thought", user("Think"), 8, thinking={"type": "enabled", "budget_tokens": 1024})
    yield Call(
        "count tokens",
        "read",
        "/v1/messages/count_tokens",
        {"messages": user("Count these words")},
        needs=LISTING,
        says='{"input_tokens":',
    )


# -- tools and reasoning


def _tools() -> list[dict[str, Any]]:
    import answer_cases

    return answer_cases.TOOLS


def _flat_tools() -> list[dict[str, Any]]:
    return [{"type": "function", **one["function"]} for one in _tools()]


def _message_tools() -> list[dict[str, Any]]:
    empty = {"type": "object", "properties": {}}
    return [
        {"name": one["function"]["name"], "input_schema": one["function"].get("parameters", empty)}
        for one in _tools()
    ]


def _cases(name: str) -> Iterator[Case]:
    """Yield the answers of the format ``name``, every other one behind some reasoning."""
    import answer_cases

    cases = [
        one
        for one in answer_cases.CASES
        if one.format == name and all(map(has_whole_arguments, one.calls))
    ]
    reasoning = FORMATS[name]
    for number, case in enumerate(cases[:: max(1, len(cases) // 8)]):
        if reasoning and reasoning != "gpt_oss" and number % 2 == 0:
            opens, closes = _MARKERS.get(reasoning, ("<think>", "</think>"))
            text = f"{opens}{_REASONING}{closes}{case.text}"
            case = case._replace(text=text, reasoning=_REASONING)
        yield case
    whole = [one for one in cases if one.calls and one.text.startswith(one.content or "")]
    for case in whole[:1] if name != "harmony" else ():
        yield case._replace(format="cut")
    named = answer_cases.Case("named", '{"city": "Paris"}', (answer_cases.PARIS,))
    if name != "harmony":
        yield named
        text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'
        yield answer_cases.Case("required", text, (answer_cases.PARIS,))
    yield answer_cases.Case("none", "Plain text.", content="Plain text.")


@functools.cache
def _tokens(text: str) -> int:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(_MODEL / "tokenizer.json"))
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def _case_calls(name: str) -> Iterator[Call]:
    """Yield the calls of a box whose workers have the format ``name``."""
    for number, case in enumerate(_cases(name)):
        yield from _asked_by_all(f"{name} {number}", _MARK.format(number), case)


def _asked_by_all(name: str, asked: str, case: Case) -> Iterator[Call]:
    """Yield the request of chat, Responses and Messages for ``case``."""
    limit = _tokens(case.text) - _CUT_TOKENS if case.format == "cut" else _MOST_TOKENS
    user = [{"role": "user", "content": asked}]
    by_name = {"type": "function", "function": {"name": "get_weather"}}
    chosen = {"named": by_name, "required": "required", "none": "none"}.get(case.format, "auto")
    body = {"messages": user, "tools": _tools(), "tool_choice": chosen, "max_tokens": limit}
    yield Call(f"tools by chat {name}", "chat", "/v1/chat/completions", body, case=case)
    flat = {"type": "function", "name": "get_weather"} if case.format == "named" else chosen
    body = {"input": asked, "tools": _flat_tools(), "tool_choice": flat, "max_output_tokens": limit}
    yield Call(f"tools by response {name}", "responses", "/v1/responses", body, case=case)
    kinds = {"named": "tool", "required": "any"}
    choice = {"type": kinds.get(case.format, case.format if chosen == "none" else "auto")}
    if case.format == "named":
        choice["name"] = "get_weather"
    body = {
        "messages": user,
        "tools": _message_tools(),
        "tool_choice": choice,
        "max_tokens": limit,
    }
    yield Call(f"tools by message {name}", "messages", "/v1/messages", body, case=case)


def script_of(name: str) -> str:
    """Return the file of replies of workers with the format ``name``."""
    rows = [
        {"match": _MARK.format(number), "reply": case.text}
        for number, case in enumerate(_cases(name))
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_format(graph: str, name: str) -> str:
    """Give the workers of ``graph`` the parsers of ``name``, and the replies that they parse."""
    lines = f"  reply-script: {{replies}}\n  dyn-tool-call-parser: {name}\n"
    if FORMATS[name]:
        lines += f"  dyn-reasoning-parser: {FORMATS[name]}\n"
    run = "  run: dynamo.mocker\n"
    return graph.replace(run, run + lines)


def unscripted(call: Call) -> tuple[str, Call]:
    """Return ``call`` for a worker without a format, and a key: equal keys have equal prompts.

    Its answer is one token of anything; its prompt has the tokens of the prompt of ``call``.
    """
    limit = "max_output_tokens" if call.api == "responses" else "max_tokens"
    body = call.body | {limit: 1}
    plain = "none" in (body["tool_choice"], body["tool_choice"]["type"] if call.api == "messages"
                       else "")  # fmt: skip
    if not plain:
        del body["tool_choice"]
    number = call.name.rpartition(" ")[2]
    return f"{call.api} {number} {plain}", replace(call, body=body, case=None)


# -- the choice of a seed


_GROUPS: dict[str, tuple[float, Callable[[], Iterator[Call]]]] = {
    "chat": (2, _chat_calls),
    "responses": (2, _response_calls),
    "messages": (2, _message_calls),
    "reads": (2, reads),
    "watches": (0.5, watches),
    "refusals": (2, refusals),
    "protocol": (1, protocol),
}
_EXACT: dict[str, Callable[[], Iterator[Call]]] = {
    "wire": wire_calls,
    "wire edges": wire_edges,
    "edges": edges,
    "stops": stops,
    "proxied": proxied,
}
"""Of visits."""
_KNOWN: dict[str, Call] = {}


def all_calls() -> dict[str, Call]:
    """Return every call by its name, those that follow others included."""
    if not _KNOWN:
        for _, calls in _GROUPS.values():
            _add(calls())
        for name in FORMATS:
            _add(_case_calls(name))
        _add(api_calls())
        _add(pin_calls())
        _add(iter((CLEAR,)))
        for make in (*_EXACT.values(), access_calls):
            _add(make())
    return _KNOWN


def _add(calls: Iterator[Call]) -> None:
    for call in calls:
        _KNOWN[call.name] = call
        _add(iter(call.then))


def draw_calls(
    seed: int, models: tuple[str, ...], frontends: int, seconds: float
) -> tuple[str, list[tuple[float, str, dict[str, Any]]]]:
    """Return the format of the workers, and time, model and details of each call of ``seed``."""
    dice = random.Random(f"calls {seed}")
    if not seed or dice.random() >= _SHARE:  # the answers are learned in the box of seed 0
        return "", []
    name = dice.choice(sorted(FORMATS))
    groups = groups_of(name)
    weights = {group: weight for group, (weight, _) in _GROUPS.items()} | {"tools": 4}
    chosen = {group: weight for group, weight in weights.items() if dice.random() < 0.5} or weights
    rows = []
    for _ in range(2 + int(min(12, dice.expovariate(1 / (4 + _RATE * seconds / 2))))):
        group = dice.choices(list(chosen), list(chosen.values()))[0]
        call = dice.choice(groups[group])
        details = _details(dice, call)
        if frontends > 1:
            details["frontend"] = dice.randrange(frontends)
        rows.append((round(dice.random() * seconds, 4), dice.choice(models), details))
    return name, rows


def groups_of(name: str) -> dict[str, list[Call]]:
    """Return the calls of a box whose workers have the format ``name``; '' if they have none."""
    return {group: list(make()) for group, (_, make) in _GROUPS.items()} | (
        {"tools": list(_case_calls(name))} if name else {}
    )


def exact_groups(has_keys: bool) -> dict[str, list[Call]]:
    """Return the calls of visits alone; those of a box that demands keys have a key each."""
    if has_keys:
        return {"access": list(access_calls())}
    return {group: list(make()) for group, make in _EXACT.items()}


def draw_call(
    dice: random.Random, groups: dict[str, list[Call]], models: tuple[str, ...], frontends: int
) -> tuple[str, dict[str, Any]]:
    """Return model and details of one call of ``groups``."""
    group = dice.choices(list(groups), [len(some) ** 0.5 for some in groups.values()])[0]
    call = dice.choice(groups[group])
    details = {key: value for key, value in _details(dice, call).items() if key != "slow"}
    if frontends > 1:
        details["frontend"] = dice.randrange(frontends)
    return dice.choice(models), details


def _details(dice: random.Random, call: Call) -> dict[str, Any]:
    details: dict[str, Any] = {"call": call.name, "stream": False}
    if call.api == "watch":
        details["after"] = dice.randrange(1, 20)
    if call.api not in GENERATIONS:
        return details
    details["stream"] = dice.random() < 0.7
    if dice.random() < _CANCEL_SHARE and not call.then:
        stage = dice.choice(("head", "queued", "first token", "mid-stream"))
        details |= {"cancel": stage, "after": dice.randrange(1, 20)}
        details["stream"] = details["stream"] or stage in ("first token", "mid-stream")
    elif details["stream"] and dice.random() < _SLOW_SHARE:
        details["slow"] = dice.choice((0.05, 0.4, 1.5, 3.0))
    return details
