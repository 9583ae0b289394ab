from array import array
from typing import final

__all__ = ["Weights", "choose", "costs", "highest"]

@final
class Weights:
    """The coefficients of the cost; immutable.

    ``block_size`` in tokens. ``credit``, ``host``, ``disk`` and ``shared`` are the share of a
    block of prefill that a cached block on that tier saves; ``decay`` weakens the device credit of
    a worker whose active prefill is above the least loaded candidate's. Raises ValueError when a
    value is not finite, ``block_size`` < 1 or ``decay`` < 0.
    """

    block_size: int
    prefill_scale: float
    credit: float
    decay: float
    host: float
    disk: float
    shared: float
    def __init__(
        self,
        block_size: int,
        *,
        prefill_scale: float = 1.0,
        credit: float = 1.0,
        decay: float = 0.0,
        host: float = 0.75,
        disk: float = 0.25,
        shared: float = 0.0,
    ) -> None: ...

def costs(
    weights: Weights,
    isl_tokens: int,
    candidates: array[int],
    prefill_tokens: array[int],
    decode_blocks: array[int],
    out: array[float],
    device: array[int] | None = None,
    host: array[int] | None = None,
    disk: array[int] | None = None,
    shared: array[int] | None = None,
) -> float:
    """Write the cost of ``candidates[i]`` (u32 slots) to ``out[i]`` (f64).

    ``prefill_scale * max(prefill blocks - credits, 0) + decode_blocks``, as in docs/routing.md.
    The other columns are indexed by slot: ``prefill_tokens`` (i64) active prefill tokens,
    ``decode_blocks`` (i64) active blocks with this request's added, ``device``/``host``/``disk``/
    ``shared`` (u32) overlap blocks: host and shared counted beyond device, disk beyond host.
    Returns the most blocks that one candidate need not compute: those on its device, and those in
    host memory and on disk by their weights; 0 without candidates.
    Raises IndexError for a slot that a column does not have, ValueError when ``out`` is too
    short. O(candidates).
    """

def highest(column: array[int]) -> int:
    """The highest value of a column of u32; 0 of an empty one. O(slots)."""

def choose(costs: array[float], count: int, temperature: float, uniform: float) -> int:
    """The index of the chosen one of the first ``count`` costs (f64).

    Temperature 0: the cheapest, exact ties by ``uniform`` in [0, 1). Otherwise a draw from the
    softmax of the negative min-max-normalised costs over ``temperature``; equal costs: uniform.
    Raises ValueError for an empty or non-finite column, a bad temperature or ``uniform``.
    """
