"""How long one iteration of the pretended engine takes. Spec 10.2."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timing"]


@dataclass(frozen=True)
class Timing:
    """The polynomial model, divided by the speed-up; ``speedup`` 0 means no time at all."""

    speedup: float = 1.0
    decode_speedup: float = 1.0

    def iteration_s(self, prefill_tokens: int, decodes: int, usage: float) -> float:
        """Seconds for computing ``prefill_tokens`` uncached prompt tokens and one token for each of
        ``decodes`` sequences while the share ``usage`` (0..1) of the KV cache is in use."""
        if not self.speedup:
            return 0.0
        prefill = prefill_ms(prefill_tokens) if prefill_tokens else 0.0
        decode = decode_ms(usage) / self.decode_speedup if decodes else 0.0
        return (prefill + decode) / self.speedup / 1000.0


def prefill_ms(tokens: int) -> float:
    """Milliseconds for ``tokens`` new prompt tokens."""
    return 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142


def decode_ms(usage: float) -> float:
    """Milliseconds for one decode step at KV usage ``usage``."""
    share = min(usage, 1.0)
    return max(1.0, -25.74 * share * share + 54.01 * share + 5.74)
