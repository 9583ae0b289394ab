from array import array
from typing import final

from dynamo._fast.seconds import SecondsCost

__all__ = ["PrefillQueues"]

@final
class PrefillQueues:
    """The active prefills by slot, oldest first, told to ``seconds`` where there is one.

    A slot computes its prefills in order, so elapsed time is credited to the oldest one: of its
    tokens, ``elapsed / expected_s`` count as done, at most all. Without an expectation it counts in
    full. Each call but :meth:`subtract_done` is O(1), and ignores requests that are unknown. About
    200 bytes a prefill.
    """

    def __init__(self, seconds: SecondsCost | None = None) -> None: ...
    def begin(
        self,
        slot: int,
        request_id: str,
        tokens: int,
        cached_tokens: int,
        expected_s: float | None,
        now_s: float,
    ) -> None:
        """Add a prompt with ``tokens`` to compute, which takes ``expected_s``; None: as ``seconds``
        says, unknown without it.

        Raises IndexError beyond slot 65,535, or for one that ``seconds`` does not have; ValueError
        without tokens.
        """
    def first_token(
        self, slot: int, request_id: str, now_s: float, measures: bool, limit: int
    ) -> tuple[int, int, float, float] | None:
        """Remove a computed prompt; with ``measures``, tell ``seconds`` how long it took.

        Once the slot is idle or has computed ``limit`` prefills, the interval ends: returns their
        number, their tokens, their attention and its seconds, unless something disturbed it.
        """
    def abandon(self, slot: int, request_id: str, now_s: float) -> None:
        """Remove a request that ended before its first token: it was dropped, not computed."""
    def mark_waiting(self, slot: int) -> None:
        """Note that prompts of ``slot`` wait for memory: the interval measures no speed."""
    def done_tokens(self, slot: int, now_s: float) -> int:
        """Return the estimate of computed tokens on ``slot``."""
    def subtract_done(self, column: array[int], now_s: float) -> None:
        """Subtract the estimates from a column by slot, an ``array('q')``. O(slots)."""
