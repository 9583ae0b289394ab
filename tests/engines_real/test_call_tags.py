"""The grammars of forced and strict calls, in xgrammar: what they accept, and what they make.

No engine runs. A family's own texts must be accepted, and whatever a grammar allows must be read
as calls whose arguments follow the schema.
"""

from __future__ import annotations

import importlib
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.formats.call_tags import after_reasoning, forced_tag, strict_tag
from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.reasoning import ReasoningShape
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.table import TOOL_FORMATS

CASES: Any = importlib.import_module("family_cases")
MODEL = Path(__file__).parents[2] / "examples" / "model"
TAGGED = [name for name, row in TOOL_FORMATS.items() if row.tags]
OPTIONS = {
    "type": "object",
    "properties": {"x": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
    "required": ["x"],
    "additionalProperties": False,
}
PROPERTIES = {
    "city": {"type": "string"},
    "unit": {"type": "string", "enum": ["metre", "foot"]},
    "days": {"type": "integer"},
    "options": OPTIONS,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "required": ["city", "unit", "options"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_time")
]
FUNCTIONS = [tool["function"] for tool in TOOLS]
STRICT = [{**FUNCTIONS[0], "strict": True}, FUNCTIONS[1]]
GOOD = {"city": "Köln {x}", "unit": "foot", "options": {"x": [1]}}
THINK = ReasoningShape("<think>", "</think>")
CLOSERS = '"}]> \n|,:'


@cache
def library() -> tuple[Any, Any, Any]:
    """The module, its compiler for the example model, and the tokenizer of that."""
    xgrammar: Any = importlib.import_module("xgrammar")
    tokenizer: Any = importlib.import_module("transformers").AutoTokenizer.from_pretrained(MODEL)
    information = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    return xgrammar, xgrammar.GrammarCompiler(information), tokenizer


def matcher(tag: dict[str, Any]) -> Any:
    xgrammar, compiler, _ = library()
    text = json.dumps({"type": "structural_tag", "format": tag})
    return xgrammar.GrammarMatcher(compiler.compile_structural_tag(text))


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    state = matcher(tag)
    return bool(state.accept_string(text)) and bool(state.is_completed())


def forced(name: str, single: bool = False) -> dict[str, Any]:
    tag = forced_tag(TOOL_FORMATS[name].tags, FUNCTIONS, single)
    return after_reasoning(tag, None, False, None, ())


def strict(name: str) -> dict[str, Any]:
    row = TOOL_FORMATS[name]
    others = [text for text in row.begins if text not in row.triggers]
    return strict_tag(row.tags, row.triggers, others, STRICT, False)


def write(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    text: str = CASES.FAMILIES[name].write(list(calls))
    return text


def read(name: str, text: str) -> tuple[list[tuple[str, Any]], str]:
    message = AnswerMessage(lambda: "id")
    parser = TOOL_FORMATS[name].make(message, RequestTools.of(TOOLS))
    parser.push(text)
    message.stopped = True
    parser.finish()
    whole = message.whole()
    functions = [call["function"] for call in whole.get("tool_calls", ())]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    return calls, (whole["content"] or "").strip()


def check(arguments: dict[str, Any]) -> None:
    """Check ``arguments`` against the schema."""
    assert {"city", "unit", "options"} <= set(arguments) <= set(PROPERTIES), arguments
    assert type(arguments["city"]) is str and arguments["unit"] in ("metre", "foot")
    assert type(arguments.get("days", 0)) is int
    assert list(arguments["options"]) == ["x"] and len(arguments["options"]["x"]) <= 2
    assert all(type(number) in (int, float) for number in arguments["options"]["x"])


def walk(tag: dict[str, Any], seed: int, tokens: int = 1200) -> str | None:
    """A text that the grammar allows, by random tokens; None if it does not end."""
    xgrammar, _, tokenizer = library()
    state, chance = matcher(tag), random.Random(seed)
    ids: list[int] = []
    mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    texts = [tokenizer.decode([number]) for number in range(len(tokenizer))]
    for _ in range(tokens):
        if state.is_terminated():
            return str(tokenizer.decode(ids))
        state.fill_next_token_bitmask(mask)
        words = mask[0].tolist()
        allowed = [i for i in range(len(tokenizer)) if words[i >> 5] >> (i & 31) & 1]
        # Strings would not end.
        closing = [
            i for i in allowed if i != tokenizer.eos_token_id and not texts[i].strip(CLOSERS)
        ]
        if tokenizer.eos_token_id in allowed and chance.random() < 0.5:
            choice = tokenizer.eos_token_id
        else:
            choice = chance.choice(closing if closing and chance.random() < 0.5 else allowed)
        assert state.accept_token(choice)
        if choice != tokenizer.eos_token_id:
            ids.append(choice)
    return None


@pytest.mark.parametrize("name", TAGGED)
def test_the_texts_of_a_family_are_allowed(name: str) -> None:
    # The grammar has the order of the schema.
    two = ("get_time", {"city": "", "unit": "metre", "days": -3, "options": {"x": []}})
    one = write(name, ("get_weather", GOOD))
    assert accepts(forced(name), one)
    assert read(name, one) == ([("get_weather", GOOD)], "")
    if not CASES.FAMILIES[name].single:
        both = write(name, ("get_weather", GOOD), two)
        assert accepts(forced(name), both) and not accepts(forced(name, single=True), both)
    for wrong in ({**GOOD, "unit": "mile"}, {"city": "x"}, {**GOOD, "more": 1}):
        assert not accepts(forced(name), write(name, ("get_weather", wrong)))
    assert not accepts(forced(name), write(name, ("unknown", GOOD)))
    assert not accepts(forced(name), "No.") and not accepts(forced(name), "")


@pytest.mark.parametrize("name", TAGGED)
def test_whatever_the_grammar_allows_is_calls_of_the_schema(name: str) -> None:
    ended = 0
    for seed in range(12):
        text = walk(forced(name, single=seed % 2 > 0), seed)
        if text is None:
            continue
        ended += 1
        calls, content = read(name, text)
        assert calls and not content, text
        assert seed % 2 == 0 or len(calls) == 1
        for _, arguments in calls:
            check(arguments)
    assert ended > 5


@pytest.mark.parametrize("name", [name for name in TAGGED if TOOL_FORMATS[name].triggers])
def test_a_strict_tool_follows_its_schema_where_it_is_called(name: str) -> None:
    tag, loose = strict(name), {"anything": {"b": [None]}}
    assert accepts(tag, "Nothing < 5 to {do}.")
    call = write(name, ("get_weather", GOOD))
    assert accepts(tag, call)
    assert accepts(tag, f"I look.\n{call}")
    assert not accepts(tag, write(name, ("get_weather", loose)))
    assert accepts(tag, write(name, ("get_time", loose)))
    for other in set(TOOL_FORMATS[name].begins) - set(TOOL_FORMATS[name].triggers):
        assert not accepts(tag, f"{other}x")


@pytest.mark.parametrize(
    ("inside", "prompt", "answers", "refused"),
    [
        (True, None, ["So.</think>\n\n", "</think>"], ["", "<think>So.", "a<tool_call>b</think>"]),
        (False, None, ["<think>So.</think>\n", "<think></think>", "\n", ""], ["So.", "</think>"]),
        (False, "<think>\n\n</think>\n\n", ["", "\n"], ["<think>So.</think>", "So."]),
    ],
)
def test_reasoning_before_a_forced_call(
    inside: bool, prompt: str | None, answers: list[str], refused: list[str]
) -> None:
    row = TOOL_FORMATS["hermes"]
    tag = after_reasoning(forced_tag(row.tags, FUNCTIONS, False), THINK, inside, prompt, row.begins)
    call = write("hermes", ("get_weather", GOOD))
    assert all(accepts(tag, before + call) for before in answers)
    assert not any(accepts(tag, before + call) for before in refused)
    assert not accepts(tag, answers[0])
