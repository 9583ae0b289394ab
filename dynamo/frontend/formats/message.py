"""The message that a parser builds: reasoning, content and tool calls, in pieces or as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dynamo.frontend.formats.scan import SPACE, Markers, StringEscapes, TextSteps


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

    __slots__ = ("_space", "calls", "pieces", "started")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.started = False
        self.calls = 0  # that precede the part of it begun last
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
    """What a parser has found since the last :meth:`take`; nothing is taken for one body.

    ``max_calls`` bounds the tool calls; later ones are dropped. ``called``: there is a tool call.
    ``new_id`` makes the id of a call. White space between a text and a call is dropped.
    ``in_call``: the call begun last is not whole; ``cut``: one before is not. ``stopped``: the
    model ended the answer itself, so it has nothing to add to a call that is open.
    """

    __slots__ = (
        "_blank", "_calls", "_content", "_count", "_earlier", "_escapes", "_max_calls",
        "_muted", "_new_id", "_reasoning", "cut", "in_call", "reasoning_field", "stopped",
    )  # fmt: skip

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
        self._escapes = StringEscapes()
        self._blank = False  # the call begun last has no arguments yet
        self.in_call = self.cut = False
        self.stopped = False

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
        """Whether :meth:`take` has anything to return."""
        return bool(self._content.pieces or self._reasoning.pieces or self._calls or self._earlier)

    def add_reasoning(self, text: str) -> None:
        """Add to the reasoning."""
        if self._calls or self._content.pieces:
            # Texts and calls of one delta have an order of their own: begin another.
            self._earlier = self.take()
        self._reasoning.add(text)

    def end_reasoning(self) -> None:
        """The reasoning is complete: drop the white space at its end."""
        self._reasoning.drop_space()

    def add_content(self, text: str) -> None:
        """Add to ``content``."""
        if self._calls:
            self._earlier = self.take()
        self._content.add(text)

    def next_part(self, reasoning: bool) -> None:
        """Separate what follows from the reasoning, or the content, so far with a line break.

        A call in between separates them already.
        """
        part = self._reasoning if reasoning else self._content
        if part.started:
            part.drop_space()
            if part.calls == self._count:
                part.add("\n")
        part.calls = self._count

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call, with the id that the model gave it, if any; its arguments follow."""
        self._content.drop_space()
        self._muted = self._count == self._max_calls
        self._escapes = StringEscapes()
        # The call before has no end: the answer must not end as one whose calls are complete.
        self.cut = self.cut or self.in_call
        self._blank = self.in_call = True
        if not self._muted:
            self._calls.append(ToolCallPart(self._count, call_id or self._new_id(), name))
            self._count += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call begun last."""
        if self._muted or not text:
            return
        if self._blank:
            self._blank = text.isspace()
        calls = self._calls
        if not calls and self._earlier:  # a text came in between
            calls = self._earlier[-1].calls
        if not calls:  # its beginning was drained
            calls = self._calls
            calls.append(ToolCallPart(self._count - 1, None, None))
        calls[-1].arguments.append(text)

    @property
    def size(self) -> tuple[int, int, int]:
        """How many deltas :meth:`take` has before the last one; the pieces of the content, and of
        the rest, in that one."""
        calls, other_pieces = self._calls, len(self._reasoning.pieces)
        if calls:
            other_pieces += len(calls) + len(calls[-1].arguments)
        return len(self._earlier), len(self._content.pieces), other_pieces

    def content_since(self, size: tuple[int, int, int]) -> str:
        """Return the content added to the last delta since :attr:`size` was ``size``."""
        # If another delta has begun since, all of its content is new.
        first = size[1] if size[0] == len(self._earlier) else 0
        return "".join(self._content.pieces[first:])

    def add_json(self, text: str) -> None:
        """Add to the arguments what the model writes as JSON."""
        self.add_arguments(self._escapes.push(text))

    @property
    def in_string(self) -> bool:
        """Whether :meth:`add_json` is inside a string."""
        return self._escapes.quote != ""

    def end_call(self) -> None:
        """End the call begun last; without arguments they are an empty object."""
        if self._blank:
            self.add_arguments("{}")
        self.in_call = False

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

    def deltas(self) -> list[dict[str, Any]]:
        """Everything since the last time as ``delta`` objects, of one kind and one call each.

        Clients that look at one member of a delta would lose the others.
        """
        deltas: list[dict[str, Any]] = []
        for reasoning, content, calls in self.take():
            parts = [{"tool_calls": [call.delta()]} for call in calls]
            # A call without a name continues that of an earlier delta: it precedes the texts.
            first = 1 if calls and calls[0].name is None else 0
            deltas += parts[:first]
            if reasoning is not None:
                deltas.append({self.reasoning_field: reasoning})
            if content is not None:
                deltas.append({"content": content})
            deltas += parts[first:]
        return deltas

    def take(self) -> list[AnswerDelta]:
        """Everything since the last time, in its order; nothing is an empty list."""
        deltas, self._earlier = self._earlier, []
        if self._content.pieces or self._reasoning.pieces or self._calls:
            calls, self._calls = self._calls, []
            deltas.append(AnswerDelta(self._reasoning.take(), self._content.take(), calls))
        return deltas

    def whole(self) -> dict[str, Any]:
        """The ``message`` of an answer in one body."""
        deltas = self.take()
        reasoning = [delta.reasoning for delta in deltas if delta.reasoning is not None]
        texts = [delta.content for delta in deltas if delta.content is not None]
        calls = [call for delta in deltas for call in delta.calls]
        # As from OpenAI, the content is null beside calls, and else a text.
        content = "".join(texts) if texts or not self._count else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message[self.reasoning_field] = "".join(reasoning)
        if calls:
            message["tool_calls"] = [call.whole() for call in calls]
        return message


class CallProbe(AnswerMessage):
    """Finds out whether a text begins with a call of one of the tools ``tool_names``.

    ``is_call`` is None until the first content or call decides.
    """

    __slots__ = ("_tool_names", "is_call", "parser")

    def __init__(
        self, make: Callable[[AnswerMessage], AnswerParser], tool_names: frozenset[str]
    ) -> None:
        super().__init__(str)  # ids of a trial are not shown
        self._tool_names = tool_names
        self.is_call: bool | None = None
        self.parser = make(self)

    def add_content(self, text: str) -> None:
        """Decide that no call begins the text, which is content."""
        if text and self.is_call is None:
            self.is_call = False

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Decide by the name of the call."""
        super().begin_call(name, call_id)
        if self.is_call is None:
            self.is_call = name in self._tool_names


class CallSteps(TextSteps):
    """The base of a parser of calls after markers.

    What was put aside since a marker is content, if no call follows.
    """

    __slots__ = ("_final", "_message")

    def __init__(self, first: Callable[[], bool], message: AnswerMessage) -> None:
        super().__init__(first)
        self._message = message
        self._final = False  # nothing follows the text

    def _read_to_end(self) -> None:
        """Read the text held back, which nothing follows."""
        self._final = True
        while self._step():
            pass

    def _is_followed(self, end: int, gap: int, markers: Markers) -> bool | None:
        """Whether one of ``markers``, or nothing, follows the first ``end`` characters.

        Less than ``gap`` of white space may be between. None: more text decides.
        """
        follows = self._text[end : end + gap].lstrip(SPACE)
        if markers.leading(follows):
            return True
        if not markers.may_begin(follows) or len(self._text) >= end + gap:
            return False
        return True if self._final else None

    def _content(self, starts: Markers) -> str:
        """Pass on content up to one of ``starts``; take and return that one, or ""."""
        if self._aside:  # a marker that no call followed
            self._message.add_content(self._take_aside())
        count, marker = starts.find(self._text)
        self._message.add_content(self._take(count))
        self._put_aside(len(marker))
        return marker

    def _next_marker(self, markers: Markers, end: str) -> str | None:
        """Take space and the marker behind it, "" without one; None if more text is needed.

        An ``end`` behind a call is dropped.
        """
        # Something is aside until the first call: without one, all of it is content.
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
