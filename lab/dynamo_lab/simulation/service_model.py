"""The setup of a simulation: the speed of a worker, limits, delays, targets, and virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

from dynamo.errors import ConfigError
from dynamo.mocker.timing import Timing, Transfer


class VirtualClock:
    """A queue of callbacks; those due at the same time run in the order of their registration."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def at(self, due_s: float, callback: Callable[..., None], *arguments: Any) -> None:
        """Call ``callback(*arguments)`` at ``due_s``, or now if that has passed."""
        heappush(self._queue, (max(due_s, self.now_s), next(self._order), callback, arguments))

    def run_next(self) -> bool:
        """Run the next callback; return False if there is none."""
        if not self._queue:
            return False
        self.now_s, _, callback, arguments = heappop(self._queue)
        callback(*arguments)
        return True


class BatchTime(Protocol):
    """The duration of one iteration of a worker."""

    def iteration_s(self, prefill: int, attended: float, decodes: int, usage: float) -> float:
        """Return the seconds to compute ``prefill`` uncached prompt tokens, which see ``attended``
        earlier tokens on average, and one token of each of ``decodes`` sequences, with the share
        ``usage`` of the KV cache in use."""


@dataclass(frozen=True, slots=True)
class MockerTime:
    """The mocker's polynomial, :class:`Timing`."""

    timing: Timing = field(default_factory=Timing)

    def iteration_s(self, prefill: int, attended: float, decodes: int, usage: float) -> float:
        """Return the seconds of an iteration; ``attended`` has no effect."""
        return self.timing.iteration_s(prefill, decodes, usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineTime:
    """Fixed cost, plus the slower of reading the weights and computing, plus attention.

    ``overhead_s`` per iteration, ``weights_s`` to read the weights once, ``token_s`` of dense
    compute per token, ``attention_s`` per prompt token and token that it sees, ``kv_read_s`` to
    read a full KV cache.
    """

    overhead_s: float
    weights_s: float
    token_s: float
    attention_s: float
    kv_read_s: float

    def iteration_s(self, prefill: int, attended: float, decodes: int, usage: float) -> float:
        """Return the seconds of an iteration."""
        dense = max(self.weights_s, (prefill + decodes) * self.token_s)
        reading = usage * self.kv_read_s if decodes else 0.0
        return self.overhead_s + dense + reading + prefill * attended * self.attention_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceModel:
    """One worker: its speed, its KV cache in tokens, and the limits of its scheduler.

    ``prefill_slots`` is how many prompts a prefill worker computes at a time.
    """

    name: str
    time: BatchTime
    kv_tokens: int
    block_size: int = 64
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_slots: int = 1
    transfer: Transfer = field(default_factory=Transfer)

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """Return the seconds to compute a prompt of ``tokens``, ``cached`` of them not, alone."""
        spent, done = 0.0, cached
        while done < tokens:
            chunk = min(self.max_num_batched_tokens, tokens - done)
            spent += self.time.iteration_s(chunk, done + chunk / 2, 0, done / self.kv_tokens)
            done += chunk
        return spent


def _mocker() -> ServiceModel:
    """16,384 blocks of 64 tokens, as a worker of ``python -m dynamo.mocker`` has."""
    return ServiceModel(name="mocker", time=MockerTime(), kv_tokens=16_384 * 64)


def _qwen3_8b_h100() -> ServiceModel:
    """Qwen3-8B in bf16 on one H100 SXM 80 GB, from public figures.

    Model card: 8.2e9 parameters, 6.95e9 of them outside the embeddings, 36 layers, 32 query heads
    and 8 KV heads of 128: 144 KiB of KV a token. Data sheet: 3.35 TB/s, 989 TFLOP/s dense bf16.
    Assumed efficiency: 80 % of the bandwidth, 75 % of the peak in matrix products (large ones in
    cuBLAS), 60 % in attention (FlashAttention-3), 1 ms per iteration for launches and scheduling.
    vLLM's defaults on this GPU: 90 % of the memory, which less 16.4 GB of weights and 3 GB of
    activations leaves 52 GB or 350,000 tokens; 8,192 tokens per iteration. A single stream gets
    150 tokens/s; a prompt of 12,000 tokens is computed at 40,000 tokens/s.
    """
    bytes_per_s, flop_per_s = 3.35e12 * 0.8, 989e12
    kv_tokens, kv_bytes_per_token = 350_000, 2 * 36 * 8 * 128 * 2
    return ServiceModel(
        name="qwen3-8b-h100",
        time=RooflineTime(
            overhead_s=0.001,
            # The output matrix (0.62e9 parameters) is read as well; it computes one token a prompt.
            weights_s=2 * 7.57e9 / bytes_per_s,
            token_s=2 * 6.95e9 / (flop_per_s * 0.75),
            attention_s=36 * 4 * 32 * 128 / (flop_per_s * 0.6),
            kv_read_s=kv_tokens * kv_bytes_per_token / bytes_per_s,
        ),
        kv_tokens=kv_tokens,
        block_size=16,
        transfer=Transfer(bytes_per_token=kv_bytes_per_token),
    )


PRESETS: Mapping[str, Callable[[], ServiceModel]] = {
    "mocker": _mocker,
    "qwen3-8b-h100": _qwen3_8b_h100,
}
"""Service models by name."""


def service_model(name: str) -> ServiceModel:
    """Return the preset ``name``. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError(f"--service-model must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """What is simulated.

    A worker needs ``start_up_s`` from its start to its first request, and ``stop_s`` from its last
    request to its exit. With ``wake_s`` at most ``sleeping`` workers sleep instead, hold no GPU,
    and need so long to serve again. ``prefill_workers`` is None for aggregated serving. At most
    ``max_queue`` requests wait for their first token; more are rejected. ``pull_s`` is the time
    between metric pulls. With ``day_s``, the planner has the usual traffic of a day of that
    length. A request attains its targets if its TTFT and its mean ITL are within them.
    """

    model: ServiceModel = field(default_factory=lambda: service_model("qwen3-8b-h100"))
    start_up_s: float = 60.0
    stop_s: float = 0.0
    wake_s: float | None = None
    sleeping: int = 0
    max_gpus: float = 8
    gpus_per_worker: float = 1.0
    gpus_per_prefill_worker: float = 1.0
    minimum: int = 1
    prefill_minimum: int = 1
    workers: int = 1
    prefill_workers: int | None = None
    max_queue: int | None = None
    pull_s: float = 1.0
    ttft_ms: float = 2000.0
    itl_ms: float = 50.0
    day_s: float | None = None
