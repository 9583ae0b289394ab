"""Connects what a worker publishes to the runtime: its topics, and its answers to routers."""

from __future__ import annotations

from dynamo.runtime.component import Endpoint
from dynamo.worker.publish import KV_EVENTS, KV_METRICS, KV_QUERY, KvEventSender, LoadSender

__all__ = ["connect_kv_events", "connect_load"]


async def connect_kv_events(endpoint: Endpoint, outlet: KvEventSender) -> None:
    """Publish ``outlet`` on topic ``kv-events`` of the endpoint's component and answer ``kv_query``
    there. Do it before the endpoint is served, so that routers find both together."""
    runtime = endpoint.runtime
    namespace, component, _ = endpoint.path
    publisher = await runtime.publisher(namespace, component, KV_EVENTS)
    serving = await runtime.start_serving()
    await serving.add((namespace, component, KV_QUERY), outlet.answer, True)
    runtime.track(outlet)
    outlet.open(publisher.publish)


async def connect_load(endpoint: Endpoint, outlet: LoadSender) -> None:
    """Publish ``outlet`` on topic ``kv_metrics`` of the endpoint's component."""
    runtime = endpoint.runtime
    namespace, component, _ = endpoint.path
    publisher = await runtime.publisher(namespace, component, KV_METRICS)
    runtime.track(outlet)
    outlet.open(publisher.publish)
