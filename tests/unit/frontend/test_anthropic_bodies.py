"""Bodies of Anthropic's Messages API: the chat requests that they become, and their faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.messages.prompt import MessagesChatRequest, parse_count, parse_messages

USER: Any = {"role": "user", "content": "hi"}
TOOL: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def parse(*messages: Any, **fields: Any) -> MessagesChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": messages or (USER,), **fields}
    return parse_messages(json.dumps(body).encode())


def turns(*messages: Any) -> list[Any]:
    return parse(*messages).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(number: int, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{number}", "name": "f", "input": given}


def result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{number}", "content": content, **more}


def test_the_fields_of_sampling() -> None:
    found = parse(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["x"], stream=True)
    assert (found.temperature, found.top_p, found.top_k) == (0.5, 0.9, 4)
    assert found.stop == ["x"] and found.stream and found.max_tokens == 9
    assert parse(stop_sequences=[]).stop is None


def test_system() -> None:
    assert parse(system="be").messages[0] == {
        "role": "system",
        "content": "be",
    }
    cached = {"cache_control": {"type": "ephemeral"}}
    billing = text("x-anthropic-billing-header: cc_version=2; cch=a1b2;")
    found = parse(system=[billing, text("one", **cached), text("two")]).messages
    assert found[0] == {"role": "system", "content": "one\n\ntwo"}
    assert parse(system=[billing]).messages == [USER]
    raw = json.dumps({"model": "m", "messages": [USER], "system": [billing]}).encode()
    kept = parse_count(raw, strip_preamble=False).messages[0]["content"]
    assert kept.startswith("x-anthropic-billing-header")
    assert parse(system="").messages == [USER]


def test_later_system_messages_are_the_users() -> None:
    """Claude Code sends one behind the first message; many templates fail on it."""
    late = {"role": "system", "content": "now"}
    said = {"role": "assistant", "content": "ok"}
    assert turns({"role": "user", "content": "Hi"}, late, said, late) == [
        {"role": "user", "content": "Hi\nnow"}, said, {"role": "user", "content": "now"}
    ]  # fmt: skip
    assert parse(system="be", messages=[late, USER]).messages == [
        {"role": "system", "content": "be\n\nnow"}, USER
    ]  # fmt: skip
    assert parse(messages=[late, late, USER]).messages[0]["content"] == "now\nnow"


def test_turns_of_one_role_are_one_turn() -> None:
    found = turns(USER, user(text("a"), text("b")), {"role": "assistant", "content": "c"}, USER)
    assert [one["content"] for one in found] == ["hi\na\nb", "c", "hi"]


def test_a_round_of_tools() -> None:
    answer = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "opaque"},
        text("I look."),
        use(1, city="Köln"),
        use(2),
    ]
    results = [result(1, "warm"), result(2, [text("a"), text("b")], is_error=True), text("Go on")]
    found = turns(USER, {"role": "assistant", "content": answer}, user(*results))
    function = {"name": "f", "arguments": {"city": "Köln"}}
    assert found[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": function},
            {"id": "c2", "type": "function", "function": {"name": "f", "arguments": {}}},
        ],
    }
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: a\nb"},
        {"role": "user", "content": "Go on"},
    ]
    bare = turns(USER, {"role": "assistant", "content": [use(1)]}, user(result(1, None)))
    assert bare[1]["content"] is None and bare[2]["content"] == ""


def test_images_and_documents() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    (found,) = turns(user(text("see"), {"type": "image", "source": PIXEL}))
    assert found["content"] == [text("see"), url]
    remote = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    (found,) = turns(user(remote))
    assert found["content"][0]["image_url"] == {"url": "https://a/b.png"}
    shot = result(1, [text("done"), {"type": "image", "source": PIXEL}])
    found = turns(USER, {"role": "assistant", "content": [use(1)]}, user(shot, text("and?")))
    assert found[2]["content"] == "done" and found[3]["content"] == [url, text("and?")]
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    page = {"type": "search_result", "title": "T", "source": "S", "content": [text("c")]}
    (found,) = turns(user({"type": "document", "title": "D", "source": source}, page))
    assert found["content"] == "D\nbody\nT\nS\nc"
    (_, _, found) = turns(
        USER,
        {"role": "assistant", "content": [use(1)]},
        user(result(1, [{"type": "tool_reference", "tool_name": "g"}])),
    )
    assert found["content"] == "Tool found: g"


def test_an_answer_that_has_begun() -> None:
    found = parse(USER, {"role": "assistant", "content": "The answer is ("})
    assert found.continue_final_message and found.add_generation_prompt is False
    assert parse(USER).continue_final_message is None


def test_tools() -> None:
    found = parse(tools=[{**TOOL, "type": "custom", "defer_loading": True, "strict": True}])
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert found.tools == [{"type": "function", "function": function}]
    assert found.tool_choice is None
    for choice, expected in (
        ({"type": "auto"}, None),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ):
        assert parse(tools=[TOOL], tool_choice=choice).tool_choice == expected
    one = parse(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert one.parallel_tool_calls is False


def test_thinking() -> None:
    on = parse(thinking={"type": "enabled", "budget_tokens": 2048, "display": "omitted"})
    assert on.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    assert on.hides_thinking
    assert on.nvext is not None and on.nvext.max_thinking_tokens == 2048
    off = parse(thinking={"type": "disabled"})
    assert (
        off.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
        and off.nvext is None
    )
    free = parse(thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert free.chat_template_kwargs is None and free.reasoning_effort == "high"
    given = {"enable_thinking": False, "thinking": False, "x": 1}
    own = parse(thinking={"type": "enabled"}, chat_template_kwargs=given)
    assert own.chat_template_kwargs == given


def test_a_schema_for_the_answer() -> None:
    schema = {"type": "object"}
    found = parse(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert found.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": schema},
    }


def test_a_count_needs_no_max_tokens() -> None:
    body = {"model": "m", "messages": [USER], "tools": [TOOL], "system": "be"}
    found = parse_count(json.dumps(body).encode())
    assert len(found.messages) == 2 and found.tools and found.max_tokens is None
    with pytest.raises(InvalidArgument, match="`max_tokens`: not supported"):
        parse_count(json.dumps({**body, "max_tokens": 1}).encode())


SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search"}
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens: expected `int`"),
    ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
    ({"temperature": 3}, "temperature: expected `float` <= 2"),
    ({"betting": 1, "alarm": 2}, "`alarm`, `betting`: not supported by this server"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container: expected `null`"),
    ({"thread": {"type": "create"}}, "thread: nothing is stored"),
    ({"messages": []}, "messages: at least one message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages\[0\].role: must be one of user"),
    ({"messages": [{**USER, "name": "x"}]}, r"messages\[0\]: `name` not supported"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content: must be a string or"),
    ({"messages": [user({"type": "odd"})]}, r"content\[0\].type: `odd` is not supported"),
    ({"messages": [user("x")]}, r"content\[0\]: expected an object with a `type`"),
    ({"messages": [user(text("x", bold=1))]}, r"content\[0\]: `bold` not supported"),
    ({"messages": [user({"type": "text"})]}, r"content\[0\].text: must be a string"),
    ({"messages": [user(use(1))]}, r"`tool_use` belongs to the role assistant"),
    ({"messages": [user(result(1, 3))]}, r"content\[0\].content: must be a string"),
    ({"messages": [user(result(1, [use(1)]))]}, r"content\[0\].type: `tool_use` cannot be here"),
    ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "must be base64 or url"),
    ({"messages": [user({"type": "document", "source": PIXEL})]}, "send the text of the document"),
    ({"messages": [{"role": "user", "content": []}]}, "messages: none has content"),
    ({"system": [{"type": "image", "source": PIXEL}]}, r"system\[0\].type: must be text"),
    ({"tools": [TOOL, SERVER_TOOL]}, r"tools\[1\].type: `web_search_20250305` is a tool of"),
    ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema: must be a JSON schema"),
    ({"tools": [{**TOOL, "colour": 1}]}, r"tools\[0\]: `colour` not supported"),
    ({"tool_choice": {"type": "any"}}, "forces a tool call, but no entry of 'tools'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: required"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "names 'g', but 'tools' has"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"stop_sequences": [""]}, "'stop' strings cannot be empty"),
]


@pytest.mark.parametrize(("fields", "message"), FAULTS)
def test_faults_name_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse(**fields)


def test_bodies_that_are_no_json_object() -> None:
    for body, message in ((b"{", "not valid JSON"), (b"[1]", "must be a JSON object")):
        with pytest.raises(InvalidArgument, match=message):
            parse_messages(body)


def test_unknown_fields_pass_where_that_is_set() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [USER], "betting": 1}
    assert parse_messages(json.dumps(body).encode(), unknown="ignore").max_tokens == 1
