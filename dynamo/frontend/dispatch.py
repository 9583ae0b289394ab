"""The way of one engine request from a call's leg to a worker: choose, book, instruct, open."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from dynamo.errors import DynamoError
from dynamo.protocols.codec import encode
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.router.picker import Decision, Picker
from dynamo.runtime import Client

if TYPE_CHECKING:
    from dynamo.frontend.leg import Leg

__all__ = ["Dispatch"]

log = logging.getLogger(__name__)


class Dispatch:
    """Sends requests to the workers behind ``client`` that ``picker`` chooses."""

    def __init__(self, picker: Picker, client: Client) -> None:
        self.picker = picker
        self.client = client

    def send(
        self,
        leg: Leg,
        request: PreprocessedRequest,
        routing: Routing | None,
        headers: dict[str, str],
    ) -> None:
        """Put ``leg`` on its way. Raises what :meth:`Picker.pick` raises; the leg is released by
        its call then."""
        self.decode(leg, request, routing, headers)

    def decode(
        self,
        leg: Leg,
        request: PreprocessedRequest,
        routing: Routing | None,
        headers: dict[str, str],
    ) -> None:
        """The last stretch: to the worker that generates.

        ``leg`` is still open. Raises what :meth:`Picker.pick` raises.
        """
        decision = self.picker.pick(
            leg.booking,
            request.token_ids,
            routing=routing,
            override=request.router_config_override,
        )
        leg.decided(decision)
        _instruct(request, routing, decision)
        leg.stream = self.client.open(decision.worker_id, encode(request), leg, headers)


    def decode_later(
        self,
        leg: Leg,
        request: PreprocessedRequest,
        routing: Routing | None,
        headers: dict[str, str],
    ) -> None:
        """:meth:`decode` from a callback, where nobody catches: an error ends the call.

        A leg that has ended meanwhile is left alone; what it waited for is over either way.
        """
        leg.pending = None
        if not leg.open or leg.call.closed:
            return
        try:
            self.decode(leg, request, routing, headers)
        except DynamoError as error:
            leg.call.fail(error)
        except Exception:
            log.exception("request %s failed", leg.booking)
            leg.call.fail(DynamoError("a bug in the frontend"))


def _instruct(request: PreprocessedRequest, routing: Routing | None, decision: Decision) -> None:
    """Tell the worker what the router decided. Spec 7.4."""
    request.estimated_prefix_hit_num_blocks = decision.overlap_blocks or None
    if decision.dp_rank:
        routing = msgspec.structs.replace(routing or Routing(), dp_rank=decision.dp_rank)
    request.routing = routing
