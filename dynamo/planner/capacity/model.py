"""What the SLA policy asks of a capacity model, whether it was profiled or learned. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["DecodeCapacity", "DecodePoint", "PrefillCapacity", "WorkerCapacity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePoint:
    """An operating point: output tokens per second and GPU, the ITL there, and the KV usage.

    ``kv_usage`` is None where the model does not have it.
    """

    tokens_per_s: float
    itl_ms: float
    kv_usage: float | None = None


class PrefillCapacity(Protocol):
    """Prefill of one worker."""

    def ttft_ms(self, isl: float) -> float:
        """Return the time to first token of a prompt that does not wait."""

    def tokens_per_s(self, isl: float) -> float:
        """Return the prompt tokens per second and GPU, above 0."""


class DecodeCapacity(Protocol):
    """Decode on one worker."""

    def itl_ms(self, concurrency: float, context: float) -> float:
        """Return the ITL with ``concurrency`` sequences of ``context`` tokens."""

    def best(self, itl_ms: float, context: float) -> DecodePoint:
        """Return the point of the highest throughput within ``itl_ms``, or else the lowest ITL."""


class WorkerCapacity(Protocol):
    """Both models of a kind of worker."""

    @property
    def prefill(self) -> PrefillCapacity | None:
        """The prefill model; None as long as too little is known."""

    @property
    def decode(self) -> DecodeCapacity | None:
        """The decode model; None as long as too little is known."""
