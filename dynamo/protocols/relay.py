"""An HTTP request relayed to a worker in front of another OpenAI-compatible server.

The payload of a relayed request is one MessagePack ``HttpRequest``. The stream of its response has
one MessagePack ``HttpResponseHead`` first, then parts of the body: raw bytes, cut anywhere, never
empty. The end frame follows the last byte; an error frame means that the server is unreachable
(before the head) or broke off (after it). An error status of the server is a normal response.

The card of such a model has ``model_input: "Http"``, and ``user_data["routes"]`` lists what the
server answers: a path for a POST whose body names the model, ``/v1/embeddings``; method and path
for all else, ``GET /v1/responses/{id}``, where a name in braces stands for one segment.
"""

from __future__ import annotations

import msgspec

HTTP_INPUT = "Http"
"""``model_input`` of a card whose worker takes ``HttpRequest``."""

ROUTES = "routes"
"""Key of the card's ``user_data`` with the paths that the server answers."""


class HttpRequest(msgspec.Struct, omit_defaults=True):
    """One client request. ``path`` has no host; ``headers`` are those worth relaying, in lower
    case; ``body`` is the client's, unchanged."""

    method: str
    path: str
    headers: list[tuple[str, str]] = []
    body: bytes = b""


class HttpResponseHead(msgspec.Struct, omit_defaults=True):
    """Status and headers of the server's response, without those of the connection."""

    status: int
    headers: list[tuple[str, str]] = []
