"""Chat templates: Hugging Face's conventions in a sandboxed jinja2, compiled once per model."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from dynamo.errors import ConfigError, InvalidArgument, shorten
from dynamo.frontend.prompt.message_roles import PrintedRoles, printable
from dynamo.frontend.prompt.messages import (
    IMAGE,
    CallForm,
    ContentForm,
    Message,
    alternating,
    template_messages,
)
from dynamo.frontend.prompt.template_bounds import joined
from dynamo.frontend.prompt.template_environment import (
    OutOfTime,
    RenderContext,
    TemplateEnvironment,
)
from dynamo.llm.model_directory import ModelDirectory
from dynamo.protocols.openai import ChatCompletionRequest

Tools = Sequence[Mapping[str, Any]]

_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
_SHOWN = 1000
_KNOWN_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_SWITCHES = frozenset(("enable_thinking", "thinking"))
"""The names by which templates switch reasoning on and off."""
_REMEDY = "correct it or give another with --custom-jinja-template"
_END_MARK = f"end-{secrets.token_hex(8)} "
"""Behind the text of a message that the model continues, to find its end in the prompt: the text
itself may also be in the marker that ends a message. No client can know it."""
_NO_TEXT = (
    "Validation: 'continue_final_message' is set, but the last message has no text in the "
    "rendered prompt"
)
_PROBE = "\x02probe\x03"
# The first that prints the arguments wins: most templates take an object, beside a text.
_CALL_FORMS = [CallForm(text, null) for null in (False, True) for text in (False, True)]


_QUESTION: list[Message] = [{"role": "user", "content": "q"}]
# Mistral's templates refuse ids of another form than nine letters and digits.
_CALL = {"id": "callcall1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: list[Message] = [
    *_QUESTION,
    _CALLED,
    {"role": "tool", "tool_call_id": "callcall1", "name": "f", "content": "r"},
]
_ANSWER: Message = {"role": "assistant", "content": "a"}
_FOREIGN_IDS = ("call_abcdef0123456789", "a")


class TemplateTimeout(InvalidArgument):
    """A chat template did not end in time."""


class ChatTemplate:
    """One model's chat template.

    ``named`` are the sources by name: ``default``, and perhaps ``tool_use`` for requests with
    tools. ``specials`` are ``bos_token`` and the like. Raises ConfigError if a
    source does not compile, or does not end for a short message.
    """

    def __init__(self, named: Mapping[str, str], specials: Mapping[str, str], origin: str) -> None:
        environment = TemplateEnvironment()
        # As transformers does: templates compare ``documents`` with None.
        shared = {"documents": None, **specials}
        try:
            compiled = {name: environment.from_string(text, shared) for name, text in named.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{origin}, line {error.lineno}: the chat template does not compile: "
                f"{error.message}; {_REMEDY}"
            ) from None
        except SyntaxError as error:  # of the Python that jinja2 makes, such as of {{ a[1,:] }}
            raise ConfigError(
                f"{origin}: the chat template does not compile: {error.msg}; {_REMEDY}"
            ) from None
        except RecursionError:
            raise ConfigError(
                f"{origin}: the chat template is nested too deeply to compile; {_REMEDY}"
            ) from None
        for template in compiled.values():
            # jinja2 gives a ChainMap, and copying it was half the time of a rendering.
            template.globals = dict(template.globals)
        self._default = compiled.get("default") or next(iter(compiled.values()))
        self._with_tools = compiled.get("tool_use") or self._default
        # Some templates print any role: only one that names this role suits a model trained on it.
        self._has_developer = any("developer" in text for text in named.values())
        try:
            self._try_forms()
        except OutOfTime as error:
            raise ConfigError(
                f"{origin}: the chat template does not end with a short message: {error}; {_REMEDY}"
            ) from None

    def _try_forms(self) -> None:
        """Find out which messages the template can print."""
        self._content = self._content_form()
        self._takes_parts = self._content is ContentForm.PARTS
        call_form = next(filter(self._prints_call, _CALL_FORMS), None)
        form = call_form or _CALL_FORMS[0]
        null = form._replace(null_content=True)
        form = form._replace(keeps_null=self._prints_call(null) and not self._prints_none(null))
        thinking = form._replace(thinking=True)
        self._call_form = thinking if self._prints_call(thinking) else form
        # Probes of roles are rendered as messages of clients: by the widest rules until then.
        self._alternates = self._joins_results = False
        self._always = frozenset(("user", "assistant", "system", "tool", "developer"))
        self._roles = PrintedRoles()
        # A template that prints no text of a user would fail every probe of the roles.
        if self._probed([{"role": "user", "content": _PROBE}]):
            self._roles = self._printed_roles(call_form is not None)
        self._always = self._roles.always()
        self._joins_results = self._fails_after(_RESULT)
        self._alternates = self._joins_results or self._fails_after(_QUESTION)

    @functools.cached_property
    def prints_images(self) -> bool:
        """Whether this template writes something for an image."""
        if self._content is ContentForm.TEXT:
            return False
        text = {"type": "text", "text": _PROBE}
        try:
            without, with_image = (
                self._render([{"role": "user", "content": parts}], None, True)
                for parts in ([text], [IMAGE, text])
            )
        except (InvalidArgument, OutOfTime):
            return False
        return _PROBE in with_image and with_image != without

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises InvalidArgument with the template's own message.

        ``continue_final_message`` leaves the last message open, for the model to continue.
        ``variables`` are more names for the template (chat_template_kwargs). O(messages).
        """
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        roles = {message.get("role") for message in messages}
        if not roles <= self._always:
            self._check_roles(roles)
            messages = printable(messages, self._roles)
        if self._alternates:
            messages = alternating(messages, self._joins_results)
        # Most chats are texts alone, and pass as they are, without a copy.
        if self._takes_parts or any(
            type(message.get("content")) is not str or "tool_calls" in message
            for message in messages
        ):
            messages = template_messages(messages, self._content, self._call_form)
        opens_answer = add_generation_prompt and not continue_final_message
        try:
            prompt = self._render(messages, tools, opens_answer, variables)
        except OutOfTime as error:
            raise TemplateTimeout(f"Chat template: {error}; send fewer messages") from None
        return _before_mark(prompt) if continue_final_message else prompt

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._with_tools if tools else self._default
        names = dict(template.globals)
        if variables:
            names.update(variables)
        names["messages"] = messages
        # Templates test for None: an empty list would open the section of tools.
        names["tools"] = tools or None
        names["add_generation_prompt"] = add_generation_prompt
        try:
            return joined(template.root_render_func(RenderContext.begin(template, names)))
        except _RENDER_ERRORS as error:
            raise InvalidArgument(f"Chat template: {shorten(error, _SHOWN)}") from None

    def _content_form(self) -> ContentForm:
        """Find out which content this template can print, by rendering a probe as both."""
        if not self._prints([{"type": "text", "text": _PROBE}]):
            return ContentForm.TEXT
        return ContentForm.EITHER if self._prints(_PROBE) else ContentForm.PARTS

    def _prints_call(self, form: CallForm) -> bool:
        """Whether the arguments of a tool call in this form are rendered, or its thinking."""
        return "probe" in self._call_prompt(form)

    def _prints_none(self, form: CallForm) -> bool:
        """Whether a template prints null content as a word."""
        texts = [self._call_prompt(form._replace(null_content=null)) for null in (True, False)]
        return any(texts[0].count(word) > texts[1].count(word) for word in ("None", "null"))

    def _call_prompt(self, form: CallForm) -> str:
        """The prompt of a message with a call in this form, "" if it cannot be rendered."""
        arguments: Any = {"p": "" if form.thinking else _PROBE}
        if form.text_arguments:
            arguments = json.dumps(arguments)
        call = {**_CALL, "function": {"name": "f", "arguments": arguments}}
        content = None if form.null_content else ""
        message: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
        if form.thinking:
            message = {**message, "thinking": _PROBE}
        try:
            return self._render([*_QUESTION, message], None, True)
        except InvalidArgument:
            return ""

    def _fails_after(self, messages: list[Message]) -> bool:
        """Whether ``messages`` can be rendered, but not with one more of the user behind them.

        The templates of Mistral and Gemma fail so; agents send such messages.
        """
        return self._renders(messages) and not self._renders([*messages, *_QUESTION])

    def _printed_roles(self, calls: bool) -> PrintedRoles:
        """Find out which messages are printed, by rendering each with a probe in its text."""
        system: Message = {"role": "system", "content": _PROBE}
        developer: Message = {"role": "developer", "content": _PROBE}
        brief: Message = {"role": "system", "content": "s"}
        first = self._probed([system, *_QUESTION])
        # A second system message: behind the first, and behind an answer. Templates differ there.
        later = first and self._probed([brief, system, *_QUESTION])
        foreign = [
            [*_QUESTION, {**_CALLED, "tool_calls": [{**_CALL, "id": call_id}]}]
            for call_id in _FOREIGN_IDS
        ]
        results = self._renders(_RESULT)
        return PrintedRoles(
            system=first,
            later_system=later and self._probed([brief, *_QUESTION, _ANSWER, system, *_QUESTION]),
            result_system=not results or self._probed([system, *_RESULT]),
            developer=self._has_developer and self._probed([developer, *_QUESTION]),
            tool=self._probed([*_RESULT[:-1], {**_RESULT[-1], "content": _PROBE}]),
            calls=calls,
            foreign_ids=not calls or all(map(self._renders, foreign)),
        )

    def _check_roles(self, roles: set[Any]) -> None:
        """Refuse a role of no API that the template drops. Raises InvalidArgument."""
        for role in roles - _KNOWN_ROLES:
            try:
                text = self._render([*_QUESTION, {"role": role, "content": _PROBE}], None, True)
            except (InvalidArgument, OutOfTime):
                continue  # so does the prompt, with the template's own message
            if "probe" not in text:
                raise InvalidArgument(
                    f"Validation: messages: the chat template does not print the role "
                    f"`{shorten(role)}`; use system, developer, user, assistant or tool"
                )

    def _probed(self, messages: list[Message], probe: str = "probe") -> bool:
        """Whether ``messages`` can be rendered and the probe in them is printed."""
        try:
            return probe in self.render(messages)
        except InvalidArgument:
            return False

    def _renders(self, messages: list[Message]) -> bool:
        return self._probed(messages, "")

    def _prints(self, content: Any) -> bool:
        try:
            prompt = self._render([{"role": "user", "content": content}], None, True)
        except InvalidArgument:
            return False
        # A template for text alone prints the list as Python does.
        return _PROBE in prompt and "'type'" not in prompt and '"type"' not in prompt


def load_template(
    model: str | Path | ModelDirectory, custom_path: str | Path | None = None
) -> ChatTemplate | None:
    """Return the template in ``custom_path`` or of a model directory, None if it has none.

    The first of custom file, chat_template.jinja, chat_template.json and tokenizer_config.json
    wins. Raises ConfigError.
    """
    directory = model if isinstance(model, ModelDirectory) else ModelDirectory(model)
    templates = directory.chat_templates(custom_path)
    if templates is None:
        return None
    return ChatTemplate(templates[0], directory.special_tokens, str(templates[1]))


def request_template(text: str, specials: Mapping[str, str]) -> ChatTemplate:
    """Return the template that a request brings. Raises InvalidArgument. O(characters)."""
    try:
        return ChatTemplate({"default": text}, specials, "Validation: 'chat_template'")
    except ConfigError as error:
        raise InvalidArgument(error.message.removesuffix(f"; {_REMEDY}")) from None


def template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """The variables that the request adds to those of every template."""
    variables: dict[str, Any] = {}
    if request.chat_template_args:
        variables.update(request.chat_template_args)
    if request.chat_template_kwargs:
        variables.update(request.chat_template_kwargs)
    effort = request.reasoning_effort
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
        if not _SWITCHES & variables.keys():  # else the client has said it itself
            variables.update(dict.fromkeys(_SWITCHES, effort != "none"))
    if request.documents is not None:
        variables["documents"] = request.documents
    if variables:
        # What the client sends in other fields cannot be overridden.
        for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            variables.pop(name, None)
    return variables


def _marked(message: Message) -> Message:
    """``message`` with the mark behind its text. Raises InvalidArgument without a text."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": content + _END_MARK}
    parts = list(content) if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        text = parts[index].get("text")
        if isinstance(text, str) and text:
            parts[index] = {**parts[index], "text": text + _END_MARK}
            return {**message, "content": parts}
    raise InvalidArgument(_NO_TEXT)


def _before_mark(prompt: str) -> str:
    """``prompt`` up to the mark: up to the end of the text of the last message."""
    mark = _END_MARK.rstrip()
    start = prompt.rfind(mark)
    if start < 0:
        raise InvalidArgument(_NO_TEXT)
    text = prompt[:start]
    # A template that trims the text has taken the space of the mark.
    return text if prompt.startswith(_END_MARK, start) else text.rstrip()
