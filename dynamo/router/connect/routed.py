"""Requests to one endpoint through a router of the kv mode: wait, pick, send, count, free."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from dynamo.config.router import RouterSettings, with_policies
from dynamo.errors import Cancelled, DynamoError
from dynamo.protocols.codec import Tokens
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.router.connect.kv_router import ConnectedKvRouter, connect
from dynamo.router.connect.router import RoutedWorkers
from dynamo.router.decision.decision import Decision
from dynamo.router.modes.kv import KvPicker
from dynamo.router.queue.request_queue import RequestQueue
from dynamo.runtime import Client, Context, DistributedRuntime

UNSET_OUTPUT: Mapping[str, Any] = {
    "token_ids": [],
    "tokens": None,
    "text": None,
    "output_type": "text",
    "cum_log_probs": None,
    "log_probs": None,
    "top_logprobs": None,
    "finish_reason": None,
    "index": None,
}
"""The keys of an item that Dynamo's Python callers expect, and their values if unset."""


async def wait_for_decision(
    queue: RequestQueue,
    request_id: str,
    tokens: Tokens,
    *,
    routing: Routing | None = None,
    override: Mapping[str, Any] | None = None,
    context: Context | None = None,
) -> Decision:
    """Return the decision of :meth:`RequestQueue.submit`, booked.

    Raises the same errors, and Cancelled when ``context`` ends first. A cancelled task leaves no
    reservation.
    """
    future: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
    free = partial(queue.picker.free, request_id)
    placed = queue.submit(
        request_id,
        tokens,
        routing=routing,
        override=override,
        on_decision=partial(_resolve, future, free),
        on_error=partial(_fail, future),
    )
    if isinstance(placed, Decision):
        return placed

    def abort(kind: str) -> None:
        placed.cancel()
        _fail(future, Cancelled("the request left the router's queue"))

    if context is not None:
        context.on_cancel(abort)
    try:
        return await future
    except asyncio.CancelledError:
        placed.cancel()
        # The decision may have arrived in the loop iteration that cancelled this task.
        if future.done() and not future.cancelled() and future.exception() is None:
            free()
        raise
    finally:
        if context is not None:
            context.off_cancel(abort)


def _resolve(
    future: asyncio.Future[Decision], free: Callable[[], None], decision: Decision
) -> None:
    if future.done():
        free()
    else:
        future.set_result(decision)


def _fail(future: asyncio.Future[Decision], error: DynamoError) -> None:
    if not future.done():
        future.set_exception(error)


class RoutedEndpoint:
    """The workers of ``path`` behind a :class:`ConnectedKvRouter`.

    ``unset`` has the keys that items without them get. ``picker`` and ``client`` exist after
    :meth:`start`.
    """

    picker: KvPicker
    client: Client

    def __init__(
        self,
        runtime: DistributedRuntime,
        path: tuple[str, str, str],
        block_size: int,
        settings: RouterSettings,
        unset: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._unset = unset or {}
        self.block_size = block_size
        self._runtime = runtime
        self._settings = with_policies(settings)
        self._router: ConnectedKvRouter | None = None
        self._numbers = itertools.count(1)

    @property
    def queue(self) -> RequestQueue | None:
        """The queue before the router; None without a queue threshold."""
        return None if self._router is None else self._router.queue

    async def start(self) -> None:
        """Follow the workers; those that exist can be picked on return."""
        workers = RoutedWorkers(*self.path, self.block_size)
        router = await connect(self._runtime, workers, self._settings)
        assert isinstance(router, ConnectedKvRouter), "the mode is kv"
        self._router, self.client, self.picker = router, router.client, router.picker
        await router.start()

    async def close(self) -> None:
        """Stop following. Idempotent."""
        router, self._router = self._router, None
        if router is not None:
            await router.close()

    async def generate(
        self, request: PreprocessedRequest, context: Context | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chosen worker's items as plain values; free the load at the end.

        The first item carries ``routing_data.worker_id``, the one with the finish reason
        ``routing_data.timing``. Raises what :meth:`place` raises, and the worker's errors.
        """
        # Clients choose the ids of requests, so two in flight may have the same one.
        reservation_id = f"{context.id() if context else 'request'}/{next(self._numbers)}"
        begun_s, waiting = time.monotonic(), self._waiting()
        decision = await self.place(
            reservation_id,
            request.token_ids,
            request.routing,
            request.router_config_override,
            context,
        )
        placed_s = time.monotonic()
        placed = False
        first_s: float | None = None
        try:
            items = await self.client.direct(
                _with_decision(request, decision), decision.worker_id, False, context
            )
            try:
                async for item in items:
                    data: dict[str, Any] = {}
                    if not placed:
                        placed, data["worker_id"] = True, _place(decision)
                    if count := len(item.get("token_ids") or ()):
                        first_s = first_s or self._first_token(reservation_id)
                        self.picker.add_output_tokens(reservation_id, count)
                    if item.get("finish_reason"):
                        data["timing"] = _timing(decision, (begun_s, placed_s, first_s), waiting)
                        self.picker.reused_tokens.value += _reused(item)
                    if self._unset:
                        item = {**self._unset, **item}
                    yield {**item, "routing_data": data} if data else item
            finally:
                await items.aclose()
        finally:
            self.picker.free(reservation_id)

    async def place(
        self,
        request_id: str,
        tokens: Tokens,
        routing: Routing | None = None,
        override: Mapping[str, Any] | None = None,
        context: Context | None = None,
    ) -> Decision:
        """A worker, booked under ``request_id``, when it is the request's turn: at once unless a
        queue threshold is set. Raises as :meth:`Picker.pick` and
        :func:`dynamo.router.connect.routed.wait_for_decision`."""
        queue = self.queue
        if queue is None:
            return self.picker.pick(request_id, tokens, routing=routing, override=override)
        return await wait_for_decision(
            queue, request_id, tokens, routing=routing, override=override, context=context
        )

    def _waiting(self) -> int:
        return 0 if self.queue is None else len(self.queue)

    def _first_token(self, reservation_id: str) -> float:
        self.picker.mark_prefill_complete(reservation_id)
        return time.monotonic()


def _with_decision(request: PreprocessedRequest, decision: Decision) -> PreprocessedRequest:
    """Return the request with the decision in it, for the worker."""
    routing = msgspec.structs.replace(request.routing or Routing(), dp_rank=decision.dp_rank)
    return msgspec.structs.replace(
        request,
        routing=routing,
        estimated_prefix_hit_num_blocks=decision.overlap_blocks or None,
    )


def _reused(item: Mapping[str, Any]) -> int:
    """Prompt tokens that the engine reports as served from its cache."""
    details = (item.get("completion_usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _place(decision: Decision) -> dict[str, int]:
    worker_id, rank = decision.worker_id, decision.dp_rank
    return {
        "prefill_worker_id": worker_id,
        "prefill_dp_rank": rank,
        "decode_worker_id": worker_id,
        "decode_dp_rank": rank,
    }


def _timing(
    decision: Decision, moments_s: tuple[float, float, float | None], waiting: int
) -> dict[str, float]:
    """Return the times of a request that was received, placed and answered at ``moments_s``."""
    begun_s, placed_s, answered_s = moments_s
    now_s = time.monotonic()
    first_s = answered_s or now_s
    return {
        # Dynamo's field is wall-clock time: now, less the monotonic time that has passed since.
        "request_received_ms": int((time.time() - (now_s - begun_s)) * 1e3),
        "prefill_wait_time_ms": (placed_s - begun_s) * 1e3,
        "prefill_time_ms": (first_s - placed_s) * 1e3,
        "ttft_ms": (first_s - begun_s) * 1e3,
        "total_time_ms": (now_s - begun_s) * 1e3,
        "kv_hit_rate": decision.overlap_blocks / max(decision.prompt_blocks, 1),
        "router_queue_depth": waiting,
    }
