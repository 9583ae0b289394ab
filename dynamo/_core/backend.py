"""The names of Dynamo's Rust worker, which this package does not provide.

Dynamo's ``dynamo.common.backend`` imports them, and its vLLM handlers import that: so the names
exist, and using one raises NotImplementedError. A package of its own name, as in Dynamo.
"""

from __future__ import annotations

import enum
from typing import Any

from dynamo.health_check import HEALTH_CHECK_KEY
from dynamo.llm.absent import Absent

__all__ = ["HEALTH_CHECK_KEY", "DisaggregationMode"]

_ABSENT = (
    "EngineConfig",
    "EngineMetrics",
    "LlmRegistration",
    "RuntimeConfig",
    "SnapshotPublisher",
    "Worker",
    "WorkerConfig",
    "_run_sglang_sidecar",
    "_run_trtllm_sidecar",
    "_run_vllm_sidecar",
)


class DisaggregationMode(enum.Enum):
    """The part of a request that a worker computes."""

    Aggregated = "aggregated"
    Prefill = "prefill"
    Decode = "decode"
    Encode = "encode"


def __getattr__(name: str) -> Any:
    """Return the placeholder of a name that only Dynamo has."""
    if name not in _ABSENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    why = "serve an endpoint with dynamo.runtime and register it with dynamo.llm instead"
    return type(name, (Absent,), {"why": why, "__module__": __name__})
