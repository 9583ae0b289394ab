"""The formats that the chat template and config.json of a model choose."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from family_cases import FAMILIES, PARIS, TIME

from dynamo.config.worker import REASONING_PARSERS, TOOL_CALL_PARSERS, WorkerSettings
from dynamo.llm import answer_formats
from dynamo.llm.answer_formats import choose_formats
from dynamo.llm.model_directory import ModelDirectory

# What a template has beside the calls, in families whose calls alone could be another one's.
BESIDE = {
    "ernie45": "<response>\n{{ content }}\n</response>",
    "gigachat3": "function call<|role_sep|>\n",
    "llama3_json": "<|python_tag|>",
}
TYPES = {"granite": "granite", "mimo": "mimo"}
NOT_CHOSEN = {
    "phi4": "its template does not write calls",
    "pythonic": "a list of calls has no marker",
    "xlam": "its calls are code blocks, which any template may have",
}


def model(path: Path, template: str | None, model_type: str = "llama") -> ModelDirectory:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ModelDirectory(path)


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {*NOT_CHOSEN}))
def test_the_calls_of_a_template_choose_their_format(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    calls = [PARIS] if family.single else [PARIS, TIME]
    template = f"{family.write(calls)} {BESIDE.get(name, '')}"
    found = choose_formats(WorkerSettings(), model(tmp_path, template, TYPES.get(name, "llama")))
    assert found[0] == name


@pytest.mark.parametrize("name", NOT_CHOSEN)
def test_calls_without_a_marker_choose_none(tmp_path: Path, name: str) -> None:
    template = FAMILIES[name].write([PARIS])
    assert choose_formats(WorkerSettings(), model(tmp_path, template)) == (None, None)


@pytest.mark.parametrize(
    ("model_type", "template", "tool", "reasoning"),
    [
        # pieces of published templates
        ("qwen2", '<tool_call>\\n{{"name": <function-name>}}\\n</tool_call>', "hermes", None),
        ("qwen3", "<tool_call>\n{\"name\": \"'}} content.split('</think>')", "hermes", "basic"),
        (
            "step3p7",
            "'<tool_call>\\n<function=' + tool_call.name '<|im_start|>assistant\\n<think>\\n'",
            "qwen3_coder",
            "basic",
        ),
        ("nemotron_h", "{{- '<TOOLCALL>[' -}} {{- '<think></think>' -}}", "nemotron_deci", "basic"),
        ("kimi_k3", "{{- '<|open|>' + tag -}} '<|sep|>' '<|close|>'", "kimi_k3", "kimi_k3"),
        (
            "llama",
            'format {"name": function name, "parameters": dictionary of argument name and its',
            "llama3_json",
            None,
        ),
        ("gpt_oss", "<|channel|>analysis<|message|> commentary to=functions", "harmony", "gpt_oss"),
        ("hunyuan", "<tool_calls:6124c78e> <arg_key:6124c78e> <think:6124c78e>", "hy_v3", "hy_v3"),
        ("mistral", "[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("granite", "Here is my thought process: Here is my response:", None, "granite"),
        ("llama", "{{ messages[0].content }}", None, None),
        ("deepseek_v32", None, "deepseek_v3_2", "deepseek_v3_1"),
        ("llama", None, None, None),
    ],
)  # fmt: skip
def test_a_template_chooses(
    tmp_path: Path, model_type: str, template: str | None, tool: str | None, reasoning: str | None
) -> None:
    directory = model(tmp_path, template, model_type)
    assert choose_formats(WorkerSettings(), directory) == (tool, reasoning)


def test_flags_and_none_win(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory = model(tmp_path, "<tool_call> <think>")
    both = WorkerSettings(tool_call_parser="mistral", reasoning_parser="none")
    assert choose_formats(both, directory) == ("mistral", None)
    assert not caplog.messages
    one = WorkerSettings(tool_call_parser="none")
    assert choose_formats(one, directory) == (None, "basic")
    (line,) = caplog.messages
    assert "tool calls as none, reasoning as basic" in line and str(tmp_path) in line


def test_a_template_of_the_flag_decides(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("[TOOL_CALLS]")
    settings = WorkerSettings(custom_jinja_template=str(path))
    assert choose_formats(settings, model(tmp_path, "<tool_call>")) == ("mistral", None)


def test_only_known_formats_are_chosen() -> None:
    assert {name for _, name in answer_formats._CALLS} <= {*TOOL_CALL_PARSERS}
    assert {name for _, name in answer_formats._REASONING} <= {*REASONING_PARSERS}
