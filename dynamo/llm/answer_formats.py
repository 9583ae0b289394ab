"""The formats of a model's answers, found in its chat template and config.json.

A template writes earlier calls and reasoning as the model writes new ones: their markers name the
format. ``type:NAME;`` is a marker, too: the ``model_type`` of config.json. It decides where several
formats have the same markers, and where a model comes without a template.
"""

from __future__ import annotations

import logging

from dynamo.config.worker import NO_PARSER, WorkerSettings
from dynamo.llm.model_directory import ModelDirectory

log = logging.getLogger(__name__)

# Each row has markers that the template must have, all of them. The first row that fits counts.
_CALLS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<｜DSML｜ calls>",), "deepseek_v41"),
    (("<｜DSML｜tool_calls>",), "deepseek_v4"),
    (("type:deepseek_v4;",), "deepseek_v4"),
    (("<｜DSML｜function_calls>",), "deepseek_v3_2"),
    (("type:deepseek_v32;",), "deepseek_v3_2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3_1"),
    (("<｜tool_calls_begin｜>", "steptml:"), "step3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<dots_function_call>",), "dots"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<ifm|tool_calls>",), "k2_horizon"),
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|plamo:begin_tool_requests:plamo|>",), "plamo3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|START_ACTION|>",), "cohere_command"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|content_invoke_tool_json|>",), "inkling"),
    (("<|channel|>", "<|message|>", "commentary"), "harmony"),
    (("function call", "<|role_sep|>"), "gigachat3"),
    (("<TOOLCALL>",), "nemotron_deci"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_calls", "<arg_key"), "hy_v3"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function=", "type:mimo;"), "mimo"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<function name=", "<param name="), "minicpm5"),
    (("<tool_call>", "<response>"), "ernie45"),
    (("<function_calls>",), "olmo3"),
    (("<function_call>",), "granite_20b_fc"),
    (("<|tool_call|>", "type:granite;"), "granite"),
    (("<tool_call>",), "hermes"),
    (("<tool_calls>",), "jamba"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
)
_REASONING: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), "gpt_oss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<mm:think>",), "minimax_m3"),
    (("◁think▷",), "kimi"),
    (("<ifm|think>",), "k2_horizon"),
    (("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3"),
    (("<|START_THINKING|>",), "cohere_command"),
    (("<|content_thinking|>",), "inkling"),
    (("<|plamo:begin_think:plamo|>",), "plamo3"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<|message|>", "to=self"), "muse_glimmer"),
    (("Here is my thought process:",), "granite"),
    (("<tool_calls", "<arg_key", "<think"), "hy_v3"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>", "<response>"), "ernie45"),
    (("<think>",), "basic"),
    (("</think>",), "basic"),
    (("type:deepseek_v32;",), "deepseek_v3_1"),
    (("type:deepseek_v4;",), "deepseek_v4"),
)


def choose_formats(
    settings: WorkerSettings, model: ModelDirectory
) -> tuple[str | None, str | None]:
    """Return the formats of calls and reasoning: those of ``settings``, else those of the model.

    A choice after the model is logged. Raises ConfigError for a template that cannot be read.
    """
    tool, reasoning = settings.tool_call_parser, settings.reasoning_parser
    if tool is None or reasoning is None:
        templates = model.chat_templates(settings.custom_jinja_template)
        sources, path = templates or ({}, model.path / "config.json")
        text = "\n".join((f"type:{model.config.get('model_type')};", *sources.values()))
        own_tool = _first(_CALLS, text) if tool is None else None
        own_reasoning = _first(_REASONING, text) if reasoning is None else None
        if own_tool or own_reasoning:
            log.info(
                "%s chooses how answers are parsed: tool calls as %s, reasoning as %s; "
                "--dyn-tool-call-parser and --dyn-reasoning-parser name others, or none",
                path, own_tool or tool or NO_PARSER, own_reasoning or reasoning or NO_PARSER,
            )  # fmt: skip
        tool, reasoning = tool or own_tool, reasoning or own_reasoning
    return format_name(tool), format_name(reasoning)


def format_name(parser: str | None) -> str | None:
    """Return the format that a flag names, None for ``none``."""
    return None if parser == NO_PARSER else parser


def _first(rows: tuple[tuple[tuple[str, ...], str], ...], text: str) -> str | None:
    return next((name for markers, name in rows if all(marker in text for marker in markers)), None)
