"""The distributed runtime: discovery, request plane and event plane.

Its names are imported on first use: ``dynamo ps`` needs a few of its modules, and no event loop.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo.errors import InvalidRequest
    from dynamo.runtime.distributed.component import Component, Endpoint, Namespace
    from dynamo.runtime.distributed.runtime import DistributedRuntime
    from dynamo.runtime.endpoints.client import Client
    from dynamo.runtime.endpoints.responses import UnaryClient, serve_unary_endpoint
    from dynamo.runtime.requests import Annotated
    from dynamo.runtime.requests.context import Context
    from dynamo.runtime.worker_main import dynamo_endpoint, dynamo_worker

__all__ = [
    "Annotated",
    "Client",
    "Component",
    "Context",
    "DistributedRuntime",
    "Endpoint",
    "InvalidRequest",
    "Namespace",
    "UnaryClient",
    "dynamo_endpoint",
    "dynamo_worker",
    "serve_unary_endpoint",
]

_MODULES = {
    "Annotated": "requests.generator",
    "Client": "endpoints.client",
    "Component": "distributed.component",
    "Context": "requests.context",
    "DistributedRuntime": "distributed.runtime",
    "Endpoint": "distributed.component",
    "InvalidRequest": "endpoints.responses",
    "Namespace": "distributed.component",
    "UnaryClient": "endpoints.responses",
    "dynamo_endpoint": "worker_main",
    "dynamo_worker": "worker_main",
    "serve_unary_endpoint": "endpoints.responses",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next look-up finds it without this function
    return value
