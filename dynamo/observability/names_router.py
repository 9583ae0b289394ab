"""Names, labels and buckets of the router's metrics. Spec 6.1 (per worker), 6.2, 6.3.

``worker_id`` in the component metrics is the process that counts; ``router_worker_id`` is the
worker it speaks of.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "INDEX_BLOCKS",
    "INDEX_DROPPED_BLOCKS",
    "INDEX_MEMORY_BYTES",
    "INPUT_SEQUENCE_TOKENS",
    "INTER_TOKEN_LATENCY_SECONDS",
    "KV_EVENTS_APPLIED",
    "KV_EVENT_WARNINGS",
    "KV_HIT_RATE",
    "OUTPUT_SEQUENCE_TOKENS",
    "OVERHEAD_BLOCK_HASHING_MS",
    "OVERHEAD_FIND_MATCHES_MS",
    "OVERHEAD_SCHEDULING_MS",
    "OVERHEAD_SEQ_HASHING_MS",
    "OVERHEAD_TOTAL_MS",
    "REQUESTS_STARTED",
    "REQUESTS_TOTAL",
    "SELECTED_CACHED_TOKENS",
    "TIME_TO_FIRST_TOKEN_SECONDS",
    "WORKER_ACTIVE_DECODE_BLOCKS",
    "WORKER_ACTIVE_PREFILL_TOKENS",
    "WORKER_REGISTERED",
    "RouterMetric",
]


class RouterMetric(NamedTuple):
    """One family; ``buckets`` only for histograms."""

    name: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


_PLACE = ("dynamo_component", "dynamo_namespace")
_ROUTER = (*_PLACE, "router_id", "worker_id")
_MODEL = (*_PLACE, "model", "phase", "router_id", "worker_id")
_RANK = ("dp_rank", "worker_id", "worker_type")
_HASHING_MS = tuple(0.001 * 2**power for power in range(15))
_STEPS_MS = tuple(0.01 * 3**power for power in range(17))
_TWENTIETHS = tuple(0.05 * step for step in range(21))


def _overhead(step: str, help: str, buckets: tuple[float, ...]) -> RouterMetric:
    return RouterMetric(f"dynamo_router_overhead_{step}_ms", help, ("router_id",), buckets)


OVERHEAD_BLOCK_HASHING_MS = _overhead(
    "block_hashing", "Milliseconds to hash a prompt's blocks", _HASHING_MS
)
OVERHEAD_SEQ_HASHING_MS = _overhead(
    "seq_hashing", "Milliseconds to chain the block hashes", _HASHING_MS
)
OVERHEAD_FIND_MATCHES_MS = _overhead(
    "indexer_find_matches", "Milliseconds to match a prompt against the index", _STEPS_MS
)
OVERHEAD_SCHEDULING_MS = _overhead(
    "scheduling", "Milliseconds to score the workers, choose one and book its load", _STEPS_MS
)
OVERHEAD_TOTAL_MS = _overhead("total", "Milliseconds of a whole routing decision", _STEPS_MS)

REQUESTS_STARTED = RouterMetric(
    "dynamo_component_router_requests_started_total", "Requests routed", _ROUTER
)
REQUESTS_TOTAL = RouterMetric(
    "dynamo_component_router_requests_total", "Requests routed that have ended", _ROUTER
)
KV_HIT_RATE = RouterMetric(
    "dynamo_component_router_kv_hit_rate",
    "Share of a prompt's full blocks that the chosen worker held",
    _ROUTER,
    _TWENTIETHS,
)
INPUT_SEQUENCE_TOKENS = RouterMetric(
    "dynamo_component_router_input_sequence_tokens",
    "Prompt length",
    _MODEL,
    (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000),
)
OUTPUT_SEQUENCE_TOKENS = RouterMetric(
    "dynamo_component_router_output_sequence_tokens",
    "Generated tokens of an ended request",
    _ROUTER,
    (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000),
)
TIME_TO_FIRST_TOKEN_SECONDS = RouterMetric(
    "dynamo_component_router_time_to_first_token_seconds",
    "Seconds from the routing decision to the first token",
    _ROUTER,
    (
        0,
        0.0022,
        0.0047,
        0.01,
        0.022,
        0.047,
        0.1,
        0.22,
        0.47,
        1,
        2.2,
        4.7,
        10,
        22,
        48,
        100,
        220,
        480,
    ),
)
INTER_TOKEN_LATENCY_SECONDS = RouterMetric(
    "dynamo_component_router_inter_token_latency_seconds",
    "Seconds between tokens: each request's mean, counted once per token",
    _ROUTER,
    (0, 0.0019, 0.0035, 0.0067, 0.013, 0.024, 0.045, 0.084, 0.16, 0.3, 0.56, 1.1, 2),
)
SELECTED_CACHED_TOKENS = RouterMetric(
    "dynamo_component_router_kv_selected_cached_prefix_tokens_total",
    "Prompt tokens that the chosen workers held",
    _MODEL,
)
WORKER_REGISTERED = RouterMetric(
    "dynamo_component_router_worker_registered",
    "1 for every (worker, dp_rank) that can be chosen",
    ("dp_rank", *_PLACE, "router_worker_id", "worker_id", "worker_type"),
)
KV_EVENTS_APPLIED = RouterMetric(
    "dynamo_component_kv_cache_events_applied",
    "KV cache events by type and outcome",
    (*_PLACE, "event_type", "status", "worker_id"),
)
KV_EVENT_WARNINGS = RouterMetric(
    "dynamo_component_kv_cache_event_warnings",
    "Gaps, duplicates and other oddities in the KV event streams",
    (*_PLACE, "warning_kind", "worker_id"),
)
INDEX_BLOCKS = RouterMetric(
    "dynamo_component_router_index_blocks", "(block, worker) pairs in the prefix index", _ROUTER
)
INDEX_MEMORY_BYTES = RouterMetric(
    "dynamo_component_router_index_memory_bytes", "Memory of the prefix index", _ROUTER
)
INDEX_DROPPED_BLOCKS = RouterMetric(
    "dynamo_component_router_index_dropped_blocks",
    "Blocks that the cap of the prefix index refused",
    _ROUTER,
)
WORKER_ACTIVE_DECODE_BLOCKS = RouterMetric(
    "dynamo_frontend_worker_active_decode_blocks", "Blocks of running requests", _RANK
)
WORKER_ACTIVE_PREFILL_TOKENS = RouterMetric(
    "dynamo_frontend_worker_active_prefill_tokens", "Prompt tokens not yet computed", _RANK
)
