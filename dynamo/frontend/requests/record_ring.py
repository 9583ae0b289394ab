"""A ring of records with the fields of :class:`EndedRequest`; most of them packed into one buffer.

At thousands of requests a second, objects that are kept are out of the CPU's caches when their turn
to be freed comes, and so is the memory of new ones: that took a tenth of the frontend's time. A
packed record frees its objects at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import isnan, nan
from typing import Any

from dynamo.frontend.answer.generation import Usage
from dynamo.router.picker import Decision
from dynamo.router.receipt import DecisionTotals

__all__ = ["RecordRing"]

_ID_BYTES = 36
_MAX_LABELS = 4096
_FIGURES = struct.Struct(f"<H{_ID_BYTES + 1}p6d3IQ3IQQqId")
"""Labels, id, the moments, prompt tokens and blocks, decision, usage, eligible workers, cost."""
_SIZE = _FIGURES.size
_NO_COUNT = -1
_MOMENTS, _USAGE = 3, 12
"""The places in a record of the first moment, and of the first field after the figures."""


class RecordRing:
    """The last ``size`` records; iterate with ``reversed``, the newest first.

    A record is packed where the whole of its decision need not be kept, and it has nothing unusual:
    an id of the client, a prefill worker, a migration, no answer.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._added = 0
        self._packed = bytearray(size * _SIZE)
        self._whole: list[tuple[Any, ...] | None] = [None] * size
        self._labels: list[tuple[str, ...]] = []
        self._numbers: dict[tuple[str, ...], int] = {}

    def add(self, values: tuple[Any, ...]) -> None:
        """Keep a record in place of the oldest one."""
        slot = self._added % self.size
        self._added += 1
        packed = type(values[-2]) is DecisionTotals and self._pack(slot, values)
        self._whole[slot] = None if packed else values

    def __reversed__(self) -> Iterator[tuple[Any, ...]]:
        for number in range(self._added - 1, max(self._added - self.size, 0) - 1, -1):
            slot = number % self.size
            yield self._whole[slot] or self._unpack(slot)

    def _pack(self, slot: int, values: tuple[Any, ...]) -> bool:
        """Write a record to the buffer; return False for one that does not fit there."""
        endpoint, request_id, client_id = values[0]
        usage, decision, prefilled, migrations, totals, prefill_inputs = values[_USAGE:]
        if usage is None or decision is None or migrations:
            return False
        if client_id is not None or prefilled is not None or prefill_inputs is not None:
            return False
        labels = endpoint, values[1], values[2], totals.mode, totals.index
        number = self._numbers.get(labels)
        name, cached, cost = request_id.encode(), usage.cached_tokens, totals.cost
        if number is None:
            number = self._number(labels)
        if number == _MAX_LABELS or len(name) > _ID_BYTES:
            return False
        try:
            _FIGURES.pack_into(
                self._packed,
                slot * _SIZE,
                number,
                name,
                *values[_MOMENTS:_USAGE],
                *decision,
                usage.prompt_tokens,
                usage.completion_tokens,
                _NO_COUNT if cached is None else cached,
                totals.eligible,
                nan if cost is None else cost,
            )
        except struct.error:  # a count that an engine reports may have any size
            return False
        return True

    def _number(self, labels: tuple[str, ...]) -> int:
        """Return a number for new labels; ``_MAX_LABELS`` if there are too many."""
        number = len(self._labels)
        if number < _MAX_LABELS:
            self._numbers[labels] = number
            self._labels.append(labels)
        return number

    def _unpack(self, slot: int) -> tuple[Any, ...]:
        number, name, *figures = _FIGURES.unpack_from(self._packed, slot * _SIZE)
        *figures, prompt_tokens, tokens, cached, eligible, cost = figures
        *figures, worker_id, dp_rank, overlap_blocks, blocks = figures
        endpoint, model, outcome, mode, index = self._labels[number]
        price = None if isnan(cost) else cost
        return (
            (endpoint, name.decode(), None),
            model,
            outcome,
            *figures,
            Usage(prompt_tokens, tokens, None if cached == _NO_COUNT else cached),
            Decision(worker_id, dp_rank, overlap_blocks, blocks),
            None,
            0,
            DecisionTotals(mode, index, (worker_id, dp_rank), eligible, price),
            None,
        )
