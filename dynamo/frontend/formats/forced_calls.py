"""Forced tool calls: the parser of the answers, and what ``tool_choice`` forces."""

from __future__ import annotations

from typing import Any

from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.scan import JsonSpan, TextSteps


class NamedCallParser(TextSteps):
    """An answer that is the arguments of the tool ``name``; anything else is content."""

    __slots__ = ("_message", "_name", "_span")

    def __init__(self, message: AnswerMessage, name: str) -> None:
        super().__init__(self._beginning)
        self._message = message
        self._name = name
        self._span = JsonSpan()

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        self._message.add_content(self._take_aside() + self._text)
        self._message.finish()

    def _beginning(self) -> bool:
        self._put_space_aside()
        if not self._text:
            return False
        if self._text[0] == "{":
            self._take_aside()
            self._message.begin_call(self._name)
            self._step = self._arguments
        else:
            self._step = self._outside
        return True

    def _arguments(self) -> bool:
        end = self._span.end(self._text)
        self._message.add_json(self._take(len(self._text) if end < 0 else end))
        if end >= 0:
            if not self._span.open:
                self._message.end_call()
            self._step = self._outside
        return end >= 0

    def _outside(self) -> bool:
        self._message.add_content(self._take_aside() + self._take(len(self._text)))
        return False


def is_forced(choice: str | dict[str, Any] | None) -> bool:
    """Whether ``tool_choice`` demands a call."""
    return choice is not None and choice not in ("auto", "none")


def forced_name(choice: str | dict[str, Any] | None) -> str | None:
    """The function that ``tool_choice`` names, if any."""
    return choice["function"]["name"] if isinstance(choice, dict) else None
