"""The request plane: requests and streamed responses, multiplexed on one socket per worker."""

from dynamo.runtime.requests.client import RequestClient
from dynamo.runtime.requests.client_connection import ClientStream, StreamSink
from dynamo.runtime.requests.generator import (
    ENVELOPE,
    Annotated,
    ResponseSender,
    ResponseStream,
    generator_handler,
)
from dynamo.runtime.requests.server import RequestServer
from dynamo.runtime.requests.stream import EndpointStats, PushHandler, ServerStream

__all__ = [
    "ENVELOPE",
    "Annotated",
    "ClientStream",
    "EndpointStats",
    "PushHandler",
    "RequestClient",
    "RequestServer",
    "ResponseSender",
    "ResponseStream",
    "ServerStream",
    "StreamSink",
    "generator_handler",
]
