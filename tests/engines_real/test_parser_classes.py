"""Every parser that vLLM registers reads the texts of its family as ours of that name does.

No engine runs: vLLM's classes get the whole text, ours is cut anywhere by the unit tests.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dynamo.config.worker import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_CALL_ALIASES,
    TOOL_CALL_PARSERS,
)
from dynamo.frontend.formats.frames import FrameParser
from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.reasoning import ContentParser, ReasoningParser, ReasoningShape
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.table import REASONING_FORMATS, TOOL_FORMATS

CASES: Any = importlib.import_module("family_cases")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that vLLM imports
MODEL = Path(__file__).parents[2] / "examples" / "model"
NOT_READ = {
    "hf": "the template that a checkpoint has for its answers, which no parser of ours runs"
}
NO_CLASS = {
    "cohere_command3": "needs the package cohere_melody",
    "cohere_command4": "needs the package cohere_melody",
    "openai": "needs the vocabulary file of openai-harmony",
}
PROPERTIES = {
    "city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"},
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in (("get_weather", PROPERTIES), ("get_time", {}))
]


@cache
def tokenizer() -> Any:
    """A tokenizer whose special tokens are the markers of all formats."""
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(MODEL)
    shapes = filter(None, REASONING_FORMATS.values())
    texts = [*(row.markers for row in TOOL_FORMATS.values()), *(shape.markers for shape in shapes)]
    markers = {text for row in texts for text in row if re.fullmatch(r"<[^>]*>|\[[A-Z_]+\]", text)}
    markers |= {"<think>", "</think>", "<assistant>"}
    tokens.add_special_tokens({"additional_special_tokens": sorted(markers)})
    return tokens


def request() -> Any:
    protocol: Any = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    messages = [{"role": "user", "content": "x"}]
    return protocol.ChatCompletionRequest(model="m", messages=messages, tools=TOOLS)


def theirs(name: str, text: str) -> tuple[list[tuple[str, Any]], str | None]:
    """The calls and the content of ``text``, from vLLM's class."""
    manager: Any = importlib.import_module("vllm.tool_parsers").ToolParserManager
    body = request()
    answer = manager.get_tool_parser(name)(tokenizer(), body.tools).extract_tool_calls(text, body)
    calls = [(call.function.name, loaded(call.function.arguments)) for call in answer.tool_calls]
    return calls, (answer.content or "").strip() or None


def ours(name: str, text: str) -> tuple[list[tuple[str, Any]], str | None]:
    message = AnswerMessage(lambda: "id")
    row = TOOL_FORMATS[TOOL_CALL_ALIASES.get(name, name)]
    parser = row.make(message, RequestTools.of(TOOLS))
    parser.push(text)
    message.stopped = True
    parser.finish()
    found = message.whole()
    functions = [call["function"] for call in found.get("tool_calls", ())]
    calls = [(function["name"], loaded(function["arguments"])) for function in functions]
    return calls, (found["content"] or "").strip() or None


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def registered(package: str, table: str) -> list[str]:
    """The names in a table of vLLM's, without importing it: pytest may only collect."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return []
    tree = ast.parse((Path(vllm.origin).parent / package / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
            return sorted(ast.literal_eval(node.value))
    raise AssertionError(f"no {table} in vllm.{package}")


def their_thought(name: str, text: str, thinks: bool) -> tuple[str | None, str | None]:
    """The reasoning and the content of ``text``, from vLLM's class."""
    manager: Any = importlib.import_module("vllm.reasoning").ReasoningParserManager
    effort = "high" if thinks or name == "k2_horizon" else "no_think"
    options = {"thinking": thinks, "enable_thinking": thinks, "reasoning_effort": effort}
    parser = manager.get_reasoning_parser(name)(tokenizer(), chat_template_kwargs=options)
    reasoning, content = parser.extract_reasoning(text, request())
    return (reasoning or "").strip() or None, (content or "").strip() or None


def our_thought(name: str, text: str, prompt: str) -> tuple[str | None, str | None]:
    shape = shape_of(name)
    message = AnswerMessage(lambda: "id")
    rest = FrameParser(message, shape.frames, ContentParser(message))
    parser = ReasoningParser(message, shape, shape.begins_inside(prompt), rest)
    parser.push(text)
    parser.finish()
    found = message.whole()
    return found.get("reasoning_content", "").strip() or None, found["content"].strip() or None


def shape_of(name: str) -> ReasoningShape:
    shape = REASONING_FORMATS[REASONING_ALIASES.get(name, name)]
    assert shape is not None
    return shape


TOOL_NAMES = registered("tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
REASONING_NAMES = registered("reasoning", "_REASONING_PARSERS_TO_REGISTER")
COMPARED = sorted(set(TOOL_NAMES) - {*NOT_READ, *NO_CLASS})
FAMILIES = {
    # The one family of another name's format that has a form of its own.
    "hy_v4": CASES.FAMILIES["hy_v3"]._replace(
        call="<tool_call>NAME\nPARAMETERS</tool_call>\n",
        parameter="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
    ),
}
BEHIND = "vLLM drops text behind calls"
TEXTS_ALONE = "vLLM reads the texts alone, and drops numbers, objects and lists"
ITEMS = "vLLM makes an object of a list without a schema, with a member item"
DIFFERENCES = {
    **dict.fromkeys(
        (
            (name, "after")
            for name in COMPARED
            if name not in ("apertus", "granite4", "k2_horizon", "lfm2", "step3", "inkling", "xlam")
        ),
        BEHIND,
    ),
    **dict.fromkeys(
        ((name, "before") for name in ("minicpm5", "olmo3", "phi4_mini_json")),
        "vLLM drops text before calls",
    ),
    ("functiongemma", "rich"): TEXTS_ALONE,
    ("functiongemma", "three"): TEXTS_ALONE,
    ("gemma4", "rich"): "vLLM makes texts of the numbers and null in lists",
    ("gemma4", "three"): "vLLM makes texts of the numbers and null in lists",
    ("minimax_m3", "rich"): ITEMS,
    ("minimax_m3", "three"): ITEMS,
    ("phi4_mini_json", "rich"): "vLLM ends the calls at the first bracket, of an argument",
    ("phi4_mini_json", "three"): "vLLM ends the calls at the first bracket, of an argument",
    ("step3", "rich"): "vLLM leaves objects as texts, against their schema",
    ("step3", "three"): "vLLM leaves objects as texts, against their schema",
}
NO_THOUGHT = {
    **{name: why for name, why in NO_CLASS.items() if name != "openai"},
    "openai_gptoss": NO_CLASS["openai"],
    "minimax_m2_append_think": "keeps the reasoning in the content",
    "olmo3": "needs a tokenizer with the token </",
}
ANSWERS = {
    "hunyuan_a13b": "\n<answer>\nHi there\n</answer>",
    "muse_glimmer": "<|start|>assistant to=user<|message|>Hi there<|eot|>",
}
FORCED = ("deepseek_r1", "ernie45", "minimax_m2", "step3", "step3p5")
NOT_INSIDE = ("granite", "hunyuan_a13b", "inkling", "minimax_m3", "mistral", "muse_glimmer")
NO_PROMPT = "vLLM does not read whether the prompt opens or closes the reasoning"
UNCLOSED = "vLLM has no reasoning without its end"
THOUGHT_DIFFERENCES = {
    **dict.fromkeys(
        (
            *((name, "content") for name in FORCED),
            *((name, "inside") for name in NOT_INSIDE),
        ),
        NO_PROMPT,
    ),
    ("granite", "unclosed"): UNCLOSED,
    ("hunyuan_a13b", "unclosed"): UNCLOSED,
    ("k2_horizon", "unclosed"): UNCLOSED,
    ("step3", "both"): "vLLM keeps <think> in the reasoning: its template writes that one",
    ("step3", "unclosed"): "vLLM keeps <think> in the reasoning: its template writes that one",
}


def test_every_name_of_vllm_is_read() -> None:
    assert len(TOOL_NAMES) > 50 and len(REASONING_NAMES) > 35
    assert set(TOOL_NAMES) - {*TOOL_CALL_PARSERS, *TOOL_CALL_ALIASES} == set(NOT_READ)
    assert set(REASONING_NAMES) - {*REASONING_PARSERS, *REASONING_ALIASES} == set(NOT_READ)


@pytest.mark.parametrize("name", COMPARED)
def test_calls_and_content_are_those_of_vllm(name: str) -> None:
    family = FAMILIES.get(name, CASES.FAMILIES[TOOL_CALL_ALIASES.get(name, name)])
    different = {}
    for kind, text, calls, content in CASES.texts(family):
        own = ours(name, text)
        if name != "minimax_m3" or kind not in ("rich", "three"):
            assert own == (calls, content), (kind, text)
        if theirs(name, text) != own:
            different[name, kind] = theirs(name, text), own
    reasons = {key for key in DIFFERENCES if key[0] == name and not family.bare}
    assert set(different) == reasons, different


TIME = '{"name": "get_time", "arguments": {}}'
# Texts with what a family may have beside its calls; the last member is a difference.
MORE = (
    ("dots", f"<dots_function_call>{TIME}</dots_function_call>", "ours reads no JSON there"),
    ("ernie45", f"<response>\nHi\n</response>\n<tool_call>{TIME}</tool_call>\n", "vLLM drops the"
     " markers of the response in streams alone"),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>a, }<escape>}"
     "<end_function_call>", ""),
    ("gigachat3", f"Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{TIME}", ""),
    ("gigachat3", f"Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{TIME}<|message_sep|>\n\n",
     "vLLM finds no call where a marker follows"),
    ("granite", f"<tool_call> [{TIME}]", ""),
    ("granite-20b-fc", f"<function_call> {TIME} <function_call> {TIME}", ""),
    ("inkling", "<|content_text|>Hi<|end_message|><|message_model|>get_time"
     '<|content_invoke_tool_json|>{"name": "get_time", "args": {}}<|end_message|>'
     "<|content_model_end_sampling|>", ""),
    ("internlm", 'Hi<|action_start|><|plugin|>{"name": "get_time", "parameters": {}}<|action_end|>',
     ""),
    ("kimi_k3", "<|open|>response<|sep|>Hi there<|close|>response<|sep|><|open|>tools<|sep|>"
     '<|open|>call tool="get_time" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
     "<|close|>message<|sep|>", ""),
    ("kimi_k3", "Hi there<|close|>response<|sep|><|close|>message<|sep|>", ""),
    ("lfm2", "<|tool_call_start|>[get_weather(city='it's (x)', days=1)]<|tool_call_end|>", ""),
    ("minicpm5", '<function name="get_weather"><param name="city"><![CDATA[a <b>]]></param>'
     "</function>", ""),
    ("muse_glimmer", " to=user<|message|>Hi<|eom|><|start|>assistant to=get_time.get_time"
     '<|message|><atem:function_calls>\n<atem:invoke name="get_time.get_time">\n</atem:invoke>\n'
     "</atem:function_calls><|eot|>", ""),
    ("olmo3", '<function_calls>\nget_weather(city="a", options={"a": null, "b": true})\n'
     "get_time()\n</function_calls>", ""),
    ("xlam", f"[{TIME}]", ""),
    ("xlam", f"<tool_call>[{TIME}]</tool_call>", ""),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "difference"), MORE)
def test_what_is_beside_calls_is_read_as_by_vllm(name: str, text: str, difference: str) -> None:
    assert (ours(name, text) == theirs(name, text)) is (difference == "")


@pytest.mark.parametrize("name", COMPARED)
def test_a_call_that_is_cut_is_found_if_vllm_finds_it(name: str) -> None:
    """The classes of vLLM drop it, or return it as content or a call; ours stream what there is."""
    family = FAMILIES.get(name, CASES.FAMILIES[TOOL_CALL_ALIASES.get(name, name)])
    for _, text, _, _ in CASES.broken(family):
        calls, content = ours(name, text)
        assert calls or content, "text is lost"
        # The first raises an error, the others call functions whose name is cut.
        if name not in ("internlm", "kimi_k2", "plamo3"):
            assert [call[0] for call in theirs(name, text)[0]] in ([], [call[0] for call in calls])


@pytest.mark.parametrize("name", sorted(set(REASONING_NAMES) - {*NOT_READ, *NO_THOUGHT}))
def test_reasoning_is_that_of_vllm(name: str) -> None:
    shape = shape_of(name)
    rest = ANSWERS.get(name, "\n\nHi there")
    opens, closes = shape.opens, shape.closes
    different = {}
    for kind, prompt, text, thinks in (
        ("both", "", f"{opens}\nSo.\n{closes}{rest}", True),
        ("inside", opens, f"So.\n{closes}{rest}", True),
        ("unclosed", "", f"{opens}So", True),
        ("content", closes, "Hi there", False),
    ):
        own = our_thought(name, text, prompt)
        assert own[0] == (None if kind == "content" else text.removeprefix(opens).strip()[:3])
        if their_thought(name, text, thinks) != own:
            different[name, kind] = their_thought(name, text, thinks), own
    reasons = {key for key in THOUGHT_DIFFERENCES if key[0] == name}
    assert set(different) == reasons, different
