"""Token ids to text as they come, never a part of a character.

All texts pushed, and what :meth:`finish` gives, are together the text of all ids decoded at once,
however the ids were cut. At most three bytes are held back where the model has a piece table.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from dynamo.frontend.answer.pieces import PieceTable
from dynamo.frontend.prompt.tokenizer import Tokenizer

__all__ = ["Detokenizer", "PrefixDetokenizer", "TableDetokenizer", "make_detokenizer"]

_NO_IDS: frozenset[int] = frozenset()
_MAX_HELD_TOKENS = 16
_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The state of one stream."""

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are whole now."""

    def finish(self) -> str:
        """What is left; a broken character becomes U+FFFD."""


def make_detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for one stream: by table where the model allows it."""
    skip = tokenizer.special_ids if skip_special_tokens else _NO_IDS
    if tokenizer.pieces is not None:
        return TableDetokenizer(tokenizer.pieces, skip)
    return PrefixDetokenizer(tokenizer, skip)


class TableDetokenizer:
    """Any model with a piece table: one list look-up a token unless a character is cut. O(1) a
    token."""

    __slots__ = ("_decoder", "_held", "_skip", "_strip", "_table", "_texts")

    def __init__(self, table: PieceTable, skip: frozenset[int] = _NO_IDS) -> None:
        self._table = table
        self._texts = table.shown(skip)
        self._skip = skip
        self._strip = table.strip_space
        # Whether bytes are held back, or the first text is still to come and loses a space.
        self._held = self._strip
        self._decoder: codecs.IncrementalDecoder | None = None

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are whole now; an unknown id is nothing."""
        if not self._held:
            texts = self._texts
            try:
                if len(ids) == 1:
                    text = texts[ids[0]]
                    if text is not None:
                        return text
                else:
                    # A token that is no whole text is None, which join refuses.
                    return "".join([texts[each] for each in ids])  # type: ignore[misc]
            except (IndexError, TypeError):
                pass  # the careful way knows what to do
        return self._push_bytes(ids)

    def finish(self) -> str:
        """What is left; a broken character becomes U+FFFD."""
        if not self._held or self._decoder is None:
            return ""
        self._held = False
        return self._decoder.decode(b"", final=True)

    def _push_bytes(self, ids: Sequence[int]) -> str:
        if self._decoder is None:
            self._decoder = _new_decoder("replace")
        piece, skip = self._table.piece, self._skip
        text = self._decoder.decode(b"".join([piece(each) for each in ids if each not in skip]))
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        self._held = self._strip or bool(self._decoder.getstate()[0])
        return text


class PrefixDetokenizer:
    """Any other model: decode a short window with and without a new id, and take the difference.

    A window that ends in a broken character is held back, up to 16 tokens: more than any character
    needs. O(window) a token.
    """

    __slots__ = ("_decode", "_ids", "_read", "_skip")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int] = _NO_IDS) -> None:
        self._decode = tokenizer.decode
        self._skip = skip
        self._ids: list[int] = []
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are whole now."""
        # One by one: a window of several ids could end inside a character after good text.
        return "".join([self._push(each) for each in ids if each not in self._skip])

    def finish(self) -> str:
        """What is left."""
        return self._take(*self._texts())

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, text = self._texts()
        held = len(self._ids) - self._read
        if text.endswith("\ufffd") and held <= _MAX_HELD_TOKENS:
            return ""
        return self._take(before, text)

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._ids[: self._read], False), self._decode(self._ids, False)

    def _take(self, before: str, text: str) -> str:
        if len(text) <= len(before):
            return ""
        # The tokens just read are the context in which the next ones are decoded.
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text[len(before) :]
