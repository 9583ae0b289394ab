"""A cache of the texts between special tokens, for a tokenizer that is slow.

A chat prompt is a row of segments set apart by special tokens, and the next request of the same
chat repeats all but the last. Where nothing crosses a special token, ids of the whole are the ids
of its segments in a row, so each can be kept.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dynamo.frontend.prompt.tokenizer_file import TokenizerFile
from dynamo.protocols.codec import Tokens

__all__ = ["SegmentCache"]

_ENTRY_BYTES = 300


class SegmentCache:
    """Least recently used segments up to ``max_bytes`` (texts, ids and an allowance per entry).

    ``hits`` and ``misses`` count segments, ``size_bytes`` is what is held.
    """

    def __init__(
        self, special: dict[str, int], encode: Callable[[str], Tokens], max_bytes: int
    ) -> None:
        # Longest first: at one place the longest token wins, as in the tokenizer itself.
        ordered = sorted(special, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, ordered)) + ")").split
        self._special = special
        self._encode = encode
        self._entries: OrderedDict[str, Tokens] = OrderedDict()
        self._lock = threading.Lock()  # long prompts are encoded in threads
        self.max_bytes = max_bytes
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    @classmethod
    def of(
        cls, parsed: TokenizerFile, encode: Callable[[str], Tokens], max_bytes: int
    ) -> SegmentCache | None:
        """A cache for this tokenizer, None where a segment's ids depend on its surroundings."""
        tokens = parsed.added_tokens
        plain = all(
            not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            for token in tokens
        )
        if not tokens or not plain or _position_dependent(parsed.pre_tokenizer):
            return None
        return cls({token.content: token.id for token in tokens}, encode, max_bytes)

    def encode(self, text: str) -> Tokens:
        """Ids of ``text`` without added prefix or suffix. O(text) plus the unknown segments."""
        ids: Tokens = array("I")
        parts = self._split(text)
        for position, part in enumerate(parts):
            if position & 1:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._segment(part))
        return ids

    def clear(self) -> None:
        """Forget everything, counters included."""
        with self._lock:
            self._entries.clear()
            self.size_bytes = self.hits = self.misses = 0

    def _segment(self, text: str) -> Tokens:
        with self._lock:
            found = self._entries.get(text)
            if found is not None:
                self.hits += 1
                self._entries.move_to_end(text)
                return found
            self.misses += 1
        found = self._encode(text)
        with self._lock:
            self._keep(text, found)
        return found

    def _keep(self, text: str, ids: Tokens) -> None:
        size = _size(text, ids)
        if size > self.max_bytes or text in self._entries:
            return
        self._entries[text] = ids
        self.size_bytes += size
        while self.size_bytes > self.max_bytes:
            self.size_bytes -= _size(*self._entries.popitem(last=False))

    def _check(self) -> None:
        assert self.size_bytes == sum(_size(*entry) for entry in self._entries.items())
        assert self.size_bytes <= self.max_bytes


def _size(text: str, ids: Tokens) -> int:
    return text.__sizeof__() + 4 * len(ids) + _ENTRY_BYTES


def _position_dependent(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer.get("prepend_scheme") == "first":
        return True
    return any(map(_position_dependent, pre_tokenizer.get("pretokenizers", ())))
