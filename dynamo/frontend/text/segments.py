"""A cache of token ids by segment, the text between special tokens, for slow tokenizers.

A chat prompt is a sequence of segments separated by special tokens, and the next request of the
same chat repeats all but the last. If no token crosses a special token, the ids of a text are those
of its segments, one after the other, so each segment can be cached.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from dynamo.frontend.text.pieces import TokenizerFile
from dynamo.protocols.codec import Tokens

_ENTRY_BYTES = 300


class SegmentCache:
    """An LRU cache of up to ``max_bytes`` (texts, ids and an allowance per entry).

    ``hits`` and ``misses`` count segments, ``size_bytes`` is the size of all entries.
    """

    def __init__(
        self, special: dict[str, int], encode: Callable[[str], Tokens], max_bytes: int
    ) -> None:
        # Longest first: at one place the longest token wins, as in the tokenizer.
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
        """A cache for this tokenizer, None if the ids of a segment depend on the text around it."""
        tokens = parsed.added_tokens
        # Other tokens are found in normalized text, or take characters of the text around them.
        plain = all(
            not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            for token in tokens
        )
        if not tokens or not plain or _position_dependent(parsed.pre_tokenizer):
            return None
        return cls({token.content: token.id for token in tokens}, encode, max_bytes)

    def encode(self, text: str) -> Tokens:
        """Ids of ``text`` without added special tokens. O(text) plus the unknown segments."""
        ids: Tokens = array("I")
        parts = self._split(text)
        for position, part in enumerate(parts):
            # re.split with a group returns texts and separators in turn.
            if position & 1:
                ids.append(self._special[part])
            elif part:
                ids.extend(self._segment(part))
        return ids

    def clear(self) -> None:
        """Drop all entries and reset the counters."""
        with self._lock:
            self._entries.clear()
            self.size_bytes = self.hits = self.misses = 0

    def _segment(self, text: str) -> Tokens:
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self.hits += 1
                self._entries.move_to_end(text)
                return ids
            self.misses += 1
        # Not under the lock, which would make long prompts wait for each other: two threads may
        # encode the same segment, and the first result stays.
        ids = self._encode(text)
        with self._lock:
            self._keep(text, ids)
        return ids

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
    # A space goes before the first segment of a text alone.
    if pre_tokenizer.get("prepend_scheme") == "first":
        return True
    return any(map(_position_dependent, pre_tokenizer.get("pretokenizers", ())))
