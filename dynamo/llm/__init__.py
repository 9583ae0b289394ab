"""The API of a worker that serves a language model: register it, publish its cache and load."""

from typing import Any

from dynamo.llm._unary import LLMUnaryClient, UnaryChatModel, with_engine_data
from dynamo.llm.absent import ABSENT, absent
from dynamo.llm.exceptions import HttpError, RouterQueueLimitExceeded
from dynamo.llm.kv_router import KvRouter
from dynamo.llm.prefix_index import (
    OverlapScores,
    RadixTree,
    compute_block_hash_for_seq,
    compute_block_hash_for_seq_py,
    lora_name_to_id,
)
from dynamo.llm.publishers import KvEventPublisher, WorkerMetricsPublisher
from dynamo.llm.register import (
    fetch_llm,
    fetch_model,
    register_llm,
    register_model,
    unregister_llm,
    unregister_model,
    update_model_taints,
)
from dynamo.llm.router_config import KvRouterConfig, LoadThresholdConfig, RouterConfig, RouterMode
from dynamo.llm.types import (
    MediaDecoder,
    MediaFetcher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
)
from dynamo.protocols.openai import RoutingConstraints

__all__ = [
    "HttpError",
    "KvEventPublisher",
    "KvRouter",
    "KvRouterConfig",
    "LLMUnaryClient",
    "LoadThresholdConfig",
    "MediaDecoder",
    "MediaFetcher",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "OverlapScores",
    "RadixTree",
    "RouterConfig",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RoutingConstraints",
    "UnaryChatModel",
    "WorkerMetricsPublisher",
    "WorkerType",
    "compute_block_hash_for_seq",
    "compute_block_hash_for_seq_py",
    "fetch_llm",
    "fetch_model",
    "lora_name_to_id",
    "register_llm",
    "register_model",
    "unregister_llm",
    "unregister_model",
    "update_model_taints",
    "with_engine_data",
]


def __getattr__(name: str) -> Any:
    """Return the placeholder of a name that only Dynamo has."""
    if name in ABSENT:
        return absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
