"""Bodies of /v1/responses as chat requests: items, tools, formats, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from text_kit import example_preprocessor

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.responses.input_items import arranged
from dynamo.frontend.apis.responses.prompt import ResponseChatRequest, parse_response

CODEX = json.loads(Path(__file__).with_name("codex_request.json").read_text())


def converted(lenient: bool = False, **fields: Any) -> ResponseChatRequest:
    raw = json.dumps({"model": "m", "input": "Hello", **fields}).encode()
    request = parse_response(raw, unknown="ignore" if lenient else "refuse")
    request.add_history([])
    return request


def messages(*items: Any, **fields: Any) -> list[Any]:
    return converted(input=list(items), **fields).messages


def call(name: str, arguments: str, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def test_what_codex_sends() -> None:
    """The shape of the requests of Codex 0.169.0, in other words."""
    request = converted(**CODEX)
    first, place, user, looked, *rest = request.messages
    rules = "<permissions instructions>Ask before you write.</permissions instructions>"
    assert first == {
        "role": "system",
        "content": f"You are a coding agent in a terminal.\n\n{rules}",
    }
    assert place["role"] == "user" and user["content"] == "Rename the function."
    assert looked == {
        "role": "assistant",
        "reasoning_content": "Look at the file first.",
        "content": "I look at the file.",
        "tool_calls": [
            call("exec_command", '{"cmd": "cat a.py"}', "call_1"),
            call("multi_agent__spawn_agent", "{}", "call_2"),
        ],
    }
    patch = json.dumps({"input": "*** Begin Patch\n*** End Patch"}, separators=(",", ":"))
    assert rest == [
        {"role": "tool", "tool_call_id": "call_1", "content": "def a(): ..."},
        {"role": "tool", "tool_call_id": "call_2", "content": "started"},
        {"role": "assistant", "tool_calls": [call("apply_patch", patch, "call_3")]},
        {"role": "tool", "tool_call_id": "call_3", "content": "Done."},
        {"role": "user", "content": "The user has changed the model."},
        {"role": "user", "content": "Go on."},
    ]
    assert request.tools is not None
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["exec_command", "apply_patch", "multi_agent__spawn_agent"]
    assert "lark grammar:\nstart: begin_patch" in request.tools[1]["function"]["description"]
    assert [tool["type"] for tool in request.origin.tools.declared] == [
        *("function", "custom", "namespace"),
    ]
    assert request.stream and not request.origin.stores and request.origin.summarizes
    assert request.reasoning_effort == "medium" and request.parallel_tool_calls
    text = example_preprocessor().chat(request).prompts[0].text
    assert text is not None and "exec_command" in text and "Go on." in text


def test_parts_of_messages() -> None:
    url = "data:image/png;base64,AAAA"
    image = {"type": "input_image", "image_url": url, "detail": "low"}
    text = {"type": "input_text", "text": "What is it?"}
    (message,) = messages({"role": "user", "content": [text, image]})
    assert message["content"] == [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    ]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert messages(refusal)[0]["content"] == "No."


def test_one_turn_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [
        {"type": "reasoning_text", "text": "a"}]}  # fmt: skip
    said = {"role": "assistant", "content": "b"}
    called = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}
    user = {"role": "user", "content": "c"}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert messages(thought, thought, said, called, called, user, hidden, said, said) == [
        {
            "role": "assistant",
            "reasoning_content": "a\na",
            "content": "b",
            "tool_calls": [call("f", "{}", "1")] * 2,
        },
        user,
        said,
        said,
    ]


@pytest.mark.parametrize("part", [{"type": "output_text", "text": "a"}, {"type": "reasoning_text"}])
def test_reasoning_has_parts_of_its_own(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected an object of the type `reasoning_text`"):
        messages({"type": "reasoning", "summary": [], "content": [part]})


def test_one_system_message() -> None:
    system = {"role": "system", "content": "b"}
    parts = {"role": "system", "content": [{"type": "text", "text": "c"}]}
    user = {"role": "user", "content": "d"}
    said = {"role": "assistant", "content": "e"}
    assert arranged("a", [system, user, said, system]) == [
        {"role": "system", "content": "a\n\nb"}, user, said, {"role": "user", "content": "b"}
    ]  # fmt: skip
    assert arranged("a", [parts, user])[0]["content"] == [
        {"type": "text", "text": "a"}, *parts["content"]
    ]  # fmt: skip
    assert arranged(None, [user]) == [user]


def test_options() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "w", "schema": schema, "strict": True}
    request = converted(
        text={"format": form, "verbosity": "low"},
        max_output_tokens=9,
        temperature=0.5,
        top_k=3,
        seed=7,
        stop=["x"],
        top_logprobs=2,
        nvext={"backend_instance_id": 4},
        stream=True,
        stream_options={"include_obfuscation": False},
        include=["message.output_text.logprobs"],
    )
    members = {"name": "w", "schema": schema, "strict": True}
    assert request.response_format == {"type": "json_schema", "json_schema": members}
    assert (request.max_tokens, request.temperature, request.top_k) == (9, 0.5, 3)
    assert (request.seed, request.stop, request.top_logprobs) == (7, ["x"], 2)
    assert request.logprobs and request.nvext is not None
    (sent,) = example_preprocessor().chat(request).requests
    assert sent.sampling_options.guided_decoding == {"json": schema}
    assert converted(text={"format": {"type": "json_object"}}).response_format == {
        "type": "json_object"
    }
    assert converted(text={"format": {"type": "text"}}).response_format is None
    assert converted(background=False, n=1, truncation="disabled", prompt=None).n == 1


def test_choice_of_tools() -> None:
    def tool(name: str, kind: str = "function") -> dict[str, Any]:
        return {"type": kind, "name": name}

    tools = [tool("a"), tool("b"), tool("c", "custom")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [tool("b"), tool("c", "x")]}
    some = converted(tools=tools, tool_choice=allowed)
    assert some.tool_choice == "required" and some.tools is not None
    assert [each["function"]["name"] for each in some.tools] == ["b"]
    named = converted(tools=tools, tool_choice=tool("c", "custom"))
    assert named.tool_choice == {"type": "function", "function": {"name": "c"}}
    only = [{"type": "web_search_preview"}]
    assert converted(tools=only).tools is None
    later = {"type": "additional_tools", "role": "developer", "tools": [tool("d")]}
    more = converted(input=[later, {"role": "user", "content": "x"}], tools=tools)
    assert more.tools is not None and more.tools[-1]["function"]["name"] == "d"
    assert len(more.messages) == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"foo": 1, "bar": 2}, "Unsupported parameter(s): `bar`, `foo`"),
        ({"messages": []}, "Unsupported parameter(s): `messages`"),
        ({"reasoning": {"depth": 1}}, "Unsupported parameter(s): `reasoning.depth`"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort: expected `str`, got `int`"),
        ({"text": {"form": 1}}, "Unsupported parameter(s): `text.form`"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type must be"),
        ({"text": {"format": {"type": "json_schema", "x": 1}}}, "`text.format.x`"),
        ({"background": True}, "'background' is not supported by /v1/responses"),
        ({"conversation": {"id": "c"}}, "'conversation' is not supported"),
        ({"prompt": {"id": "p"}}, "'prompt' is not supported"),
        ({"max_tokens": 5}, "'max_tokens' is not supported by /v1/responses; use 'max_output_"),
        ({"n": 2}, "'n' is not supported"),
        ({"response_format": {"type": "json_object"}}, "use 'text.format'"),
        ({"truncation": "auto"}, "'truncation' must be 'disabled', got 'auto'"),
        ({"include": ["x"]}, "'include' must be of message.output_text.logprobs"),
        ({"nvext": {"annotations": ["token_ids"]}}, "'nvext.annotations' is not supported"),
        ({"temperature": 3}, "Temperature must be between 0 and 2, got 3"),
        ({"top_logprobs": 129}, "Top_logprobs must be between 0 and 128, got 129"),
        ({"max_output_tokens": 0}, "Max tokens must be greater than 0, got 0"),
        ({"max_tool_calls": 2**70}, "max_tool_calls: expected `int` <="),
        ({"metadata": {"a": 1}}, "metadata[...]: expected `str`, got `int`"),
        ({"stop": [""]}, "'stop' strings cannot be empty"),
        ({"input": []}, "The 'messages' field cannot be empty"),
        ({"input": None}, "The 'messages' field cannot be empty"),
        ({"input": [1]}, "input[0]: expected `object`"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type: an item `web_search_call`"),
        ({"input": [{"content": "x"}]}, "input[0].role: expected one of"),
        ({"input": [{"role": "robot"}]}, "input[0].role: expected one of"),
        ({"input": [{"role": "user"}]}, "input[0].content: expected `str | array`"),
        ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "`input[0].foo`"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type: a part `input_file` is not supported",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url: expected a URL",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments: expected"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id: expected `str`"),
        ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary[0]: expected"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type: `local_shell` is not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].name: expected a name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools: expected `array`"),
        ({"tool_choice": "required"}, "'tool_choice' forces a tool call"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type: `mcp` is not supported"),
        ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools needs a `mode`"),
    ],
)
def test_refused_by_name(fields: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        converted(**fields)
    assert text in caught.value.message


def test_unknown_members_may_pass() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "x", "new": 1}], "new": 2}
    request = converted(True, input=[item], new=3, reasoning={"new": 4})
    assert request.messages == [{"role": "user", "content": "x"}]


def test_large_integers_come_back() -> None:
    parameters = {"type": "object", "maximum": 2**70}
    tool = {"type": "function", "name": "f", "parameters": parameters}
    echo = converted(tools=[tool]).origin.echo
    assert str(2**70).encode() in orjson.dumps(echo["tools"])


def test_what_is_large_comes_back_empty() -> None:
    long = "x" * (1 << 20)
    tool = {"type": "function", "name": "f", "description": long}
    form = {"type": "json_schema", "name": "w", "schema": {"description": long}}
    text = {"format": form}
    request = converted(instructions=long, tools=[tool], text=text)
    assert len(orjson.dumps(request.origin.echo)) < 2000
    assert request.messages[0]["content"] == long and request.tools is not None
    with pytest.raises(InvalidArgument, match="user: expected `str` of length <= 1024"):
        converted(user=long)
