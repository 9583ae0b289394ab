"""KV blocks on their way from a prefill to a decode worker: bytes, and seconds. Spec 10.5.

The network is nobody's bottleneck here: transfers do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["KV_BYTES_PER_TOKEN", "Transfer", "cached_tokens", "kv_bytes_per_token"]

KV_BYTES_PER_TOKEN = 131_072
"""32 layers with 8 KV heads of 128 two-byte numbers, keys and values: a model of 8 billion."""

_WIDE = ("float32", "float")


@dataclass(frozen=True)
class Transfer:
    """``speedup`` 0 means no time at all, as in :class:`dynamo.mocker.timing.Timing`."""

    bytes_per_token: int = KV_BYTES_PER_TOKEN
    bytes_per_s: float = 64e9
    speedup: float = 1.0

    def of(self, config: Mapping[str, Any]) -> Transfer:
        """The same for the model of ``config`` (its config.json)."""
        return replace(self, bytes_per_token=kv_bytes_per_token(config))

    def seconds(self, prompt_tokens: int) -> float:
        """How long the blocks of a prompt are on their way."""
        if not self.speedup:
            return 0.0
        return prompt_tokens * self.bytes_per_token / self.bytes_per_s / self.speedup

    def handover(
        self, worker_id: int, dp_rank: int, prompt_tokens: int, block_size: int
    ) -> dict[str, Any]:
        """``disaggregated_params``: what is to be fetched, and where."""
        return {
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "prompt_tokens": prompt_tokens,
            "blocks": -(-prompt_tokens // block_size),
            "kv_bytes": prompt_tokens * self.bytes_per_token,
        }


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Layers x 2 x KV heads x head size x bytes of a number; the constant if that is not told."""
    parts = config.get("text_config")
    told = {**config, **parts} if isinstance(parts, Mapping) else config
    heads = told.get("num_attention_heads")
    layers, hidden = told.get("num_hidden_layers"), told.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(heads, int) or not heads:
        return KV_BYTES_PER_TOKEN
    size = told.get("head_dim") or (hidden // heads if isinstance(hidden, int) else None)
    kv_heads = told.get("num_key_value_heads") or heads
    if not isinstance(size, int) or not isinstance(kv_heads, int):
        return KV_BYTES_PER_TOKEN
    kind = str(told.get("torch_dtype") or told.get("dtype") or "")
    return layers * 2 * kv_heads * size * (4 if kind in _WIDE else 2)


def cached_tokens(prefill_result: Mapping[str, Any]) -> int | None:
    """Prompt tokens that the prefill worker found cached, if it says so."""
    details = prefill_result.get("prompt_tokens_details")
    found = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return found if isinstance(found, int) else None
