"""HTTP/1.1 without tasks: httptools reads heads, the rules and limits are ours."""

from dynamo.frontend.http.exchange import Exchange
from dynamo.frontend.http.limits import HttpLimits
from dynamo.frontend.http.refusal import Refusal, error_body, reason_phrase
from dynamo.frontend.http.server import HttpServer
from dynamo.frontend.http.turn import Turn

__all__ = [
    "Exchange",
    "HttpLimits",
    "HttpServer",
    "Refusal",
    "Turn",
    "error_body",
    "reason_phrase",
]
