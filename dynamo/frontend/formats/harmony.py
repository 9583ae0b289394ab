"""The harmony format of gpt-oss: messages on channels, each with a header. Text form.

The library ``openai-harmony`` needs a vocabulary file that it downloads; here the markers are read
from the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.request_tools import RequestTools
from dynamo.frontend.formats.scan import Markers, TextSteps

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_HEADS = Markers(_START, _CHANNEL)
_BODY_END = Markers(*_ENDS, _START, _CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_MAX_HEADER = 1024


class HarmonyShape(NamedTuple):
    """The markers of harmony, whose reasoning is no other format's."""

    every_marker: tuple[str, ...] = HARMONY_MARKERS
    begins: tuple[str, ...] = ()

    def parser(self, message: AnswerMessage, tools: RequestTools) -> HarmonyParser:
        """Return a parser of one answer."""
        return HarmonyParser(message, tools.names)


class HarmonyParser(TextSteps):
    """``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``.

    Analysis is reasoning; with ``tool_names``, those of the request's tools, a message to
    ``functions.NAME`` is a tool call, and so is one to a tool's ``NAME``; all else is content. The
    prompt ends with ``<|start|>assistant``, so an answer begins inside a header.
    """

    __slots__ = ("_channel", "_message", "_tool_names")

    def __init__(self, message: AnswerMessage, tool_names: frozenset[str] | None) -> None:
        super().__init__(self._beginning)
        self._message = message
        self._tool_names = tool_names
        self._channel = ""  # of the current body: reasoning, call or content

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        if self._step == self._body:
            if not _BODY_END.may_begin(self._text):
                self._add(self._text)
            # <|call|> ends the text, as a token that is not shown: the call is whole without it.
            if self._channel == "call" and not self._message.in_string and self._message.stopped:
                self._message.end_call()
        elif not self._channel:
            self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _beginning(self) -> bool:
        """An answer may begin with a recipient: the rest of a header."""
        self._put_space_aside(" ")
        if "to=".startswith(self._text):
            return False
        self._step = self._header if self._text.startswith("to=") else self._outside
        return True

    def _outside(self) -> bool:
        """Between messages."""
        if self._aside:
            self._message.add_content(self._take_aside())
        count, marker = _HEADS.find(self._text)
        self._message.add_content(self._take(count))
        if marker:
            self._put_aside(len(marker))
            self._step = self._header
        return bool(marker)

    def _header(self) -> bool:
        end = self._text.find(_MESSAGE)
        if end < 0 and len(self._text) <= _MAX_HEADER + len(_MESSAGE):
            return False
        if not 0 <= end <= _MAX_HEADER:
            self._step = self._outside
            return True
        self._begin(self._take_aside() + self._take(end))
        self._take(len(_MESSAGE))
        self._step = self._body
        return True

    def _begin(self, header: str) -> None:
        """Begin the message that ``header`` describes."""
        recipient = _RECIPIENT.search(header)
        name = None if recipient is None else self._called(recipient[1])
        if name is not None:
            self._channel = "call"
            self._message.begin_call(name)
            return
        channel = header.rpartition(_CHANNEL)[2].split()
        analysis = channel[:1] == ["analysis"]
        self._channel = "reasoning" if analysis else "content"
        self._message.next_part(analysis)

    def _called(self, recipient: str) -> str | None:
        """The function that ``recipient`` is, None for another. Models leave the namespace out in
        long contexts."""
        if self._tool_names is None:
            return None
        name = recipient.removeprefix("functions.")
        return name if name != recipient or name in self._tool_names else None

    def _body(self) -> bool:
        count, marker = _BODY_END.find(self._text)
        self._add(self._take(count))
        if marker:
            # Another marker is the head of the next message: the end of this one is missing.
            self._take(len(marker) if marker in _ENDS else 0)
            if self._channel == "reasoning":
                self._message.end_reasoning()
            elif self._channel == "call":
                self._message.end_call()
            self._step = self._outside
        return bool(marker)

    def _add(self, text: str) -> None:
        if self._channel == "call":
            self._message.add_json(text)
        elif self._channel == "reasoning":
            self._message.add_reasoning(text)
        else:
            self._message.add_content(text)
