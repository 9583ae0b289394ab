from array import array
from typing import final

__all__ = ["ActiveSequences"]

@final
class ActiveSequences:
    """Ref-counted blocks and active prefill tokens by slot.

    Blocks are identified by chained sequence hashes (u64), so a block that several requests of one
    slot hold counts once. Slots are the dense ids of the radix tree, at most 65,535. Memory: 16
    bytes an active block at a load of at most 3/4, and 8 bytes a block of each request.
    """

    def __init__(self) -> None: ...
    def book(
        self, slot: int, sequence_hashes: array[int] | None, unique_blocks: int, prefill_tokens: int
    ) -> int:
        """Hold the request's blocks and ``prefill_tokens`` on ``slot``; returns its handle.

        ``unique_blocks`` are counted without a hash, never shared. Raises IndexError for a slot
        out of range, ValueError for a negative number. O(blocks).
        """
    def end_prefill(self, handle: int) -> bool:
        """Release the prefill tokens; False for a handle that has ended. O(1)."""
    def grow(self, handle: int, blocks: int, faded: float = 0.0) -> bool:
        """Add output blocks; from now on ``faded`` (0..1) of its single-owner blocks don't count.

        False for a handle that has ended. O(1); the next projection sums the slot again.
        """
    def release(self, handle: int) -> bool:
        """End the request: prefill and blocks. False for a handle that has ended. O(blocks)."""
    def clear(self, slot: int) -> int:
        """End all requests of ``slot``; how many there were. O(all requests)."""
    def project_into(
        self,
        sequence_hashes: array[int] | None,
        unique_blocks: int,
        prefill_tokens: array[int],
        decode_blocks: array[int],
        depths: array[int] | None = None,
    ) -> None:
        """For every slot: active prefill tokens, and active blocks with this request's added once.

        Writes two i64 columns of equal length, indexed by slot. Raises ``depths`` (u32), if given,
        to the leading blocks of the prompt that requests of the slot hold. O(slots × log blocks).
        """
    def load(self, slot: int) -> tuple[int, int, int]:
        """(active prefill tokens, active blocks, active requests) of ``slot``. O(1)."""
    def memory_bytes(self) -> int:
        """Bytes held by the tables. O(requests)."""
    def _check(self) -> None:
        """Assert every invariant; for tests."""
