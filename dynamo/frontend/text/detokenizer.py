"""Token ids to text as they come, never a part of a character.

However the ids are cut, the texts that ``push`` returns are together the text of the longest prefix
of the ids whose text does not end in a broken character. So a character that is cut off at the end
is not shown, as in vLLM and Dynamo.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dynamo.frontend.text.pieces import PieceTable
from dynamo.frontend.text.tokenizer import Tokenizer

_NO_IDS: frozenset[int] = frozenset()
_MAX_HELD_TOKENS = 16
_new_decoder = codecs.getincrementaldecoder("utf-8")


def make_detokenizer(
    tokenizer: Tokenizer, skip_special_tokens: bool = True
) -> TableDetokenizer | PrefixDetokenizer:
    """A detokenizer for one stream: by table where the model allows it."""
    if tokenizer.pieces is not None:
        return TableDetokenizer(tokenizer.pieces, skip_special_tokens)
    return PrefixDetokenizer(tokenizer, skip_special_tokens)


class TableDetokenizer:
    """Any model with a piece table: one list look-up a token, O(1), unless a character is cut."""

    __slots__ = ("_decoder", "_held", "_skip", "_slow", "_strip", "_table", "_texts")

    def __init__(self, table: PieceTable, skip_special_tokens: bool) -> None:
        self._table = table
        self._texts, self._skip = table.text, _NO_IDS
        if skip_special_tokens:
            self._texts, self._skip = table.visible, table.special_ids
        # Slow: a broken end is held back, or the first text is still to lose a space.
        self._slow = self._strip = table.strip_space
        self._held = ""
        self._decoder: codecs.IncrementalDecoder | None = None

    @property
    def texts(self) -> list[str | None] | None:
        """The text of each token, None if it cuts a character; None while one is cut."""
        return None if self._slow else self._texts

    def push(self, ids: Sequence[int]) -> str:
        """Add ``ids``, return the characters that are complete now; an unknown id has no text."""
        if not self._slow:
            texts = self._texts
            try:
                if len(ids) == 1:
                    text = texts[ids[0]]
                    if text is not None:
                        return text
                else:
                    # A token that cuts a character is None, which join refuses.
                    return "".join([texts[token_id] for token_id in ids])  # type: ignore[misc]
            except (IndexError, TypeError):
                pass  # an unknown id or a cut character: decode the bytes
        return self._push_bytes(ids)

    def _push_bytes(self, ids: Sequence[int]) -> str:
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = _new_decoder("replace")
        piece, skip = self._table.piece, self._skip
        characters = []
        for token_id in ids:
            if token_id not in skip:
                self._held += decoder.decode(piece(token_id))
                # A broken character is shown only once more text follows it.
                if not decoder.getstate()[0] and not self._held.endswith("\ufffd"):
                    characters.append(self._held)
                    self._held = ""
        text = "".join(characters)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        self._slow = self._strip or bool(self._held) or bool(decoder.getstate()[0])
        return text


class PrefixDetokenizer:
    """Any other model: decode a short window with and without a new id, and take the difference.

    The window, because some decoders look at the tokens before: a space may depend on them. A
    window that ends in a broken character is held back, up to 16 tokens, more than a character
    has. O(window) a token.
    """

    __slots__ = ("_decode", "_ids", "_read", "_skip")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode = tokenizer.decode
        self._skip = tokenizer.special_ids if skip_special_tokens else _NO_IDS
        # The window; the text of its first ``_read`` ids has been returned.
        self._ids: list[int] = []
        self._read = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add ``ids``, return the characters that are complete now."""
        # One by one: a window of several ids could end inside a character after good text.
        return "".join([self._push(token_id) for token_id in ids if token_id not in self._skip])

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids, False)
        count = len(self._ids) - self._read
        if text.endswith("\ufffd") and count <= _MAX_HELD_TOKENS:
            return ""
        before = self._decode(self._ids[: self._read], False)  # already shown
        if len(text) <= len(before):
            return ""
        # The tokens read last are the context for the next ones; older ones leave the window.
        del self._ids[: self._read]
        self._read = len(self._ids)
        return text[len(before) :]
