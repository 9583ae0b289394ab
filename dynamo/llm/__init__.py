"""The API of a worker that serves a language model: register it, publish its cache and load."""

from dynamo.llm.exceptions import HttpError
from dynamo.llm.hashing import compute_block_hash_for_seq, compute_block_hash_for_seq_py
from dynamo.llm.kv_router import KvRouter
from dynamo.llm.publishers import KvEventPublisher, WorkerMetricsPublisher
from dynamo.llm.radix import OverlapScores, RadixTree
from dynamo.llm.register import register_llm, register_model, unregister_model
from dynamo.llm.router_config import KvRouterConfig, RouterConfig, RouterMode
from dynamo.llm.types import ModelInput, ModelRuntimeConfig, ModelType, WorkerType
from dynamo.protocols.openai import RoutingConstraints

__all__ = [
    "HttpError",
    "KvEventPublisher",
    "KvRouter",
    "KvRouterConfig",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "OverlapScores",
    "RadixTree",
    "RouterConfig",
    "RouterMode",
    "RoutingConstraints",
    "WorkerMetricsPublisher",
    "WorkerType",
    "compute_block_hash_for_seq",
    "compute_block_hash_for_seq_py",
    "register_llm",
    "register_model",
    "unregister_model",
]
