"""The API of a worker that serves a language model: register it, publish its cache and load.

Its names are imported on first use: a frontend reads model directories, and publishes nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.llm.exceptions import HttpError, RouterQueueLimitExceeded
    from dynamo.llm.forward_pass import FpmDirectPublisher, FpmEventRelay, FpmEventSubscriber
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
        LLMUnaryClient,
        UnaryChatModel,
        fetch_llm,
        fetch_model,
        register_llm,
        register_model,
        unregister_llm,
        unregister_model,
        update_model_taints,
        with_engine_data,
    )
    from dynamo.llm.router_config import (
        KvRouterConfig,
        LoadThresholdConfig,
        RouterConfig,
        RouterMode,
    )
    from dynamo.llm.types import (
        FrontendExtensionContext,
        FrontendResponse,
        FrontendRoute,
        MediaDecoder,
        MediaFetcher,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
    )
    from dynamo.protocols.openai import RoutingConstraints

__all__ = [
    "FpmDirectPublisher",
    "FpmEventRelay",
    "FpmEventSubscriber",
    "FrontendExtensionContext",
    "FrontendResponse",
    "FrontendRoute",
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

_MODULES = {
    "FpmDirectPublisher": "llm.forward_pass",
    "FpmEventRelay": "llm.forward_pass",
    "FpmEventSubscriber": "llm.forward_pass",
    "FrontendExtensionContext": "llm.types",
    "FrontendResponse": "llm.types",
    "FrontendRoute": "llm.types",
    "HttpError": "llm.exceptions",
    "KvEventPublisher": "llm.publishers",
    "KvRouter": "llm.kv_router",
    "KvRouterConfig": "llm.router_config",
    "LLMUnaryClient": "llm.register",
    "LoadThresholdConfig": "llm.router_config",
    "MediaDecoder": "llm.types",
    "MediaFetcher": "llm.types",
    "ModelInput": "llm.types",
    "ModelRuntimeConfig": "llm.types",
    "ModelType": "llm.types",
    "OverlapScores": "llm.prefix_index",
    "RadixTree": "llm.prefix_index",
    "RouterConfig": "llm.router_config",
    "RouterMode": "llm.router_config",
    "RouterQueueLimitExceeded": "llm.exceptions",
    "RoutingConstraints": "protocols.openai",
    "UnaryChatModel": "llm.register",
    "WorkerMetricsPublisher": "llm.publishers",
    "WorkerType": "llm.types",
    "compute_block_hash_for_seq": "llm.prefix_index",
    "compute_block_hash_for_seq_py": "llm.prefix_index",
    "fetch_llm": "llm.register",
    "fetch_model": "llm.register",
    "lora_name_to_id": "llm.prefix_index",
    "register_llm": "llm.register",
    "register_model": "llm.register",
    "unregister_llm": "llm.register",
    "unregister_model": "llm.register",
    "update_model_taints": "llm.register",
    "with_engine_data": "llm.register",
}


def __getattr__(name: str) -> Any:
    """Return a name of the API, or the placeholder of one that only Dynamo has."""
    if name in _MODULES:
        value = getattr(importlib.import_module(f"dynamo.{_MODULES[name]}"), name)
        globals()[name] = value  # the next look-up finds it without this function
        return value
    absent = importlib.import_module(f"{__name__}.absent")
    if name in absent.ABSENT:
        return absent.absent(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
