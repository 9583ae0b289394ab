from array import array
from typing import final

__all__ = ["SecondsCost"]

@final
class SecondsCost:
    """What the cost in seconds knows of each slot, and the coefficients that all slots share.

    A prompt with ``t`` tokens to compute behind ``c`` cached ones takes ``fixed_s + t * token_s +
    t * (c + t / 2) * attention_s``, times the slot's slowness. Methods of a slot raise IndexError
    for one that was not added. 128 bytes a slot, 1 MiB for blocks that were sent before.
    """

    def __init__(self) -> None: ...
    def set_fit(self, fixed_s: float, token_s: float, attention_s: float) -> None:
        """Replace the coefficients. Raises ValueError for one that is negative or not finite."""
    def add_slot(self, slot: int, capacity: float) -> None:
        """Add an idle slot of slowness 1, or give one another ``capacity`` in KV blocks, 0 if
        unknown. Raises IndexError beyond slot 65,535."""
    def drop_slot(self, slot: int) -> None:
        """Forget what was learned of a slot whose worker is gone."""
    def measured(self, slot: int, tokens: float, attention: float, took_s: float) -> None:
        """Learn the slowness of a slot from a prompt that took ``took_s`` there, at most 8 times
        as long as it was expected to. Raises ValueError for a time that is negative or not finite.
        """
    def slowness(self, slot: int) -> float:
        """Return how many times as long as the coefficients a slot takes, 1/16 to 16."""
    def middle_slowness(self) -> float:
        """Return the median of the slots that were measured, of two the lower; 1 without one.
        O(slots)."""
    def set_queue(
        self,
        slot: int,
        prefills: float,
        tokens: float,
        attention: float,
        running_tokens: float,
        running_attention: float,
        since_s: float,
    ) -> None:
        """Say what waits on a slot: the sums of all prefills, of which one has run since
        ``since_s``. ``attention`` sums, over them, tokens * (cached tokens + half of the tokens).
        """
    def add_decoding(self, slot: int, count: int) -> None:
        """Add to the requests of a slot that generate tokens."""
    def is_full(self, slot: int, blocks: float) -> bool:
        """Return whether ``blocks`` are more than a slot has room for."""
    def pressure(self, slot: int) -> float:
        """Return what a second of work on a slot costs in blocks evicted too early."""
    def wait_s(self, slot: int, now_s: float) -> float:
        """Return the seconds until a slot begins with a new prompt, by its queue alone."""
    def send(
        self,
        slot: int,
        chained: array[int],
        held: int,
        cached: int,
        work_s: float,
        now_s: float,
    ) -> float:
        """Count a prompt (u64 hashes) that is sent to a slot, which has ``cached`` blocks of it and
        gets all, and the seconds that it takes there. Returns the slot's slowness.

        ``held``: the most that a slot has. A block beyond, of a prompt that was sent before, was
        evicted too early: its last slot has too little room, and work there costs more. Of 16
        blocks one is looked at; some 65,536 of these are remembered. A second of work counts the
        less, the longer ago it is: by a factor of e every 15 s. O(blocks).
        """
    def costs(
        self,
        candidates: array[int],
        now_s: float,
        isl_tokens: int,
        block_size: int,
        weights: tuple[float, float, float],
        assumed: float,
        rent: float,
        held_s: float,
        stall: float,
        decode_blocks: array[int],
        out: array[float],
        terms: array[float],
        device: array[int] | None = None,
        host: array[int] | None = None,
        disk: array[int] | None = None,
        shared: array[int] | None = None,
    ) -> tuple[float, float, float, float]:
        """Write the cost of ``candidates[i]`` (u32 slots) to ``out[i]`` (f64), and its terms to
        ``terms`` from ``4 * i``: wait, work, others, running.

        ``weights`` are the shares of a block's work that host, disk and shared cache save. Work
        beyond that of the candidate with the most cached costs others the more, the busier the
        candidates are, less ``rent``; the rest costs more on a busier slot. ``assumed`` is added to
        the share of the time for which each was busy. A request holds its KV blocks for ``held_s``;
        ``stall`` is the share of a prefill that stops the requests that generate. The other columns
        are those of :func:`dynamo._fast.scoring.costs`. Returns the most blocks that one candidate
        need not compute, the least wait, at slowness 1 the least work, and what a second of added
        work costs others; 0 without candidates. Raises
        IndexError for a slot that was not added or that a column does not have, ValueError when the
        results are too short. O(candidates).
        """
