"""Reasoning between tags at the beginning of an answer, and answers without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dynamo.frontend.formats.frames import Frame
from dynamo.frontend.formats.message import AnswerMessage, AnswerParser, CallProbe
from dynamo.frontend.formats.scan import SPACE, Markers, TextSteps

_MAX_PROBED = 1024
"""Characters from the marker of a call to its name, in reasoning."""


class ReasoningShape(NamedTuple):
    """The tags. ``forced``: an answer is reasoning from its beginning even without the first tag,
    unless the prompt ends with the second. ``calls``: markers of tool calls, which end it too if a
    call follows. ``tokens``: special tokens that are parts of the tags. ``as_content``: the answer
    is content, and begins with the first tag, which the prompt has. ``others``: more pairs of tags.
    ``frames``: markers around the parts of an answer. ``again``: reasoning may follow the content,
    too. ``suffixed``: the tags of a checkpoint may end with a suffix of its own."""

    opens: str
    closes: str
    forced: bool = False
    calls: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    as_content: bool = False
    others: tuple[tuple[str, str], ...] = ()
    frames: tuple[Frame, ...] = ()
    again: bool = False
    suffixed: bool = False

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Every pair of tags."""
        return ((self.opens, self.closes), *self.others)

    @property
    def markers(self) -> tuple[str, ...]:
        """All that may be special tokens."""
        texts = (text for texts in (*self.pairs, *self.frames) for text in texts)
        return (*texts, *self.tokens)

    def begins_inside(self, prompt: str | None, prefill: str | None = None) -> bool:
        """Whether the answer to ``prompt`` begins inside the reasoning.

        ``prefill`` is the text at the end of the prompt that the answer continues, if any.
        """
        # The end alone decides, and rstrip would copy a long prompt.
        end = "" if prompt is None else prompt[-1024:].rstrip(SPACE)
        opens = tuple(pair[0].rstrip(SPACE) for pair in self.pairs)
        closes = tuple(pair[1] for pair in self.pairs)
        if end.endswith(opens):
            return True
        if prefill is not None:
            return max(map(prefill.rfind, opens)) > max(map(prefill.rfind, closes))
        return self.forced and not end.endswith(closes)

    def closed(self, prompt: str | None) -> bool:
        """Whether ``prompt`` ends behind the reasoning, so that the answer has none."""
        end = "" if prompt is None else prompt[-1024:].rstrip(SPACE)
        return end.endswith(tuple(pair[1] for pair in self.pairs))


class ContentParser:
    """All text is content."""

    __slots__ = ("_message",)

    def __init__(self, message: AnswerMessage) -> None:
        self._message = message

    def push(self, text: str) -> None:
        """Add text."""
        self._message.add_content(text)

    def finish(self) -> None:
        """Nothing follows."""
        self._message.finish()


class ReasoningParser(TextSteps):
    """Reasoning first, then all text goes to ``parser``.

    The white space around the tags is dropped. With ``json_only`` a grammar makes the answer JSON:
    an engine that applies it from the first token leaves no room for reasoning, so an answer that
    begins with a bracket has none.

    A tool call inside the reasoning goes to ``parser``, and so does all that follows, without the
    second tag. ``probe`` finds out whether it is a call, or reasoning that mentions its marker.
    """

    __slots__ = (
        "_close", "_ends", "_frames", "_inside", "_json_only", "_make_probe", "_marker",
        "_message", "_open", "_parser", "_probe", "_rest",
    )  # fmt: skip

    def __init__(
        self,
        message: AnswerMessage,
        shape: ReasoningShape,
        inside: bool,
        parser: AnswerParser,
        json_only: bool = False,
        probe: Callable[[], CallProbe] | None = None,
    ) -> None:
        super().__init__(self._beginning)
        self._message = message
        opens, closes = zip(*shape.pairs, strict=True)
        self._open = Markers(*opens)
        self._rest = self._between if shape.again else self._after
        self._close = Markers(*closes)
        self._ends = Markers(*closes, *(() if probe is None else shape.calls))
        self._frames = Markers(*(frame[0] for frame in shape.frames if len(frame) == 1))
        self._make_probe = probe
        self._probe: CallProbe | None = None
        self._marker = ""
        self._inside = inside
        self._json_only = json_only
        self._parser = parser

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        if self._step in (self._reasoning, self._probing):
            self._message.add_reasoning(self._take_aside())
            self._message.add_reasoning(self._text)
        elif text := self._take_aside() + self._text:
            self._parser.push(text)
        self._parser.finish()

    def _beginning(self) -> bool:
        self._put_space_aside()
        text = self._text
        if self._open.may_begin(text) or self._frames.may_begin(text):
            return False
        if frame := self._frames.leading(text):
            self._take(len(frame))
            return True
        space = self._take_aside()
        if marker := self._open.leading(text):
            self._take(len(marker))
            self._step = self._first
        elif self._inside and not (self._json_only and text[0] in "[{"):
            self._step = self._first
        else:
            self._text = space + text
            self._step = self._rest
        return True

    def _first(self) -> bool:
        """Drop the white space before the reasoning."""
        self._take_space()
        if not self._text:
            return False
        self._message.next_part(True)
        self._step = self._reasoning
        return True

    def _reasoning(self) -> bool:
        count, marker = self._ends.find(self._text)
        if count:
            self._message.add_reasoning(self._take(count))
        if marker and marker in self._close.texts:
            self._message.end_reasoning()
            self._take(len(marker))
            self._step = self._gap
        elif marker and self._make_probe is not None:
            self._probe = self._make_probe()
            self._marker = marker
            self._step = self._probing
        return bool(marker)

    def _probing(self) -> bool:
        """From the marker of a call: find out whether a call follows."""
        probe = self._probe
        assert probe is not None
        count, closes = self._close.find(self._text)
        count = min(count, _MAX_PROBED - self._aside_size)
        piece = self._text[:count]
        self._put_aside(count)
        probe.parser.push(piece)
        if probe.is_call is None and not closes and self._aside_size < _MAX_PROBED:
            return False
        self._probe = None
        probed = self._take_aside()
        if probe.is_call:
            # The probe filled a message of its own: the call is read again, from its marker.
            self._message.end_reasoning()
            self._text = probed + self._text
            self._step = self._unclosed
        else:
            # The text behind the marker may have another one: read it again.
            self._message.add_reasoning(self._marker)
            self._text = probed[len(self._marker) :] + self._text
            self._step = self._reasoning
        return True

    def _unclosed(self) -> bool:
        """After a call in the reasoning: drop the tag that may still follow, outside calls."""
        return self._pass_up_to(self._close, self._gap)

    def _pass_up_to(self, markers: Markers, then: Callable[[], bool]) -> bool:
        """Pass text on to the parser up to a marker outside its calls, which begins ``then``."""
        count, marker = markers.find(self._text)
        if count:
            self._parser.push(self._take(count))
        if marker and self._message.in_call:
            self._parser.push(self._take(len(marker)))
        elif marker:
            self._take(len(marker))
            self._step = then
        return bool(marker)

    def _gap(self) -> bool:
        """Drop the white space after the reasoning."""
        self._take_space()
        if not self._text:
            return False
        self._step = self._rest
        return True

    def _after(self) -> bool:
        text, self._text = self._text, ""
        if text:
            self._parser.push(text)
        return False

    def _between(self) -> bool:
        """After the reasoning, in a format that may have more of it: up to the next."""
        return self._pass_up_to(self._open, self._first)
