"""The formats that a model's card names, and what they make of one request."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from dynamo.config.worker import REASONING_ALIASES, TOOL_CALL_ALIASES
from dynamo.frontend.formats.call_tags import (
    after_reasoning,
    can_be_tagged,
    forced_tag,
    strict_tag,
)
from dynamo.frontend.formats.forced_calls import (
    NamedCallParser,
    forced_name,
    is_forced,
)
from dynamo.frontend.formats.frames import FrameParser
from dynamo.frontend.formats.harmony import HARMONY_MARKERS, HarmonyParser
from dynamo.frontend.formats.json_calls import JsonCallParser, JsonCallShape
from dynamo.frontend.formats.message import AnswerMessage, AnswerParser, CallProbe
from dynamo.frontend.formats.reasoning import ContentParser, ReasoningParser
from dynamo.frontend.formats.request_tools import RequestTools, tool_functions
from dynamo.frontend.formats.table import REASONING_FORMATS, TOOL_FORMATS, ToolFormat, with_suffix
from dynamo.frontend.text.tokenizer import Tokenizer
from dynamo.protocols.control import STRUCTURAL_TAGS_KEY, ModelCard
from dynamo.protocols.openai import ChatCompletionRequest

log = logging.getLogger(__name__)


_REQUIRED = JsonCallShape((), bare=True)
_SUFFIXED = re.compile(r"<(?:think|tool_calls?|arg_key)(:[^\s>]+)>")


class AnswerFormat(NamedTuple):
    """How to read the answers to one request, whose ids ``tokenizer`` turns into text.

    ``named``: it names the only function that may be called. ``tagged``: the grammar of the answer
    is a structural tag, so that a forced call, too, is in the model's own format.
    """

    tokenizer: Tokenizer
    make: Callable[[AnswerMessage], AnswerParser]
    new_id: Callable[[], str]
    max_calls: int | None
    named: bool = False
    reasoning_field: str = "reasoning_content"
    tagged: bool = False

    def start(self) -> tuple[AnswerMessage, AnswerParser]:
        """The message of one choice, and its parser."""
        message = AnswerMessage(self.new_id, self.max_calls, self.reasoning_field)
        return message, self.make(message)


class ModelFormats:
    """The formats of one model; at least one of ``tool`` and ``reasoning`` is a known name.

    Chat answers have reasoning in ``reasoning_field``. ``takes_tags``: the model's engines take
    structural tags.
    """

    def __init__(
        self,
        tool: str | None,
        reasoning: str | None,
        tokenizer: Tokenizer,
        reasoning_field: str = "reasoning_content",
        takes_tags: bool = False,
    ) -> None:
        self._tool = None if tool is None else TOOL_FORMATS[tool]
        self._shape = None if reasoning is None else REASONING_FORMATS[reasoning]
        if self._tool is not None and self._tool.suffixed:
            self._tool = with_suffix(self._tool, _suffix(tokenizer))
        if self._shape is not None and self._shape.suffixed:
            self._shape = with_suffix(self._shape, _suffix(tokenizer))
        self._reasoning_field = reasoning_field
        self._takes_tags = takes_tags
        self._calls = tool == "harmony"
        self._harmony = self._calls or reasoning == "gpt_oss"
        marks = HARMONY_MARKERS if self._harmony else self._shape.markers if self._shape else ()
        self._tokenizer = tokenizer.showing(marks)
        self._with_tools = tokenizer.showing((*marks, *(self._tool.markers if self._tool else ())))

    @classmethod
    def of(cls, card: ModelCard, tokenizer: Tokenizer, reasoning_field: str) -> ModelFormats | None:
        """The formats that ``card`` names, None without any. An unknown name is logged."""
        config = card.runtime_config
        tool = _known(card, "tool_call_parser", config.tool_call_parser, TOOL_CALL_ALIASES)
        reasoning = _known(card, "reasoning_parser", config.reasoning_parser, REASONING_ALIASES)
        if tool is reasoning is None:
            return None
        takes_tags = config.runtime_data.get(STRUCTURAL_TAGS_KEY) is True
        return cls(tool, reasoning, tokenizer, reasoning_field, takes_tags)

    @property
    def can_force(self) -> bool:
        """Whether a tool call can be forced by a grammar; messages of harmony have none."""
        return self._tool is not None and not self._harmony

    @property
    def has_tags(self) -> bool:
        """Whether reasoning is between tags, which a prefilled answer may have opened."""
        return self._shape is not None

    def structural_tag(
        self, request: ChatCompletionRequest, prompt: str | None, prefill: str | None = None
    ) -> dict[str, Any] | None:
        """The grammar of the calls that ``request`` forces, or of those of its strict tools.

        None if it has neither, or if no structural tag can describe the format or the arguments.
        """
        tool, choice = self._tool, request.tool_choice
        if tool is None or not tool.tags or not self._takes_tags:
            return None
        functions = tool_functions(request.tools)
        forced, name = is_forced(choice), forced_name(choice)
        strict = choice != "none" and any(function.get("strict") is True for function in functions)
        if name is not None:
            functions = [function for function in functions if function["name"] == name][:1]
        if not (forced or strict) or not can_be_tagged(functions):
            return None
        single = name is not None or request.parallel_tool_calls is False
        if forced:
            answer = forced_tag(tool.tags, functions, single)
        elif tool.triggers:
            others = [marker for marker in tool.begins if marker not in tool.triggers]
            answer = strict_tag(tool.tags, tool.triggers, others, functions, single)
        else:
            return None
        inside = self._shape is not None and self._shape.begins_inside(prompt, prefill)
        answer = after_reasoning(answer, self._shape, inside, prompt, tool.begins)
        return {"type": "structural_tag", "format": answer}

    def answer(
        self,
        request: ChatCompletionRequest,
        prompt: str | None,
        prefill: str | None = None,
        tagged: bool = False,
    ) -> AnswerFormat | None:
        """How to read the answer to ``prompt``; None if it is content alone.

        ``prefill`` is the text at the end of the prompt that the answer continues, if any.
        ``tagged``: its grammar is a structural tag.
        """
        with_tools = bool(request.tools) and request.tool_choice != "none"
        tool = self._tool if with_tools else None
        if tool is None and self._shape is None and not self._harmony:
            return None
        return AnswerFormat(
            self._with_tools if tool is not None else self._tokenizer,
            partial(
                self._parser,
                request,
                tool,
                RequestTools.of(request.tools),
                self._shape is not None and self._shape.begins_inside(prompt, prefill),
                is_forced(request.tool_choice) and not tagged,
            ),
            _short_id if tool is not None and tool.short_ids else _id,
            1 if request.parallel_tool_calls is False else None,
            tool is not None and forced_name(request.tool_choice) is not None,
            self._reasoning_field,
            tagged,
        )

    def _parser(
        self,
        request: ChatCompletionRequest,
        tool: ToolFormat | None,
        tools: RequestTools,
        inside: bool,
        is_json: bool,
        message: AnswerMessage,
    ) -> AnswerParser:
        if self._harmony:
            return HarmonyParser(message, tools.names if self._calls and tool is not None else None)
        parser: AnswerParser = ContentParser(message)
        if tool is not None and is_json:
            parser = _json_calls(request, tools, message)
        elif tool is not None:
            parser = tool.make(message, tools)
        if self._shape is not None and self._shape.frames and not (tool and tool.frames):
            parser = FrameParser(message, self._shape.frames, parser)
        if self._shape is None:
            return parser
        if self._shape.as_content:
            # The template ends the prompt with the tag, so that the model does not write it.
            message.add_content("" if request.continue_final_message else self._shape.opens)
            return parser
        if tool is None:
            return ReasoningParser(message, self._shape, inside, parser)
        if is_json:
            return ReasoningParser(message, self._shape, inside, parser, True)
        # A marker of calls may end the reasoning: the parser of calls is tried on what follows.
        shape = self._shape._replace(calls=tool.begins)
        probe = partial(CallProbe, lambda message: tool.make(message, tools), tools.names)
        return ReasoningParser(message, shape, inside, parser, probe=probe)


def _json_calls(
    request: ChatCompletionRequest, tools: RequestTools, message: AnswerMessage
) -> AnswerParser:
    name = forced_name(request.tool_choice)
    if name is not None:
        return NamedCallParser(message, name)
    return JsonCallParser(message, _REQUIRED, tools.names)


def _known(card: ModelCard, field: str, name: str | None, aliases: Mapping[str, str]) -> str | None:
    """The canonical name of a format; None, with an error in the log, for an unknown one."""
    formats: Mapping[str, Any] = TOOL_FORMATS if field == "tool_call_parser" else REASONING_FORMATS
    canonical = aliases.get(name, name) if name is not None else None
    if canonical is None or canonical in formats:
        return canonical
    log.error(
        "the card of model %s names the %s %r, which this frontend does not know: its answers are "
        "not parsed. Known are %s",
        card.display_name, field, name, ", ".join(formats),
    )  # fmt: skip
    return None


def _suffix(tokenizer: Tokenizer) -> str:
    """The suffix of the markers among the special tokens of a checkpoint, "" without one."""
    for number in tokenizer.special_ids:
        marker = _SUFFIXED.fullmatch(tokenizer.token_text(number))
        if marker is not None:
            return marker[1]
    return ""


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return secrets.token_hex(5)[:9]
