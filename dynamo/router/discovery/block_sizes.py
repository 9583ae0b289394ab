"""What is said and counted when a worker's KV blocks are of another size than the router's."""

from __future__ import annotations

import logging

__all__ = ["events_differ", "worker_differs"]

log = logging.getLogger(__name__)


def worker_differs(worker_id: int, worker_tokens: int, router_tokens: int) -> None:
    """Its model card says so: its blocks would never match, no prefix would ever be found there."""
    log.error(
        "worker %d has KV blocks of %d tokens, this router hashes blocks of %d: it gets no "
        "requests. Start the router with --kv-cache-block-size %d, or the worker with blocks of "
        "%d tokens",
        worker_id,
        worker_tokens,
        router_tokens,
        worker_tokens,
        router_tokens,
    )


def events_differ(worker_id: int, events_tokens: int, card_tokens: int) -> None:
    """Its card says one size, its events have another: it serves, its cache stays unknown."""
    log.error(
        "worker %d publishes KV blocks of %d tokens, but is registered with blocks of %d: its "
        "cache stays unknown. Give its KvEventPublisher and register_model the same size",
        worker_id,
        events_tokens,
        card_tokens,
    )
