"""The message that a parser builds: reasoning, content and tool calls, in pieces or as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dynamo.frontend.formats.scan import SPACE, Markers, TextSteps


class AnswerParser(Protocol):
    """Turns the text of one choice, in pieces of any size, into parts of its message."""

    def push(self, text: str) -> None:
        """Add text."""

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""


class ToolCallPart:
    """The new part of tool call ``index``. ``id`` and ``name`` are None after its first part."""

    __slots__ = ("arguments", "id", "index", "name")

    def __init__(self, index: int, id: str | None, name: str | None) -> None:
        self.index = index
        self.id = id
        self.name = name
        self.arguments: list[str] = []

    def whole(self) -> dict[str, Any]:
        """The call as an element of ``message.tool_calls``."""
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}

    def delta(self) -> dict[str, Any]:
        """The part as an element of ``delta.tool_calls``."""
        if self.name is not None:
            return {"index": self.index, **self.whole()}
        return {"index": self.index, "function": {"arguments": "".join(self.arguments)}}


class AnswerDelta(NamedTuple):
    """A part of a message, in this order; ``calls`` are parts of tool calls. More of a call that
    has begun comes before all else."""

    reasoning: str | None
    content: str | None
    calls: list[ToolCallPart]


class _TextPart:
    """Pieces of text. White space at the end is held back until more text follows."""

    __slots__ = ("_space", "pieces", "started")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.started = False
        self._space: list[str] = []

    def add(self, text: str) -> None:
        body = text.rstrip(SPACE)
        if body:
            if self._space:
                self.keep_space()
            self.pieces.append(body)
            self.started = True
        if len(body) != len(text):
            self._space.append(text[len(body) :])

    def keep_space(self) -> None:
        self.pieces += self._space
        self._space.clear()

    def drop_space(self) -> None:
        self._space.clear()

    def take(self) -> str | None:
        if not self.pieces:
            return None
        text = self.pieces[0] if len(self.pieces) == 1 else "".join(self.pieces)
        self.pieces.clear()
        return text


class AnswerMessage:
    """What a parser has found since the last :meth:`drain`; nothing is drained for one body.

    ``max_calls`` bounds the tool calls; later ones are dropped. ``called``: there is a tool call.
    ``new_id`` makes the id of a call. White space between a text and a call is dropped.
    """

    __slots__ = (
        "_calls",
        "_content",
        "_count",
        "_earlier",
        "_max_calls",
        "_muted",
        "_new_id",
        "_reasoning",
        "reasoning_field",
    )

    def __init__(
        self,
        new_id: Callable[[], str],
        max_calls: int | None = None,
        reasoning_field: str = "reasoning_content",
    ) -> None:
        self.reasoning_field = reasoning_field
        self._reasoning = _TextPart()
        self._content = _TextPart()
        self._calls: list[ToolCallPart] = []
        self._earlier: list[AnswerDelta] = []  # what precedes the texts and calls above
        self._count = 0
        self._muted = False
        self._max_calls = max_calls
        self._new_id = new_id

    @property
    def called(self) -> bool:
        """Whether a tool call has begun."""
        return self._count > 0

    @property
    def answering(self) -> bool:
        """Whether the content or a tool call has begun."""
        return self._count > 0 or self._content.started

    @property
    def reasoned(self) -> bool:
        """Whether there is reasoning."""
        return self._reasoning.started

    @property
    def pending(self) -> bool:
        """Whether :meth:`drain` has anything to return."""
        return bool(self._content.pieces or self._reasoning.pieces or self._calls or self._earlier)

    def add_reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        if self._calls or self._content.pieces:
            self._divide()
        self._reasoning.add(text)

    def end_reasoning(self) -> None:
        """The reasoning is complete: drop the white space at its end."""
        self._reasoning.drop_space()

    def add_content(self, text: str) -> None:
        """Add to ``content``."""
        if self._calls:
            self._divide()
        self._content.add(text)

    def next_part(self, reasoning: bool) -> None:
        """Separate what follows from the reasoning, or the content, so far with a line break."""
        part = self._reasoning if reasoning else self._content
        if part.started:
            part.drop_space()
            part.add("\n")

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call, with the id that the model gave it, if any; its arguments follow."""
        self._content.drop_space()
        self._muted = self._count == self._max_calls
        if not self._muted:
            self._calls.append(ToolCallPart(self._count, call_id or self._new_id(), name))
            self._count += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call begun last."""
        if self._muted or not text:
            return
        calls = self._calls
        if not calls and self._earlier:  # a text came in between
            calls = self._earlier[-1].calls
        if not calls:  # its beginning was drained
            calls = self._calls
            calls.append(ToolCallPart(self._count - 1, None, None))
        calls[-1].arguments.append(text)

    def finish(self) -> None:
        """Nothing follows: keep the white space held back, unless it follows a call."""
        self._reasoning.keep_space()
        if self._count:
            self._content.drop_space()
        else:
            self._content.keep_space()

    def text_alone(self) -> tuple[str | None, str | None]:
        """Drain ``(content, None)`` or ``(None, reasoning)`` if that is all."""
        if self._calls or (self._content.pieces and self._reasoning.pieces) or self._earlier:
            return None, None
        return self._content.take(), self._reasoning.take()

    def arguments_alone(self) -> tuple[int, str] | None:
        """Drain the index and new arguments of a call that has begun, if that is all."""
        calls = self._calls
        if len(calls) != 1 or calls[0].name is not None:
            return None
        if self._content.pieces or self._reasoning.pieces or self._earlier:
            return None
        call = calls.pop()
        return call.index, "".join(call.arguments)

    def drain(self) -> dict[str, Any]:
        """The ``delta`` of everything since the last time, in which a text has no place."""
        delta: dict[str, Any] = {}
        reasoning, content, calls = self._joined()
        if reasoning is not None:
            delta[self.reasoning_field] = reasoning
        if content is not None:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [call.delta() for call in calls]
        return delta

    def take(self) -> list[AnswerDelta]:
        """Everything since the last time, in its order; nothing is an empty list."""
        deltas, self._earlier = self._earlier, []
        if self._content.pieces or self._reasoning.pieces or self._calls:
            calls, self._calls = self._calls, []
            deltas.append(AnswerDelta(self._reasoning.take(), self._content.take(), calls))
        return deltas

    def whole(self) -> dict[str, Any]:
        """The ``message`` of an answer in one body."""
        reasoning, content, calls = self._joined()
        if content is None and not self._count:
            content = ""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning is not None:
            message[self.reasoning_field] = reasoning
        if calls:
            message["tool_calls"] = [call.whole() for call in calls]
        return message

    def _divide(self) -> None:
        """What follows comes after the texts and calls so far."""
        self._earlier = self.take()

    def _joined(self) -> AnswerDelta:
        """Everything since the last time, as one delta; more of a call is part of it."""
        deltas = self.take()
        if len(deltas) == 1:
            return deltas[0]
        reasoning = [one.reasoning for one in deltas if one.reasoning is not None]
        content = [one.content for one in deltas if one.content is not None]
        return AnswerDelta(
            "".join(reasoning) if reasoning else None,
            "".join(content) if content else None,
            [call for one in deltas for call in one.calls],
        )


class CallSteps(TextSteps):
    """The base of a parser of calls after markers.

    What was put aside since a marker is content, if no call follows.
    """

    __slots__ = ("_message",)

    def __init__(self, first: Callable[[], bool], message: AnswerMessage) -> None:
        super().__init__(first)
        self._message = message

    def _content(self, starts: Markers) -> str:
        """Pass on content up to one of ``starts``; take and return that one, or ""."""
        if self._aside:
            self._message.add_content(self._take_aside())
        count, marker = starts.find(self._text)
        self._message.add_content(self._take(count))
        self._put_aside(len(marker))
        return marker

    def _next_marker(self, markers: Markers, end: str) -> str | None:
        """Take space and the marker behind it, "" without one; None if more text is needed.

        An ``end`` behind a call is dropped.
        """
        if self._aside:
            self._put_space_aside()
        else:
            self._take_space()
        if markers.may_begin(self._text):
            return None
        marker = markers.leading(self._text)
        if marker != end or self._aside:
            self._put_aside(len(marker))
        else:
            self._take(len(marker))
        return marker
