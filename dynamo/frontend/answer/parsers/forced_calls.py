"""The answer to a named ``tool_choice``: the arguments of that function, and nothing else."""

from __future__ import annotations

from dynamo.frontend.formats.message import AnswerMessage
from dynamo.frontend.formats.scan import JsonSpan, TextSteps

__all__ = ["NamedCallParser"]


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
            self._step = self._rest
        return True

    def _arguments(self) -> bool:
        if not self._text:
            return False
        end = self._span.end(self._text)
        self._message.add_arguments(self._take(len(self._text) if end < 0 else end))
        if end >= 0:
            self._step = self._rest
        return end >= 0

    def _rest(self) -> bool:
        self._message.add_content(self._take_aside() + self._take(len(self._text)))
        return False
