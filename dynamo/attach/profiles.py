"""The kinds of servers: their routes, and how they report health and load. No I/O.

Facts from the projects' public documentation; docs/attach.md has them as a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dynamo.http.routes import RoutePatterns
from dynamo.llm.types import ModelType
from dynamo.observability.metrics_page import samples
from dynamo.protocols.kv import KvMetrics
from dynamo.protocols.pooling import POOLING_PATHS, POOLING_TYPES

_MAX_RANKS = 1024
_RANK_DIGITS = 4


def prometheus_load(page: bytes, names: LoadNames, total_blocks: int | None) -> list[KvMetrics]:
    """Return the load of each rank on the page, rank 0 first; empty if it has none of ``names``.

    ``total_blocks`` is that of one rank. Of several series of a rank (tensor-parallel ranks repeat
    the same number) the largest counts.
    """
    ranks: dict[int, dict[str, float]] = {}
    for name, labels, value in samples(page, *names.running, *names.waiting, *names.usage):
        number = labels.get(names.rank_label or "", "0")
        is_number = number.isascii() and number.isdigit()
        # One digit more than a rank has: a longer number is no rank, and int() refuses the longest.
        rank = int(number[: _RANK_DIGITS + 1]) if is_number else 0
        # Also false for NaN.
        if rank < _MAX_RANKS and 0 <= value < math.inf:
            values = ranks.setdefault(rank, {})
            values[name] = max(value, values.get(name, 0.0))
    return [_rank_load(rank, ranks[rank], names, total_blocks) for rank in sorted(ranks)]


def _rank_load(
    rank: int, values: dict[str, float], names: LoadNames, total_blocks: int | None
) -> KvMetrics:
    running, waiting, usage = (
        next((values[name] for name in metric_names if name in values), None)
        for metric_names in (names.running, names.waiting, names.usage)
    )
    used = None if usage is None or not total_blocks else round(min(usage, 1.0) * total_blocks)
    return KvMetrics(
        worker_id=0,
        dp_rank=rank,
        active_decode_blocks=used,
        kv_used_blocks=used,
        kv_total_blocks=total_blocks,
        num_requests_running=None if running is None else int(running),
        num_requests_waiting=None if waiting is None else int(waiting),
    )


def json_load(page: Any) -> list[KvMetrics]:
    """Return the load in TensorRT-LLM's list of iterations, the newest last; empty without one."""
    newest = page[-1] if isinstance(page, list) and page else None
    if not isinstance(newest, dict):
        return []
    cache = newest.get("kvCacheStats")
    cache = cache if isinstance(cache, dict) else {}
    used = _count(cache.get("usedNumBlocks"))
    return [
        KvMetrics(
            worker_id=0,
            active_decode_blocks=used,
            kv_used_blocks=used,
            kv_total_blocks=_count(cache.get("maxNumBlocks")),
            num_requests_running=_count(newest.get("numActiveRequests")),
            num_requests_waiting=_count(newest.get("numQueuedRequests")),
        )
    ]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


@dataclass(frozen=True)
class LoadNames:
    """Metric names on a Prometheus page; of several, the first that is there counts.

    ``usage`` is a share of the KV cache, 0 to 1; ``rank_label`` is the label of the data-parallel
    rank.
    """

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    usage: tuple[str, ...]
    rank_label: str | None = None


@dataclass(frozen=True)
class Profile:
    """One kind of server.

    ``owner`` is the ``owned_by`` of its models. ``routes`` are offered if the server has no
    /openapi.json. ``load_path`` is the page of its metrics: text with ``load_names``, else JSON.
    """

    name: str
    owner: str = ""
    routes: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
    health_path: str = "/health"
    load_path: str | None = None
    load_names: LoadNames | None = None
    load_hint: str = ""


_VLLM = Profile(
    "vllm",
    "vllm",
    load_path="/metrics",
    load_names=LoadNames(
        ("vllm:num_requests_running",),
        ("vllm:num_requests_waiting",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "engine",
    ),
    load_hint="start it without --disable-log-stats",
)


_SGLANG = Profile(
    "sglang",
    "sglang",
    load_path="/metrics",
    load_names=LoadNames(
        ("sglang:num_running_reqs",),
        ("sglang:num_queue_reqs",),
        ("sglang:token_usage",),
        "dp_rank",
    ),
    load_hint="start it with --enable-metrics",
)


_TRTLLM = Profile(
    "trtllm",
    "tensorrt_llm",
    routes=("/v1/chat/completions", "/v1/completions"),
    load_path="/metrics",
    load_hint="set enable_iter_perf_stats in its options",
)


_LLAMA_CPP = Profile(
    "llama.cpp",
    "llamacpp",
    routes=(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
    ),
    load_path="/metrics",
    load_names=LoadNames(
        ("llamacpp:requests_processing",),
        ("llamacpp:requests_deferred",),
        ("llamacpp:kv_cache_usage_ratio",),
    ),
    load_hint="start it with --metrics",
)


_OLLAMA = Profile("ollama", "library", health_path="/api/version")


_OPENAI = Profile(
    "openai",
    routes=(
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
    ),
    health_path="/v1/models",
)


PROFILES = {
    profile.name: profile for profile in (_VLLM, _SGLANG, _TRTLLM, _LLAMA_CPP, _OLLAMA, _OPENAI)
}
"""Every profile by the name that ``--profile`` takes."""


_NOT_OFFERED = frozenset(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/models"))


_TOKENIZER_PATHS = frozenset(("/tokenize", "/detokenize"))


_TYPES = {
    "/v1/chat/completions": ModelType.Chat,
    "/v1/completions": ModelType.Completions,
    **{path: ModelType[POOLING_TYPES[api]] for path, api in POOLING_PATHS.items()},
    "/v1/images/generations": ModelType.Images,
    "/v1/audio/speech": ModelType.Audios,
}


def offered_routes(openapi: object) -> tuple[str, ...]:
    """Return the routes of an /openapi.json that clients may use; none if it is something else.

    A POST to a fixed path, whose body names the model, is a path; GET, DELETE, and a POST with
    parameters in the path are ``METHOD /path``. Left out is what changes the server, and
    /v1/models, which the frontend has itself.
    """
    paths = openapi.get("paths") if isinstance(openapi, dict) else None
    if not isinstance(paths, dict):
        return ()
    routes = []
    for path, methods in paths.items():
        own = path in _NOT_OFFERED or path.startswith("/v1/models/")
        offered = path.startswith("/v1/") or path in _TOKENIZER_PATHS or path in POOLING_PATHS
        if own or not offered or not isinstance(methods, dict):
            continue
        if "post" in methods and "{" not in path:
            routes.append(path)
        names = (
            method
            for method in methods
            if isinstance(method, str) and (method != "post" or "{" in path)
        )
        routes += RoutePatterns(f"{method.upper()} {path}" for method in names).routes
    return tuple(sorted(routes))


def model_type_of(routes: tuple[str, ...]) -> ModelType:
    """Return the APIs that ``routes`` are; Chat and Completions if none is known."""
    kinds = ModelType.Empty
    for route in routes:
        kinds |= _TYPES.get(route, ModelType.Empty)
    return kinds or ModelType.Chat | ModelType.Completions
