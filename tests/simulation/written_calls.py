"""The requests to :mod:`written_models`, each with its one right answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from api_tokens import FORMAT, MODEL, encoded
from call import Call, has_whole_arguments
from history import Answer

if TYPE_CHECKING:
    from answer_cases import Case

__all__ = ["MODELS", "format_cases", "written_calls"]

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MARK = "answer case {};"
_REASONING = "We need 1 < 2."
_FORMATS = (
    *("deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "gemma4", "glm45"),
    *("hermes", "jamba", "kimi_k2", "llama3_json", "minimax_m2", "minimax_m3", "mistral"),
    *("nemotron_deci", "phi4", "pythonic", "qwen3_coder", "hermes+deepseek_r1"),
    *("qwen3_coder+step3", "kimi_k2+kimi_k25", "glm45+nemotron_nano", "jamba+basic"),
)
"""Parsers of calls, and of reasoning; with one of these all answers begin with reasoning."""
MODELS = ("strict", "rich", "eyes", "direct", *(FORMAT + name for name in _FORMATS))
_MOST_TOKENS = 600


@functools.cache
def format_cases(model: str) -> tuple[Case, ...]:
    """Return the answers of a model with a format, those in which the model wrote all calls."""
    import answer_cases

    tools, _, reasoning = model.removeprefix(FORMAT).partition("+")
    cases = [
        case
        for case in answer_cases.CASES
        if case.format == tools
        and case.reasoning is None
        and all(map(has_whole_arguments, case.calls))
    ]
    if not reasoning:
        return tuple(cases)
    opens = "<think>" if reasoning == "basic" else ""
    return tuple(
        case._replace(text=f"{opens}{_REASONING}</think>{case.text}", reasoning=_REASONING)
        for case in cases
    )


@functools.cache
def _template() -> Any:
    """Return the chat template of the example model, as jinja2 alone reads it."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    return environment.from_string(config["chat_template"])


def written_calls(model: str) -> Iterator[Call]:
    """Yield the requests to one of the models."""
    if model.startswith(FORMAT):
        yield from _format_calls(model)
    else:
        yield from {"strict": _strict_calls, "rich": _rich_calls, "eyes": _image_calls,
                    "direct": _direct_calls}[model]()  # fmt: skip


def _format_calls(model: str) -> Iterator[Call]:
    import answer_cases

    for number, case in enumerate(format_cases(model)):
        messages = [{"role": "user", "content": _MARK.format(number)}]
        tools = answer_cases.TOOLS
        rendered = _template().render(messages=messages, tools=tools, add_generation_prompt=True)
        body = {"model": model, "messages": messages, "tools": tools, "max_tokens": _MOST_TOKENS}
        reason = "tool_calls" if case.calls else "stop"
        answer = Answer(case.content or "", reason, len(encoded(rendered)), len(encoded(case.text)))
        yield Call(f"{model} {number}", "chat", _CHAT, body, case=case, answer=answer)


# -- templates


def _chat(model: str, name: str, prompt: str, messages: Any, **fields: Any) -> Call:
    """Return a chat whose answer is its prompt."""
    body = {"model": model, "messages": messages, "max_tokens": _MOST_TOKENS, **fields}
    tokens = len(encoded(prompt))
    answer = Answer(prompt, "stop", tokens, tokens)
    return Call(f"{model} {name}", "chat", _CHAT, body, answer=answer)


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _strict_calls() -> Iterator[Call]:
    """A template that takes only the user and the assistant in turn."""
    chat = functools.partial(_chat, "strict")
    said = {"role": "assistant", "content": "An answer."}
    yield chat("one", "[U] Hello [/U]", [_user(" Hello ")])
    yield chat("turns", "[U] Hi [/U] An answer. [U] And now? [/U]",
               [_user("Hi"), said, _user("And now?")])  # fmt: skip
    for role in ("system", "developer"):
        yield chat(role, "[U] Be brief.\n\nHello [/U]",
                   [{"role": role, "content": "Be brief."}, _user("Hello")])  # fmt: skip
    yield chat("system of turns", "[U] Be brief.\n\nHi [/U] An answer. [U] And now? [/U]",
               [{"role": "system", "content": "Be brief."}, _user("Hi"), said,
                _user("And now?")])  # fmt: skip
    yield chat("users", "[U] One\n\nTwo [/U]", [_user("One"), _user("Two")])
    yield chat("later system", "[U] Hi [/U] An answer. [U] Be brief.\n\nNow [/U]",
               [_user("Hi"), said, {"role": "system", "content": "Be brief."},
                _user("Now")])  # fmt: skip
    yield chat("parts", "[U] One\nTwo [/U]",
               [_user([{"type": "text", "text": one} for one in ("One", "Two")])])  # fmt: skip


def _rich_of(messages: list[dict[str, Any]], mood: str = "") -> str:
    """Return the prompt that the template makes."""
    text: str = ""
    # a template that does not name the role developer gets the text as the system's
    roles = [str(one["role"]).replace("developer", "system") for one in messages]
    for number, message in enumerate(messages, 1):
        content = message["content"]
        shown = content if isinstance(content, str) else " & ".join(one["text"] for one in content)
        length = f" [{len(content)}]" if isinstance(content, str) else ""
        shown = shown.replace("one", "two").strip()
        text += f"{number}. {roles[number - 1].upper()}: {shown}{length}; "
    text += "+".join(dict.fromkeys(roles)) + " "
    text += '6---{"b": "é"} x a\n  b ' + messages[-1]["role"].center(8) + "|"
    return f"{text} {mood}" if mood else text


def _rich_calls() -> Iterator[Call]:
    """A template that takes everything, with filters, a macro and a namespace."""
    system = {"role": "system", "content": "Be one."}
    parts = [{"type": "text", "text": text} for text in ("one part", "another")]
    histories: tuple[list[dict[str, Any]], ...] = (
        [_user(" one ")],
        [system, _user("Hello one"), {"role": "assistant", "content": "two"}, _user("three")],
        [_user(parts)],
        [{"role": "developer", "content": "Be brief"}, _user("x" * 300)],
    )
    for number, messages in enumerate(histories):
        yield _chat("rich", str(number), _rich_of(messages), messages)
    kwargs = {"mood": "glad"}
    yield _chat("rich", "kwargs", _rich_of([_user("Hi")], "glad"), [_user("Hi")],
                chat_template_kwargs=kwargs)  # fmt: skip
    said = "Say these words"
    tokens = len(encoded(said))
    body = {"model": "rich", "prompt": said, "max_tokens": _MOST_TOKENS}
    plain = Answer(said, "stop", tokens, tokens)
    call = Call("rich prompt", "completions", _COMPLETIONS, body, answer=plain)
    yield call
    yield replace(call, name="rich logprobs", body={**body, "logprobs": 1})
    echoed = Answer(said * 2, "stop", tokens, tokens)
    yield replace(call, name="rich echo", body={**body, "logprobs": 1, "echo": True}, answer=echoed)
    yield replace(_chat("rich", "logprobs", _rich_of([_user("a")]), [_user("a")]),
                  body={"model": "rich", "messages": [_user("a")], "logprobs": True,
                        "top_logprobs": 1, "max_tokens": _MOST_TOKENS})  # fmt: skip


def _direct_calls() -> Iterator[Call]:
    """A model whose requests must name their worker."""
    said = "Say these words to the worker"
    tokens = len(encoded(said))
    body = {"model": "direct", "prompt": said, "max_tokens": _MOST_TOKENS}
    answer = Answer(said, "stop", tokens, tokens)
    named = "x-worker-instance-id: {worker}\r\n"
    yield Call("direct named", "completions", _COMPLETIONS, body, headers=named, answer=answer)
    yield Call("direct to any", "refusal", _COMPLETIONS, body, status=400, says="worker")


# -- images


def _image_calls() -> Iterator[Call]:
    from image_kit import data_url, png

    def part(image: bytes) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": data_url(image)}}

    small, other = png(8, 8, 1), png(9, 9, 2)
    for name, images in (("one image", [small]), ("two images", [small, other])):
        words = [{"type": "text", "text": "Look: "}]
        fields = [f"messages[0].content[{at}].image_url" for at in range(1, 1 + len(images))]
        sizes = [len(data_url(one)) for one in images]
        said = f"Look: {'IMAGE' * len(images)} {sizes} {' '.join(fields)}"
        prompt = len(encoded("Look: " + "<tool_call>" * len(images)))
        answer = Answer(said, "stop", prompt, len(encoded(said)))
        messages = [_user([*words, *map(part, images)])]
        body = {"model": "eyes", "messages": messages, "max_tokens": _MOST_TOKENS}
        yield Call(f"eyes {name}", "chat", _CHAT, body, answer=answer)
    refused = {"model": "eyes", "messages": [_user([part(small)] * 3)], "max_tokens": 5}
    yield Call("eyes too many", "refusal", _CHAT, refused, status=400, says="at most 2 images")
    for name, url, says in (
        ("no data", "ftp://host/a.png", "ftp://host/a.png"),
        ("remote", "https://host/a.png", "--allowed-media-domains"),
    ):
        bad = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "eyes", "messages": [_user(bad)], "max_tokens": 5}
        yield Call(f"eyes {name}", "refusal", _CHAT, body, status=400, says=says)
