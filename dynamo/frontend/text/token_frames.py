"""The special tokens that a tokenizer puts around one text, or around and between two.

``fastokens`` encodes texts one by one; a cross-encoder takes two in one sequence. The tokens around
them do not depend on the texts, so they are read once from what ``tokenizers`` makes of a probe.
"""

from __future__ import annotations

from array import array
from typing import Literal, NamedTuple, TypeVar

import msgspec
import tokenizers

from dynamo.protocols.codec import Tokens

_PROBES = ("hello world", "an answer")
Side = Literal["left", "right"]
Ids = TypeVar("Ids", Tokens, list[int])


class Cut(NamedTuple):
    """How a longer input is shortened to ``limit`` tokens, special ones included."""

    limit: int
    #: The side at which tokens of the texts are dropped.
    side: Side = "right"
    #: Drop special tokens, too, as vLLM does for a ``truncation_side`` of the request.
    slices: bool = False
    #: Of two texts, shorten the second alone.
    second_only: bool = False


class TokenFrame(msgspec.Struct):
    """The ids before, between and behind the texts; ``type_one_at`` of those between have the type
    of the first text, None if the tokenizer has one type."""

    before: list[int]
    between: list[int]
    behind: list[int]
    type_one_at: int | None = None

    @property
    def size(self) -> int:
        """The special tokens of a sequence."""
        return len(self.before) + len(self.between) + len(self.behind)

    def single(self, content: Tokens, cut: Cut | None) -> Tokens:
        """Return the sequence of one text. O(tokens)."""
        return self._joined(content, array("I"), cut)[0]

    def pair(self, first: Tokens, second: Tokens, cut: Cut | None) -> tuple[Tokens, int]:
        """Return the sequence of two texts, and where the type of the second begins. O(tokens)."""
        return self._joined(first, second, cut)

    def _joined(self, first: Tokens, second: Tokens, cut: Cut | None) -> tuple[Tokens, int]:
        if cut is not None and not cut.slices:
            room = max(cut.limit - self.size, 0)
            sizes = _kept(len(first), len(second), room, cut.second_only)
            first, second = (
                shortened(first, sizes[0], cut.side),
                shortened(second, sizes[1], cut.side),
            )
        ids = array("I", self.before)
        ids.extend(first)
        type_one = len(ids) + (self.type_one_at or 0)
        ids.extend(self.between)
        ids.extend(second)
        ids.extend(self.behind)
        if self.type_one_at is None:
            type_one = len(ids)
        if cut is not None and len(ids) > cut.limit:
            removed = len(ids) - cut.limit
            ids = shortened(ids, cut.limit, cut.side)
            type_one = max(type_one - removed, 0) if cut.side == "left" else type_one
        return ids, min(type_one, len(ids))


class TokenFrames(msgspec.Struct):
    """Those of one text and of two; None where the special tokens are not around the texts, or the
    types are not zeros and then ones."""

    single: TokenFrame | None = None
    pair: TokenFrame | None = None

    def cut(self, ids: Tokens, cut: Cut, special: bool) -> Tokens:
        """Return the ids of one text, encoded with special tokens or not, shortened. O(tokens)."""
        if len(ids) <= cut.limit:
            return ids
        if cut.slices or not special or self.single is None:
            return shortened(ids, cut.limit, cut.side)
        behind = len(ids) - len(self.single.behind)
        return self.single.single(ids[len(self.single.before) : behind], cut)


def shortened(ids: Ids, size: int, side: Side) -> Ids:
    """Return at most ``size`` of ``ids``, without those at ``side``. O(size)."""
    if len(ids) <= size:
        return ids
    return ids[len(ids) - size :] if side == "left" else ids[:size]


def find_frames(reference: tokenizers.Tokenizer) -> TokenFrames:
    """Return what ``reference`` puts around texts."""
    first, second = _PROBES
    return TokenFrames(
        _frame(reference.encode(first, add_special_tokens=True)),
        _frame(reference.encode(first, second, add_special_tokens=True), 1),
    )


def _frame(encoding: tokenizers.Encoding, last: int = 0) -> TokenFrame | None:
    """Read the frame of texts 0 to ``last``."""
    owners, ids = encoding.sequence_ids, encoding.ids
    if 0 not in owners or last not in owners:
        return None
    ends = [_span(owners, number) for number in range(last + 1)]
    if ends[-1][0] < ends[0][1] and last:
        return None  # the second text comes first
    if any(owner is None for begin, end in ends for owner in owners[begin:end]):
        return None
    begin, end = ends[0]
    between = ids[end : ends[1][0]] if last else []
    types = encoding.type_ids
    one_at = types.index(1) if 1 in types else None
    if types != sorted(types) or (one_at is not None and (types[-1] > 1 or not last)):
        return None
    if one_at is not None:
        one_at -= end
        if not 0 <= one_at <= len(between):
            return None
    return TokenFrame(ids[:begin], between, ids[ends[-1][1] :], one_at)


def _span(owners: list[int | None], number: int) -> tuple[int, int]:
    return owners.index(number), len(owners) - owners[::-1].index(number)


def _kept(first: int, second: int, room: int, second_only: bool) -> tuple[int, int]:
    """Return how many tokens of two texts stay in ``room``: the longer one is cut first, then both
    to equal halves, as ``longest_first`` of the `tokenizers` library does."""
    if first + second <= room:
        return first, second
    if second_only:
        return min(first, room), max(room - first, 0)
    shorter, longer = sorted((first, second))
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)
