"""The kinds of servers: their routes, and where they report health and load.

Facts from the projects' public documentation; docs/attach.md has them as a table.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.http.patterns import RoutePatterns
from dynamo.llm.types import ModelType

__all__ = ["PROFILES", "LoadNames", "Profile", "model_type_of", "offered_routes"]


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
    "/v1/embeddings": ModelType.Embedding,
    "/v1/rerank": ModelType.Rerank,
    "/v1/classify": ModelType.Classify,
    "/v1/pooling": ModelType.Pooling,
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
    found = []
    for path, methods in paths.items():
        own = path in _NOT_OFFERED or path.startswith("/v1/models/")
        offered = path.startswith("/v1/") or path in _TOKENIZER_PATHS
        if own or not offered or not isinstance(methods, dict):
            continue
        if "post" in methods and "{" not in path:
            found.append(path)
        names = (one for one in methods if isinstance(one, str) and (one != "post" or "{" in path))
        found += RoutePatterns(f"{one.upper()} {path}" for one in names).routes
    return tuple(sorted(found))


def model_type_of(routes: tuple[str, ...]) -> ModelType:
    """Return the APIs that ``routes`` are; Chat and Completions if none is known."""
    found = ModelType.Empty
    for route in routes:
        found |= _TYPES.get(route, ModelType.Empty)
    return found or ModelType.Chat | ModelType.Completions
