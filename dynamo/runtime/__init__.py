"""The distributed runtime: discovery, request plane and event plane. Spec 7."""

from dynamo.runtime.annotated import Annotated, InvalidRequest
from dynamo.runtime.client import Client
from dynamo.runtime.component import Component, Endpoint, Namespace
from dynamo.runtime.context import Context
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.runtime.unary import UnaryClient, serve_unary_endpoint
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
