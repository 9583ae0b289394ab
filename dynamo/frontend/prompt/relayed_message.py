"""What a worker gets of a request that is relayed: all of it, as HTTP or as a dict."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynamo.errors import InvalidArgument
from dynamo.frontend.apis.relay.body import CHAT, COMPLETIONS
from dynamo.frontend.prompt.decode_errors import DESERIALIZE
from dynamo.frontend.prompt.validation import check_json, parse_chat, parse_completion
from dynamo.protocols.codec import encode
from dynamo.protocols.relay import HttpRequest

__all__ = ["http_message", "text_message"]

# Those of the client's connection, the length and the id, which are set here, the choice of a
# worker, and an encoding that would hide the usage from the metrics.
_OWN_HEADERS = frozenset(
    (
        *("connection", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("accept-encoding", "content-length", "cookie", "host", "x-request-id"),
        *("proxy-authorization", "proxy-connection"),
    )
)
_ROUTING_PREFIX = "x-dynamo-"
_decode = msgspec.json.Decoder().decode


def http_message(
    target: tuple[str, str],
    head: tuple[str, Mapping[str, str]],
    body: bytes,
    request_id: str,
) -> bytes:
    """The ``HttpRequest`` for the server: the client's body unchanged, and its headers but those of
    its connection. ``target`` is the path and the query, ``head`` method and headers. O(bytes)."""
    path, query = target
    method, headers = head
    given = [
        one
        for one in headers.items()
        if one[0] not in _OWN_HEADERS and not one[0].startswith(_ROUTING_PREFIX)
    ]
    given.append(("x-request-id", request_id))
    return encode(HttpRequest(method, f"{path}?{query}" if query else path, given, body))


def text_message(path: str, body: bytes, *, ignore_unsupported: bool, ignore_nvext: bool) -> bytes:
    """The body as MessagePack, for a Python handler that takes it as a dict. O(bytes).

    Raises InvalidArgument, for chat and text completions by the same rules as for other models.
    """
    if path == CHAT:
        parse_chat(body, ignore_unsupported=ignore_unsupported)
    elif path == COMPLETIONS:
        parse_completion(body, ignore_unsupported=ignore_unsupported)
    else:
        check_json(body)
    try:
        request = _decode(body)
        if ignore_nvext:
            request.pop("nvext", None)
        return encode(request)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{DESERIALIZE}{error}") from None
    except OverflowError:
        raise InvalidArgument(
            "Validation: integers must be between -2**63 and 2**64-1; send a smaller number"
        ) from None
