"""What each routing mode would have given the requests of a trace, in virtual time.

The router is the real one; workers have a prefix cache, compute one prompt after the other at a
fixed rate and publish KV events (:mod:`dynamo.bench.routing_replay`). No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.bench.routing_replay import Arrival, replay
from dynamo.bench.simulated_worker import WorkerSpeed
from dynamo.bench.trace import parents
from dynamo.bench.trace_formats import TraceRequest
from dynamo.config.option import from_env
from dynamo.config.router import RouterSettings

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "kv, --router-cost seconds": {"mode": "kv", "cost": "seconds"},
    "kv, defaults": {"mode": "kv"},
    "kv, --router-prefill-load-scale 4": {"mode": "kv", "prefill_load_scale": 4.0},
    "kv, cache first": {"mode": "kv", "prefill_load_scale": 64.0, "duplicate_cost": 32.0},
    "kv, without events": {
        "mode": "kv",
        "cost": "seconds",
        "kv_events": False,
        "approximate_cache_policy": "lru",
    },
    "least-loaded": {"mode": "least-loaded"},
    "power-of-two": {"mode": "power-of-two"},
    "round-robin": {"mode": "round-robin"},
}
"""Settings of the router, by the name in the table."""
_BLOCK_TOKENS = 16
"""The rate is in blocks, so their size does not matter; small ones hash faster."""


class RoutingResult(msgspec.Struct, frozen=True):
    """``hit_rate``: share of the prompts' blocks that their worker had cached. ``busiest``: the
    greatest share of computed blocks over the mean."""

    name: str
    ttft_mean_s: float
    ttft_p99_s: float
    hit_rate: float
    busiest: float


def arrivals_of(
    trace: Sequence[TraceRequest], block_tokens: int, speedup: float, output_scale: float
) -> list[Arrival]:
    """Return the requests as a replay takes them; a turn of a session waits for the one before.

    A prompt without block ids shares nothing, and gets ids of its own.
    """
    first_ms = min((one.timestamp for one in trace), default=0.0)
    found, own = [], 0
    for one, parent in zip(trace, parents(trace), strict=True):
        blocks: Sequence[int] = one.hash_ids
        if not blocks:
            count = max(-(-(one.input_length or 1) // block_tokens), 1)
            blocks, own = range(own - count, own), own - count
        at_s = (one.timestamp - first_ms) / 1e3 / speedup
        tokens = max(round(one.output_length * output_scale), 1)
        after = parent if one.session_id is not None else None
        found.append(Arrival(at_s, blocks, tokens, after, one.delay / 1e3 / speedup))
    return _numbered(found)


def compare(
    name: str, arrivals: list[Arrival], workers: int, blocks: int, blocks_per_s: float
) -> RoutingResult:
    """Replay with the policy of this name.

    Raises ConfigError for a prompt that no worker has room for.
    """
    service = WorkerSpeed(blocks_per_s * _BLOCK_TOKENS)
    settings = from_env(RouterSettings, {}, **POLICIES[name])
    report = replay(arrivals, settings, workers, blocks, service, _BLOCK_TOKENS)
    return RoutingResult(
        name, report.ttft_mean_s, report.ttft_p99_s, report.hit_rate, report.computed_imbalance
    )


def _numbered(arrivals: list[Arrival]) -> list[Arrival]:
    """Give blocks numbers from 0, as tokens are unsigned numbers of 32 bits."""
    numbers: dict[int, int] = {}
    return [
        one._replace(block_ids=[numbers.setdefault(block, len(numbers)) for block in one.block_ids])
        for one in arrivals
    ]
