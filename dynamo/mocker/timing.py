"""The durations of iterations and of KV transfers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.mocker.profile import ProfiledSpeed

KV_BYTES_PER_TOKEN = 131_072
"""32 layers with 8 KV heads of 128 two-byte numbers, keys and values: a model of 8 billion."""


@dataclass(frozen=True)
class Timing:
    """The duration of an iteration, divided by ``speedup``; 0 means no time.

    It is that of ``profile``, without one a polynomial. ``kv_tokens`` fit into the cache.
    """

    speedup: float = 1.0
    decode_speedup: float = 1.0
    profile: ProfiledSpeed | None = None
    kv_tokens: int = 0

    def iteration_s(self, prefill_tokens: int, decodes: int, usage: float) -> float:
        """Return the duration of computing ``prefill_tokens`` uncached prompt tokens and one token
        for each of ``decodes`` sequences, whose KV takes ``usage`` (0..1) of the cache."""
        if not self.speedup:
            return 0.0
        profile = self.profile
        prefill = decode = 0.0
        if prefill_tokens:
            model = prefill_ms if profile is None else profile.prefill_ms
            prefill = model(prefill_tokens)
        if decodes:
            if profile is None:
                decode = decode_ms(usage)
            else:
                decode = profile.decode_ms(usage * self.kv_tokens, decodes)
        return (prefill + decode / self.decode_speedup) / self.speedup / 1000.0


@dataclass(frozen=True)
class Transfer:
    """The transfer of KV blocks from a prefill to a decode worker; ``speedup`` 0 means no time.

    The network is never the bottleneck: transfers do not slow each other down.
    """

    bytes_per_token: int = KV_BYTES_PER_TOKEN
    bytes_per_s: float = 64e9
    speedup: float = 1.0

    def seconds(self, prompt_tokens: int) -> float:
        """Return the duration of the transfer of a prompt's blocks."""
        if not self.speedup:
            return 0.0
        return prompt_tokens * self.bytes_per_token / self.bytes_per_s / self.speedup

    def transfer_params(
        self, worker_id: int, dp_rank: int, prompt_tokens: int, block_size: int
    ) -> dict[str, Any]:
        """Return ``disaggregated_params``: which blocks to fetch from which worker."""
        return {
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "prompt_tokens": prompt_tokens,
            "blocks": -(-prompt_tokens // block_size),
            "kv_bytes": prompt_tokens * self.bytes_per_token,
        }


def prefill_ms(tokens: int) -> float:
    """Return the milliseconds for ``tokens`` uncached prompt tokens."""
    return 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142


def decode_ms(usage: float) -> float:
    """Return the milliseconds of a decode step whose sequences take ``usage`` of the cache."""
    share = min(usage, 1.0)
    return max(1.0, -25.74 * share * share + 54.01 * share + 5.74)


def cached_tokens(prefill_result: Mapping[str, Any]) -> int | None:
    """Return the prompt tokens that the prefill worker found cached; None if it does not say."""
    details = prefill_result.get("prompt_tokens_details")
    tokens = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return tokens if isinstance(tokens, int) else None
