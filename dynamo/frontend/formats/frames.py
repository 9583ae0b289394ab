"""Markers around the parts of an answer that are no part of its message."""

from __future__ import annotations

import re

from dynamo.frontend.formats.message import AnswerMessage, AnswerParser
from dynamo.frontend.formats.scan import SPACE, Markers, TextSteps

Frame = tuple[str] | tuple[str, str]
"""A marker; or one with a name behind it, and what must follow that name."""
_MAX_NAME = 128
_NAME = re.compile(rf"[^\n<]{{0,{_MAX_NAME}}}")


def frames(*markers: str) -> tuple[Frame, ...]:
    """Return the frames that are ``markers`` alone."""
    return tuple((marker,) for marker in markers)


class FrameParser(TextSteps):
    """Passes an answer on to ``parser`` without its ``frames``, and line breaks around these.

    Frames inside a call belong to it. What may be the beginning of a frame is held back: at most
    white space, a marker and a name.
    """

    __slots__ = ("_ends", "_frame", "_frames", "_message", "_parser")

    def __init__(
        self, message: AnswerMessage, frames: tuple[Frame, ...], parser: AnswerParser
    ) -> None:
        super().__init__(self._outside)
        self._message = message
        self._frames = Markers(*(frame[0] for frame in frames))
        self._ends = {frame[0]: frame[1] for frame in frames if len(frame) == 2}
        self._frame = ""
        self._parser = parser

    def finish(self) -> None:
        """Take the text held back into the message: nothing follows."""
        self._parser.push(self._take_aside() + self._text)
        self._parser.finish()

    def _outside(self) -> bool:
        count, marker = self._frames.find(self._text)
        body = len(self._text[:count].rstrip(SPACE))
        if body:
            self._parser.push(self._take_aside() + self._take(body))
        self._put_aside(count - body)
        if not marker:
            return False
        if self._message.in_call:
            self._put_aside(len(marker))
            self._parser.push(self._take_aside())
            return True
        space = self._take_aside()
        self._parser.push("" if "\n" in space else space)
        self._put_aside(len(marker))
        self._frame = marker
        self._step = self._name if marker in self._ends else self._behind
        return True

    def _name(self) -> bool:
        """After the marker of a frame with a name."""
        end = self._ends[self._frame]
        name = _NAME.match(self._text)
        assert name is not None  # it may be empty
        follows = self._text[name.end() : name.end() + len(end)]
        if end.startswith(follows) and follows != end and name.end() < _MAX_NAME:
            return False
        if follows == end:
            self._take(name.end())
            self._step = self._behind
        else:
            self._parser.push(self._take_aside())
            self._step = self._outside
        return True

    def _behind(self) -> bool:
        """Behind a frame, which is put aside: drop it and white space."""
        self._take_aside()
        self._take_space()
        if not self._text:
            return False
        self._step = self._outside
        return True
