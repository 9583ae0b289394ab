"""The load that workers report, followed once a threshold depends on it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dynamo.protocols import codec
from dynamo.protocols.load import KV_METRICS, KvMetrics
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.events.channels import Subscription

__all__ = ["LoadFeed"]


log = logging.getLogger(__name__)
_decode = codec.decoder(list[KvMetrics]).decode


class LoadFeed:
    """Calls ``report`` with each load report of the workers of a component."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        namespace: str,
        component: str,
        report: Callable[[KvMetrics], object],
    ) -> None:
        self._runtime = runtime
        self._channel = (namespace, component, KV_METRICS)
        self._report = report
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribe. Idempotent."""
        if self._subscription is None:
            self._subscription = self._runtime.subscribe(*self._channel, self._on_loads)
            await self._subscription.ready()

    def close(self) -> None:
        """Stop following. Idempotent."""
        if self._subscription is not None:
            self._subscription.close()

    def _on_loads(self, publisher_id: int, sequence: int, payload: bytes) -> None:
        try:
            states = _decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("invalid load report of publisher %x: %s", publisher_id, error)
            return
        for state in states:
            self._report(state)
