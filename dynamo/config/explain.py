"""Options of ``dynamo explain``."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.config.option import option

__all__ = ["RequestExplainSettings"]


@dataclass(frozen=True, kw_only=True)
class RequestExplainSettings:
    """explain: which request"""

    request: str = option(
        "last",
        "request",
        help="id of a request that has ended: that of the response, the x-request-id that you "
        "sent, or its first or last digits; default: the last request",
    )
    json: bool = option(False, "--json", help="print the record as JSON")
