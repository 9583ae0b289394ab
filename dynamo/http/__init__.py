"""HTTP/1.1 without tasks: httptools reads heads, the rules and limits are ours."""

from dynamo.http.connection import WriteBatch
from dynamo.http.errors import HttpStatusError, error_body, openai_error, reason_phrase
from dynamo.http.exchange import NEVER, Exchange, query_fields
from dynamo.http.head import HttpLimits
from dynamo.http.server import HttpServer

__all__ = [
    "NEVER",
    "Exchange",
    "HttpLimits",
    "HttpServer",
    "HttpStatusError",
    "WriteBatch",
    "error_body",
    "openai_error",
    "query_fields",
    "reason_phrase",
]
