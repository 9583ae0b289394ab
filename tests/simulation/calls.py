"""The requests of other APIs, of tools and of bad clients: what is sent, and its right answer.

A third of the boxes get them, among their other requests. Each has one right answer, whatever
happens beside it: texts that an undisturbed deployment gave, messages that ``answer_cases`` has, or
a status and a word of its text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from history import Answer

if TYPE_CHECKING:
    from answer_cases import Case

__all__ = [
    "ANSWERS",
    "FRONTEND",
    "WORKER",
    "Call",
    "all_calls",
    "draw_calls",
    "script_of",
    "unscripted",
    "with_format",
]

ANSWERS: dict[str, Answer] = {}
"""The answers of an undisturbed deployment, by the names of the calls."""

WORKER, LISTING, FRONTEND = "worker", "listing", "frontend"
"""What a call needs for its answer: a worker; a worker if its model is to be listed, though what is
known of the model may be enough; a frontend alone."""

GENERATIONS = ("chat", "completions", "responses", "messages")
_SHARE = 0.4
"""Of the boxes."""
_RATE = 1.0
_MARK = "answer case {};"
"""What a prompt has so that a worker gives one of the answers of its format."""
_SLOW_SHARE, _CANCEL_SHARE = 0.15, 0.15
_REASONING = "We need 1 < 2."
_WITH_MODEL = ("tool_choice", "response_format", "role")
"""Fields that are read with the model at hand."""
_PAD_BYTES = 140 << 10
"""More than a body that is parsed on the event loop."""

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


@dataclass(frozen=True)
class Call:
    """One request. ``api`` says how its answer is read: a generation, a ``read`` or a ``refusal``.

    ``status`` and ``says`` are of reads and refusals: the status, and a text that the body has.
    ``case`` is the message that the model writes, if its format matters, ``raw`` its text without
    one. ``then`` are calls that follow on the same connection; ``{id}`` in their paths and bodies
    is the id of the answer before.
    """

    name: str
    api: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    method: str = "POST"
    needs: str = WORKER
    status: int = 200
    says: str = ""
    headers: str = ""
    sent: bytes | None = None
    pad: int = 0
    case: Case | None = None
    then: tuple[Call, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether a model answers."""
        return self.api in GENERATIONS

    def target(self, model: str, answer_id: str) -> str:
        """Return the path."""
        return self.path.replace("{model}", model).replace("{id}", answer_id)

    def request_body(self, model: str, answer_id: str) -> dict[str, Any]:
        """Return the body, of which ``model`` is the model unless it names another one."""
        if self.method != "POST" or self.sent is not None:
            return {}
        body = {"model": model} | self.body
        if body.get("previous_response_id") == "{id}":
            body["previous_response_id"] = answer_id
        return body

    def of_graph(self, graph: str) -> Call:
        """Return the call with what is right for ``graph``: not every router explains itself."""
        if not self.path.startswith("/v1/route") or "router-mode: kv" in graph:
            return self
        return replace(self, api="refusal", status=400, says="only --router-mode kv")

    @property
    def is_later(self) -> bool:
        """Whether it continues the answer before it."""
        return self.body.get("previous_response_id") == "{id}"

    @property
    def expected(self) -> Answer:
        """The complete answer."""
        return ANSWERS.get(self.name, Answer("", "", 0, 0))


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
    yield chat("long prompt", 150, 5)
    yield chat("large body", 8, 5, pad=_PAD_BYTES)
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
    told = [*_tool_history(), {"role": "user", "content": "And in Rome?"}]
    yield replace(
        chat("tool history", 1, 9), body={"messages": told, "tools": _tools(), "max_tokens": 9}
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
        one for one in answer_cases.CASES if one.format == name and all(map(_is_whole, one.calls))
    ]
    reasoning = FORMATS[name]
    for number, case in enumerate(cases[:: max(1, len(cases) // 8)]):
        if reasoning and reasoning != "gpt_oss" and number % 2 == 0:
            opens, closes = _MARKERS.get(reasoning, ("<think>", "</think>"))
            text = f"{opens}{_REASONING}{closes}{case.text}"
            case = case._replace(text=text, reasoning=_REASONING)
        yield case
    named = answer_cases.Case("named", '{"city": "Paris"}', (answer_cases.PARIS,))
    if name != "harmony":
        yield named
        text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'
        yield answer_cases.Case("required", text, (answer_cases.PARIS,))
    yield answer_cases.Case("none", "Plain text.", content="Plain text.")


def _is_whole(call: tuple[str, str]) -> bool:
    """Whether the model has written all of the call: a parser completes what it has not."""
    try:
        json.loads(call[1])
    except ValueError:
        return False
    return True


def _case_calls(name: str) -> Iterator[Call]:
    """Yield the calls of a box whose workers have the format ``name``."""
    for number, case in enumerate(_cases(name)):
        yield from _asked_by_all(f"{name} {number}", _MARK.format(number), case)


def _asked_by_all(name: str, asked: str, case: Case) -> Iterator[Call]:
    user = [{"role": "user", "content": asked}]
    by_name = {"type": "function", "function": {"name": "get_weather"}}
    chosen = {"named": by_name, "required": "required", "none": "none"}.get(case.format, "auto")
    body = {"messages": user, "tools": _tools(), "tool_choice": chosen, "max_tokens": 400}
    yield Call(f"tools by chat {name}", "chat", "/v1/chat/completions", body, case=case)
    flat = {"type": "function", "name": "get_weather"} if case.format == "named" else chosen
    body = {"input": asked, "tools": _flat_tools(), "tool_choice": flat, "max_output_tokens": 400}
    yield Call(f"tools by response {name}", "responses", "/v1/responses", body, case=case)
    kinds = {"named": "tool", "required": "any"}
    choice = {"type": kinds.get(case.format, case.format if chosen == "none" else "auto")}
    if case.format == "named":
        choice["name"] = "get_weather"
    body = {
        "messages": user,
        "tools": _message_tools(),
        "tool_choice": choice,
        "max_tokens": 400,
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


# -- what is read, and what is refused


def _reads() -> Iterator[Call]:
    def get(path: str, says: str, needs: str = FRONTEND, status: int = 200, **fields: Any) -> Call:
        return Call(f"GET {path}", "read", path, method="GET", needs=needs, status=status,
                    says=says, **fields)  # fmt: skip

    yield get("/live", '"status": "live"'.replace(" ", ""))
    yield get("/health", '"status":"healthy"', LISTING)
    yield get("/metrics", "dynamo_component_uptime_seconds")
    yield get("/v1/models", '"id":"{model}"', LISTING)
    yield get("/v1/models?limit=5", '"id":"{model}"', LISTING, headers="anthropic-version: 1\r\n")
    yield get("/v1/models/{model}", '"id":"{model}"', LISTING)
    yield get("/v1/models/{model}/ready", '"ready":true', LISTING)
    yield get("/openapi.json", '"openapi":"3.1.0"')
    yield get("/docs", "", status=303)
    yield get("/v1/status", "{")
    yield get("/v1/requests?limit=5", "{")
    yield get("/busy_threshold", '"thresholds":')
    yield get("/ui/about.json", '"keys":false')
    yield get("/ui/history", "{")
    yield get("/ui/requests", "{")
    yield get("/v1/route?prompt=where&model={model}", "{", LISTING)
    words = "Tokenize these words"
    text = Call("tokenize", "read", "/tokenize", {"prompt": words}, needs=LISTING,
                says='"tokens":[')  # fmt: skip
    yield text
    chat = {"messages": [{"role": "user", "content": words}], "return_token_strs": True}
    yield replace(text, name="tokenize a chat", body=chat, says='"token_strs":[')
    yield Call("detokenize", "read", "/detokenize", {"tokens": [1200, 1300]}, needs=LISTING,
               says='{"prompt":')  # fmt: skip
    for path, given in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", {"prompt": words}),
    ):
        yield Call(f"route {path}", "read", "/v1/route", given, needs=LISTING, says="{")


def _refusals() -> Iterator[Call]:
    user = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": user},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": user, "max_tokens": 5},
        "/v1/messages/count_tokens": {"messages": user},
        "/v1/responses/input_tokens": {"input": "Hi"},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [5]},
        "/v1/embeddings": {"input": "Hi"},
    }

    def refused(name: str, path: str, status: int, says: str = "", **fields: Any) -> Call:
        fields = {"needs": FRONTEND} | fields
        return Call(f"{name} {path}", "refusal", path, status=status, says=says, **fields)

    for path, body in bodies.items():
        yield refused("broken", path, 400, sent=b'{"model": "one", "mess')
        yield refused("no object", path, 400, sent=b"[1, 2]")
        yield refused("unknown field", path, 400, "wrong_field", body=body | {"wrong_field": 1})
        yield refused("unknown model", path, 404, "unknown-one", needs=LISTING,
                      body=body | {"model": "unknown-one"})  # fmt: skip
        yield refused("large and broken", path, 400, sent=b"[" + b" " * _PAD_BYTES)
    chat, completions = "/v1/chat/completions", "/v1/completions"
    wrong: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("ax tokens", chat, {"messages": user, "max_tokens": 0}),
        ("emperature", chat, {"messages": user, "temperature": 9}),
        ("messages", chat, {"messages": []}),
        ("tool_choice", chat, {"messages": user, "tool_choice": "required"}),
        ("response_format", chat, {"messages": user, "response_format": {"type": "none"}}),
        ("role", chat, {"messages": [{"role": "unknown-one", "content": "Hi"}]}),
        ("prompt", completions, {"prompt": 5}),
        ("stop", completions, {"prompt": "Hi", "stop": [5]}),
        ("ax tokens", "/v1/responses", {"input": "Hi", "max_output_tokens": 0}),
        ("max_tokens", "/v1/messages", {"messages": user}),
        ("tokens", "/detokenize", {"tokens": [-1]}),
    )
    for word, path, body in wrong:
        needs = WORKER if word in _WITH_MODEL else FRONTEND
        yield refused(f"wrong {word}", path, 400, word, needs=needs, body=body)
    previous = {"input": "Hi", "previous_response_id": "resp_none"}
    yield refused("no such response", "/v1/responses", 400, "resp_none", needs=WORKER,
                  body=previous)  # fmt: skip
    yield refused("too long", completions, 400, "maximum context length", needs=WORKER,
                  body={"prompt": [1200] * 70_000})  # fmt: skip
    yield refused("no embeddings", "/v1/embeddings", 404, needs=WORKER, body={"input": "Hi"})
    yield refused("out of range", "/detokenize", 400, "out of range", needs=LISTING,
                  body={"tokens": [99_999]})  # fmt: skip
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/responses/resp_none", 404),
        ("GET", "/v1/requests/none", 404),
        ("GET", "/v1/models/unknown-one", 404),
        ("GET", "/ui/nothing", 404),
    ):
        yield refused(f"{method}", path, status, method=method)


# -- the choice of a seed


_GROUPS: dict[str, tuple[float, Callable[[], Iterator[Call]]]] = {
    "chat": (2, _chat_calls),
    "responses": (2, _response_calls),
    "messages": (2, _message_calls),
    "reads": (2, _reads),
    "refusals": (2, _refusals),
}
_KNOWN: dict[str, Call] = {}


def all_calls() -> dict[str, Call]:
    """Return every call by its name, those that follow others included."""
    if not _KNOWN:
        for _, make in _GROUPS.values():
            _add(make())
        for name in FORMATS:
            _add(_case_calls(name))
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
    if dice.random() >= _SHARE:
        return "", []
    name = dice.choice(sorted(FORMATS))
    groups = {group: list(make()) for group, (_, make) in _GROUPS.items()}
    groups["tools"] = list(_case_calls(name))
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


def _details(dice: random.Random, call: Call) -> dict[str, Any]:
    details: dict[str, Any] = {"call": call.name, "stream": False}
    if not call.generates:
        return details
    details["stream"] = dice.random() < 0.7
    if dice.random() < _CANCEL_SHARE and not call.then:
        stage = dice.choice(("head", "queued", "first token", "mid-stream"))
        details |= {"cancel": stage, "after": dice.randrange(1, 20)}
        details["stream"] = details["stream"] or stage in ("first token", "mid-stream")
    elif details["stream"] and dice.random() < _SLOW_SHARE:
        details["slow"] = dice.choice((0.05, 0.4, 1.5, 3.0))
    return details
