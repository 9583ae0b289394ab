"""Requests with tools and models with reasoning: prompts, grammars, streams and bodies."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from answer_cases import TOOLS, merge
from lazy_module import LazyModule
from text_kit import EXAMPLE, card, chat_body, events, outputs

from dynamo.config.frontend import FrontendSettings
from dynamo.config.worker import REASONING_PARSERS
from dynamo.errors import InvalidArgument
from dynamo.frontend.answer.events import ParsedChatStream
from dynamo.frontend.formats.formats import ModelFormats
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.models.model import ModelEntry
from dynamo.frontend.prompt.preprocessor import Prepared, Preprocessor
from dynamo.frontend.prompt.validation import parse_chat
from dynamo.frontend.requests.metrics import FrontendMetrics
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.llm.model_directory import ModelDirectory
from dynamo.observability.metrics import Registry
from dynamo.protocols.control import RuntimeConfig
from dynamo.protocols.engine import EngineOutput

chat_types = LazyModule("openai.types.chat")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@functools.cache
def preprocessor(tool: str | None = "hermes", reasoning: str | None = "qwen3") -> Preprocessor:
    config = RuntimeConfig(tool_call_parser=tool, reasoning_parser=reasoning)
    return Preprocessor(card(runtime_config=config))


def prepare(model: Preprocessor | None = None, **fields: Any) -> Prepared:
    return (model or preprocessor()).chat(parse_chat(chat_body(**fields)))


def answer(
    text: str, reason: str = "stop", model: Preprocessor | None = None, **fields: Any
) -> ParsedChatStream:
    """The answer ``text``, token by token, to a request with ``fields``."""
    model = model or preprocessor()
    request = parse_chat(chat_body(**fields))
    stream = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 17)
    for choice in stream.choices:
        for each in outputs(text, reason):
            choice.push(each)
    return stream


def body(text: str, reason: str = "stop", **fields: Any) -> Any:
    raw = json.loads(answer(text, reason, **fields).unary())
    chat_types.ChatCompletion.model_validate(raw, strict=True)
    return raw["choices"][0]


def stream(text: str, reason: str = "stop", **fields: Any) -> tuple[Any, list[Any]]:
    """The message that the chunks of a stream are together, and the chunks."""
    model = fields.pop("model", None) or preprocessor()
    request = parse_chat(chat_body(stream=True, **fields))
    made = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 17)
    raw = b""
    for each in outputs(text, reason):
        made.choices[0].push(each)
        raw += made.flush()
    chunks = events(raw + made.end())
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for chunk in chunks:
        chat_types.ChatCompletionChunk.model_validate(chunk, strict=True)
        merge(message, chunk["choices"][0]["delta"])
    return message, [chunk["choices"][0] for chunk in chunks]


def test_the_markers_of_a_checkpoint_may_have_a_suffix(tmp_path: Path) -> None:
    suffix = ":6124c78e"
    names = ("think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
    tags = [f"<{slash}{name}{suffix}>" for name in names for slash in ("", "/")]
    shutil.copytree(EXAMPLE, tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    file = json.loads(path.read_text())
    token = file["added_tokens"][-1]
    file["added_tokens"] += [
        {**token, "id": token["id"] + 1 + number, "content": tag, "special": True}
        for number, tag in enumerate(tags)
    ]
    path.write_text(json.dumps(file))
    tokenizer = Tokenizer(ModelDirectory(tmp_path / "model"))
    formats = ModelFormats("hy_v3", "hy_v3", tokenizer)
    request = parse_chat(chat_body(tools=TOOLS))
    plain = (
        "<think>So.</think><tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>Paris</arg_value>\n</tool_call>\n</tool_calls>"
    )
    text = plain.replace(">", f"{suffix}>")
    reader = formats.answer(request, "")
    assert reader is not None
    ids = tokenizer.encode(text)
    assert len(ids) < len(text) / 2, "the markers are tokens"
    message, parser = reader.start()
    for number in ids:  # all of them are shown to the parser
        assert number not in reader.tokenizer.special_ids
    parser.push(text)
    parser.finish()
    whole = message.whole()
    assert whole["reasoning_content"] == "So." and whole["content"] is None
    (call,) = whole["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


def test_reasoning_under_another_name() -> None:
    qwen = card(runtime_config=RuntimeConfig(reasoning_parser="qwen3"))
    model = Preprocessor(qwen, settings=FrontendSettings(reasoning_field_name="reasoning"))
    text = "<think>One two three.</think>Hi"
    message, chunks = stream(text, model=model)
    assert (message["reasoning"], message["content"]) == ("One two three.", "Hi")
    assert "reasoning_content" not in str(chunks)
    whole = json.loads(answer(text, model=model).unary())["choices"][0]["message"]
    assert whole["reasoning"] == "One two three." and "reasoning_content" not in whole


def test_tools_that_must_not_be_called_may_stay_in_the_prompt() -> None:
    hermes = card(runtime_config=RuntimeConfig(tool_call_parser="hermes"))
    fields = {"tools": TOOLS, "tool_choice": "none"}
    short = prepare(Preprocessor(hermes), **fields).prompt_tokens
    model = Preprocessor(
        hermes, settings=FrontendSettings(exclude_tools_when_tool_choice_none=False)
    )
    assert prepare(model, **fields).prompt_tokens >= short


def test_reasoning_content_and_calls_in_one_body() -> None:
    choice = body(f"<think>\nHm.\n</think>\n\nLet me look.\n{CALL}", tools=TOOLS)
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Let me look.")
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert call["id"].startswith("call_") and call["type"] == "function"


def test_content_is_null_beside_calls_alone() -> None:
    message = body(CALL, tools=TOOLS)["message"]
    assert message["content"] is None and "reasoning_content" not in message


def test_tools_are_read_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 tools and many choices held the event loop for more than a second."""
    read: list[Any] = []
    of = RequestTools.of

    def count(tools: Any) -> RequestTools:
        read.append(tools)
        return of(tools)

    monkeypatch.setattr(RequestTools, "of", count)
    made = answer(CALL, tools=TOOLS, n=8)
    assert len(made.choices) == 8 and len(read) == 1
    parts = [one["message"]["tool_calls"] for one in json.loads(made.unary())["choices"]]
    assert all(len(calls) == 1 for calls in parts)


def test_a_stream_has_the_same_parts() -> None:
    message, chunks = stream(f"<think>\nHm.\n</think>\n\nLook.\n{CALL}\n{CALL}", tools=TOOLS)
    assert message["reasoning_content"] == "Hm." and message["content"] == "Look."
    first, second = message["tool_calls"]
    assert first["function"]["arguments"] == second["function"]["arguments"] == '{"city": "Paris"}'
    assert first["id"] != second["id"]
    assert chunks[0]["delta"]["role"] == "assistant"
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    pieces = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert len(pieces) > 4 and pieces[0]["function"]["name"] == "get_weather"
    assert any(call["index"] == 1 and "id" not in call for call in pieces)


def test_without_tools_markup_is_content() -> None:
    cases: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for fields in cases:
        choice = body(CALL, **fields)
        assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert prepare(preprocessor(reasoning=None)).answer is None


def test_a_call_cut_by_max_tokens_keeps_its_reason() -> None:
    choice = body('<tool_call>{"name": "get_weather", "arguments": {"ci', "length", tools=TOOLS)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'


def test_a_stop_string_in_a_call_stays_a_stop() -> None:
    choice = body(CALL, tools=TOOLS, stop="Par")
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_one_call_where_parallel_calls_are_off() -> None:
    message = body(CALL + CALL, tools=TOOLS, parallel_tool_calls=False)["message"]
    assert len(message["tool_calls"]) == 1 and message["content"] is None


def test_choices_are_parsed_separately() -> None:
    raw = json.loads(answer(CALL, tools=TOOLS, n=3).unary())
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in raw["choices"]}
    assert len(ids) == 3


def test_log_probabilities_are_complete() -> None:
    model = preprocessor()
    request = parse_chat(chat_body(stream=True, tools=TOOLS, logprobs=True))
    made = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 17)
    given = outputs("Hi " + CALL)
    raw = b""
    for each in given:
        made.choices[0].push(
            EngineOutput(
                token_ids=each.token_ids, log_probs=[-0.5], finish_reason=each.finish_reason
            )
        )
        raw += made.flush()
    chunks = events(raw + made.end())
    found = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"]]
    assert sum(len(each["content"]) for each in found) == len(given)
    assert made.usage().completion_tokens == len(given)


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
def test_reasoning_that_the_template_opens_or_closes(reasoning: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages[0].content }}<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    )
    config = RuntimeConfig(reasoning_parser=reasoning)
    model = Preprocessor(card(runtime_config=config, custom_template_path=str(template)))
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    text = "So.\n</think>\n\nHi"
    message = body(text, model=model, chat_template_kwargs=on)["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", "Hi")
    message = body("Hi </think>", model=model, chat_template_kwargs=off)["message"]
    assert message["content"] == "Hi </think>" and "reasoning_content" not in message


@pytest.mark.parametrize("reasoning", sorted(REASONING_PARSERS))
@pytest.mark.parametrize("content", ["The answer", [{"type": "text", "text": "The answer"}]])
def test_an_answer_that_continues_a_text_has_no_reasoning(reasoning: str, content: Any) -> None:
    if reasoning == "gpt_oss":
        return  # its messages have headers
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    more: Any = {"continue_final_message": True, "messages": messages}
    message = body(" is 4.", model=preprocessor(None, reasoning), **more)["message"]
    assert message["content"] == " is 4." and "reasoning_content" not in message


def test_an_answer_that_continues_reasoning() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nSo it"},
    ]
    more: Any = {"continue_final_message": True, "messages": messages}
    for reasoning in ("qwen3", "deepseek_r1"):
        model = preprocessor(None, reasoning)
        message = body(" is</think>4", model=model, **more)["message"]
        assert (message["reasoning_content"], message["content"]) == ("is", "4")


def test_named_choice_asks_for_the_parameters() -> None:
    prepared = prepare(tools=TOOLS, tool_choice=NAMED)
    (request,) = prepared.requests
    assert request.sampling_options.guided_decoding == {"json": TOOLS[0]["function"]["parameters"]}
    message, chunks = stream(' {"city": "Paris"}', tools=TOOLS, tool_choice=NAMED)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert message["content"] is None and chunks[-1]["finish_reason"] == "stop"


def test_required_choice_asks_for_an_array_of_calls() -> None:
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "t", "parameters": parameters}}]
    prepared = prepare(tools=tools, tool_choice="required", parallel_tool_calls=False)
    guided = prepared.requests[0].sampling_options.guided_decoding
    assert guided is not None
    schema = guided["json"]
    assert schema["type"] == "array" and schema["minItems"] == schema["maxItems"] == 1
    names = [each["properties"]["name"]["enum"] for each in schema["items"]["anyOf"]]
    assert names == [["get_weather"], ["get_time"], ["t"]] and schema["$defs"] == {"A": {}}
    assert "$defs" not in schema["items"]["anyOf"][2]["properties"]["parameters"]
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time"}]'
    message = body(text, tools=tools, tool_choice="required")["message"]
    assert [each["function"]["name"] for each in message["tool_calls"]] == [
        "get_weather",
        "get_time",
    ]
    assert message["content"] is None


def test_forced_calls_after_reasoning_or_without() -> None:
    model = preprocessor("hermes", "deepseek_r1")
    for text, reasoning in (("So.</think>{}", "So."), ("{}", None)):
        message = body(text, model=model, tools=TOOLS, tool_choice=NAMED)["message"]
        assert message.get("reasoning_content") == reasoning
        assert message["tool_calls"][0]["function"]["arguments"] == "{}"


def test_an_engine_without_grammars_gives_content() -> None:
    choice = body("No.", tools=TOOLS, tool_choice="required")
    assert choice["message"]["content"] == "No." and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("tool", "fields", "words"),
    [
        (None, {}, "its workers name no tool-call parser"),
        ("harmony", {}, "harmony"),
        ("hermes", {"response_format": {"type": "json_object"}}, "another grammar"),
        ("hermes", {"guided_regex": "a"}, "another grammar"),
    ],
)
def test_calls_that_cannot_be_forced(tool: str | None, fields: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        prepare(preprocessor(tool, None), tools=TOOLS, tool_choice="required", **fields)


def special_model(directory: Path, *tokens: str) -> Path:
    """The example model with more special tokens, which answers do not show."""
    parsed: Any = orjson.loads((EXAMPLE / "tokenizer.json").read_bytes())
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False}
    for number, token in enumerate(tokens, 4103):
        parsed["added_tokens"].append(
            {"id": number, "content": token, "normalized": False, **plain}
        )
    directory.mkdir()
    for path in EXAMPLE.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "tokenizer.json").write_bytes(orjson.dumps(parsed))
    return directory


def test_markers_that_are_special_tokens(tmp_path: Path) -> None:
    path = special_model(tmp_path / "m", "[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    config = RuntimeConfig(tool_call_parser="mistral")
    model = Preprocessor(card(source_path=str(path), runtime_config=config))
    text = 'Hi[OTHER][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
    ids = model.tokenizer.encode(text).tolist()
    assert {4103, 4104, 4105} < set(ids)
    request = parse_chat(chat_body(tools=TOOLS))
    made = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 17)
    for each in ids:
        made.choices[0].push(EngineOutput(token_ids=[each]))
    made.choices[0].push(EngineOutput(finish_reason="eos"))
    message = json.loads(made.unary())["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert message["content"] == "Hi" and call["function"]["name"] == "get_weather"
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert model.tokenizer.decode(ids) == 'Higet_weather{"city": "Paris"}'


def test_unknown_parser_of_a_foreign_worker(caplog: pytest.LogCaptureFixture) -> None:
    config = RuntimeConfig(tool_call_parser="kimi_k9", reasoning_parser="deepseek-r1")
    with caplog.at_level(logging.ERROR):
        model = Preprocessor(card(runtime_config=config))
    (record,) = caplog.records
    assert "tool_call_parser 'kimi_k9'" in record.getMessage() and "hermes" in record.getMessage()
    message = body(f"So.</think>{CALL}", model=model, tools=TOOLS)["message"]
    assert (message["reasoning_content"], message["content"]) == ("So.", CALL)


def test_workers_of_a_model_have_one_format() -> None:
    entry = ModelEntry(
        card(),
        FrontendMetrics(Registry()),
        FrontendSettings(),
        hold=lambda *_: False,
        on_worker=lambda: None,
    )
    other = card(runtime_config=RuntimeConfig(tool_call_parser="hermes"))
    assert entry.agrees_with(other) == "tool_call_parser"
    assert entry.agrees_with(card()) == ""


def test_conversation_with_calls_in_the_prompt() -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}  # fmt: skip
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ]
    prepared = prepare(messages=messages, tools=TOOLS)
    text = prepared.prompts[0].text or ""
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in text
    assert "<tool_response>\nSunny\n</tool_response>" in text and '"get_time"' in text


def test_arguments_as_text_for_templates_that_append_them(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content is not none %}{{ m.content }}{% endif %}"
        "{% if m.content is none %}{% for call in m.tool_calls or [] %}"
        "{{ '```json\\n' + call['function']['arguments'] + '```' }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    model = Preprocessor(card(custom_template_path=str(template)))
    call = {"function": {"name": "f", "arguments": '{"a":  1}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert prepare(model, messages=messages).prompts[0].text == 'x```json\n{"a":  1}```'


def test_reasoning_for_templates_that_call_it_thinking(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "({{ m.thinking }}){{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    model = Preprocessor(card(custom_template_path=str(template)))
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]}
    assert prepare(model, messages=[message]).prompts[0].text == "(Hm.){}"
    assert prepare(model, messages=[{**message, "content": "x"}]).prompts[0].text == "x(){}"


def test_an_answer_in_one_output_takes_linear_time() -> None:
    text = "[" + ", ".join(['{"name": "get_time", "parameters": {}}'] * 4000) + "]" + "[" * 50_000
    for name in ("llama3_json", "mistral"):
        model = preprocessor(name, None)
        request = parse_chat(chat_body(tools=TOOLS))
        made = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 17)
        begun = time.process_time()
        made.choices[0].push(EngineOutput(text="[TOOL_CALLS]" + text, finish_reason="stop"))
        assert time.process_time() - begun < 2


def test_models_without_parsers_answer_as_before() -> None:
    model = preprocessor(None, None)
    prepared = prepare(model, tools=TOOLS, tool_choice="auto")
    assert model.formats is None and prepared.answer is None


@pytest.mark.parametrize("streamed", [True, False])
def test_vllms_append_think_is_content(streamed: bool) -> None:
    config = RuntimeConfig(tool_call_parser="hermes", reasoning_parser="minimax_m2_append_think")
    model = Preprocessor(card(runtime_config=config))
    text = f"Hm.</think>Hi{CALL}"
    if streamed:
        message, _ = stream(text, model=model, tools=TOOLS)
    else:
        whole = answer(text, model=model, tools=TOOLS).unary()
        message = json.loads(whole)["choices"][0]["message"]
    assert message["content"] == "<think>Hm.</think>Hi" and len(message["tool_calls"]) == 1
    assert "reasoning_content" not in message


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_delta_has_one_kind(logprobs: bool) -> None:
    """Clients that read a member of a delta and skip the others lose nothing."""
    request = parse_chat(chat_body(stream=True, tools=TOOLS, logprobs=logprobs))
    model = preprocessor()
    made = ParsedChatStream(request, model.chat(request), model.tokenizer, "chatcmpl-1", 17)
    found = outputs(f"<think>Hm.</think>Look.{CALL}{CALL}", "stop")
    ids = [token for each in found for token in each.token_ids]
    made.choices[0].push(
        EngineOutput(token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason="stop")
    )
    chunks = [chunk["choices"][0] for chunk in events(made.flush() + made.end())]
    deltas = [{**chunk["delta"]} for chunk in chunks]
    assert deltas[0].pop("role") == "assistant" and deltas[0].pop("content") is None
    assert [list(each) for each in deltas] == [
        ["reasoning_content"], ["content"], ["tool_calls"], ["tool_calls"]
    ]  # fmt: skip
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, None, "tool_calls"]
    shown = [len((chunk["logprobs"] or {"content": ()})["content"]) for chunk in chunks]
    assert shown == [len(ids) * logprobs, 0, 0, 0]


@pytest.mark.parametrize("text", [f"{CALL[:-20]}", CALL.replace("Paris", "Pa").partition('"}')[0]])
def test_a_call_that_is_no_json_does_not_end_with_tool_calls(text: str) -> None:
    choice = body(text, tools=TOOLS)
    (call,) = choice["message"]["tool_calls"]
    try:
        json.loads(call["function"]["arguments"])
        assert choice["finish_reason"] == "tool_calls"
    except ValueError:
        assert choice["finish_reason"] == "stop"
