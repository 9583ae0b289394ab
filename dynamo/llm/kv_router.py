"""A KV-aware router as a Python object, for programs that do their own routing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from dynamo._fast.radix import RadixTree
from dynamo.errors import DynamoError, InvalidArgument
from dynamo.llm.router_config import KvRouterConfig, LoadThresholdConfig
from dynamo.protocols import codec
from dynamo.protocols.engine import PreprocessedRequest, Routing
from dynamo.protocols.kv import STORAGE_TIERS
from dynamo.protocols.openai import RoutingConstraints
from dynamo.router.connect.routed import UNSET_OUTPUT, RoutedEndpoint
from dynamo.router.decision.explanation import overlap_scores, potential_loads
from dynamo.router.modes.kv import KvPicker
from dynamo.runtime import Endpoint
from dynamo.runtime.endpoints.responses import at_caller

_decode = codec.decoder(PreprocessedRequest).decode


class KvRouter:
    """Routes to the workers of ``endpoint``, whose KV blocks have ``block_size`` tokens.

    It connects with the first call, on the running loop, and closes with the runtime. Token ids
    are lists of integers. Where Dynamo raises a plain ``Exception`` this raises DynamoError.
    ``ais_perf_config`` and, in the methods, ``block_mm_infos``, ``multi_modal_data``,
    ``mm_routing_info``, ``policy_class``, ``include_shared`` and ``response_buffer_size`` have no
    effect: blocks are matched by their tokens.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig | None = None,
        ais_perf_config: Any = None,
        session_affinity_ttl_secs: float | None = None,
        *,
        load_threshold_config: LoadThresholdConfig | None = None,
        session_affinity_mode: str = "hard",
        **accepted: Any,
    ) -> None:
        config = kv_router_config or KvRouterConfig()
        limits = {} if load_threshold_config is None else load_threshold_config.settings()
        settings = config.settings(
            session_affinity_ttl_s=session_affinity_ttl_secs,
            session_affinity_mode=session_affinity_mode,
            **limits,
        )
        self._routed = RoutedEndpoint(
            endpoint.runtime, endpoint.path, block_size, settings, UNSET_OUTPUT
        )
        self._connecting = asyncio.Lock()
        self._picker: KvPicker | None = None

    async def close(self) -> None:
        """Disconnect from the workers."""
        await self._routed.close()

    async def generate(  # noqa: PLR0913 - Dynamo's signature
        self,
        token_ids: Sequence[int],
        model: str,
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
        block_mm_infos: Any = None,
        multi_modal_data: Mapping[str, Any] | None = None,
        mm_routing_info: Any = None,
        routing_constraints: RoutingConstraints | None = None,
        response_buffer_size: int = 100,
        **more: Any,
    ) -> AsyncIterator[dict[str, Any]]:
        """Send a prompt to the best worker; an async iterator over its items. ``more`` are further
        fields of a preprocessed request. Every key of an item is present, None if unset."""
        request: dict[str, Any] = {
            "model": model,
            "token_ids": token_ids,
            "stop_conditions": dict(stop_conditions or {}),
            "sampling_options": dict(sampling_options or {}),
            "output_options": dict(output_options or {}),
            "router_config_override": router_config_override,
            "extra_args": extra_args,
            "multi_modal_data": multi_modal_data,
            **more,
        }
        routing = _routing(routing_constraints=routing_constraints)
        if worker_id is not None or dp_rank is not None:
            routing = routing or Routing()
            routing.backend_instance_id, routing.dp_rank = worker_id, dp_rank
        if routing is not None:
            request["routing"] = routing
        return await self.generate_from_request(request)

    async def generate_from_request(
        self, request: Mapping[str, Any], response_buffer_size: int = 100
    ) -> AsyncIterator[dict[str, Any]]:
        """:meth:`generate` for a preprocessed request as a mapping. Raises InvalidArgument."""
        try:
            tokens = codec.tokens(request["token_ids"])
            decoded = _decode(codec.encode({"model": "", **request, "token_ids": tokens}))
        except (KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidArgument(f"not a preprocessed request: {error!r}") from None
        await self._connected()
        return _Items(self._routed.generate(decoded))

    async def best_worker(  # noqa: PLR0913 - Dynamo's signature
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        update_indexer: bool = False,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        routing_constraints: RoutingConstraints | None = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
        *,
        allowed_worker_ids: Sequence[int] | None = None,
        **accepted: Any,
    ) -> tuple[int, int, int]:
        """Choose a worker; return (worker_id, dp_rank, overlap blocks).

        With ``request_id`` the request is queued if there is a queue threshold, and its load counts
        until :meth:`free`. ``update_indexer`` predicts its blocks on that worker when events are
        off. Raises as :func:`dynamo.router.eligibility.filters.eligible`.
        """
        picker = await self._connected()
        tokens = codec.tokens(token_ids)
        if request_id is not None and request_id in picker.active:
            raise DynamoError(
                f"failed to book scheduler state: Request {request_id} already exists"
            )
        routing = _routing(
            lora_name=lora_name,
            routing_constraints=routing_constraints,
            allowed_worker_ids=allowed_worker_ids,
            cache_namespace=cache_namespace,
            strict_priority=strict_priority or None,
        )
        if request_id is None:
            decision = picker.pick(None, tokens, routing=routing, override=router_config_override)
        else:
            override = router_config_override
            decision = await self._routed.place(request_id, tokens, routing, override)
        if update_indexer and request_id is None:
            picker.predict(tokens, decision.worker_id, decision.dp_rank)
        return decision.worker_id, decision.dp_rank, decision.overlap_blocks

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> list[dict[str, int]]:
        """Return the load of each worker with the prompt added."""
        routing = _routing(lora_name=lora_name, cache_namespace=cache_namespace)
        picker = await self._connected()
        inputs = picker.weigh(codec.tokens(token_ids), routing).inputs
        return potential_loads(inputs, picker.worker_pool, picker.active)

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        block_mm_infos: Any = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, Any]:
        """Return the blocks of the prompt that each worker has cached."""
        routing = _routing(lora_name=lora_name, cache_namespace=cache_namespace)
        picker = await self._connected()
        return overlap_scores(picker.weigh(codec.tokens(token_ids), routing), picker.worker_pool)

    async def dump_events(self) -> str:
        """Return the prefix index as a JSON list of events that rebuild it."""
        index = (await self._connected()).index
        return "[]" if index is None else _events_of(index)

    async def mark_prefill_complete(self, request_id: str) -> None:
        """End the prefill load of a request at its first token. DynamoError: unknown request."""
        (await self._picker_of(request_id)).mark_prefill_complete(request_id)

    async def free(self, request_id: str) -> None:
        """End the load of a request. DynamoError: unknown request, or its worker has exited."""
        (await self._picker_of(request_id)).free(request_id)

    async def _picker_of(self, request_id: str) -> KvPicker:
        picker = await self._connected()
        if request_id not in picker.active:
            raise DynamoError(f"Request {request_id} not found")
        return picker

    async def _connected(self) -> KvPicker:
        # The first calls may come at the same time: one of them connects.
        async with self._connecting:
            if self._picker is None:
                await self._routed.start()
                self._picker = self._routed.picker
            return self._picker


class _Items:
    """The items of a routed response; errors as Dynamo's Python callers expect them."""

    def __init__(self, items: AsyncGenerator[dict[str, Any], None]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        try:
            return await self._items.__anext__()
        except DynamoError as error:
            raise at_caller(error) from None

    async def aclose(self) -> None:
        """Kill the request unless it has ended. Idempotent."""
        await self._items.aclose()


def _events_of(index: RadixTree) -> str:
    """Return a JSON list of events that rebuild ``index`` when applied in order."""
    events = []
    for number, (worker, rank, parent, blocks, local, tier) in enumerate(index.dump_tiers()):
        pairs = zip(blocks, local, strict=True)
        chain = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in pairs]
        stored = {"stored": {"parent_hash": parent, "blocks": chain}}
        events.append(
            {
                "worker_id": worker,
                "storage_tier": STORAGE_TIERS[tier],
                "residency_domain": "worker",
                "event": {"event_id": number, "data": stored, "dp_rank": rank},
            }
        )
    return json.dumps(events)


def _routing(
    *,
    routing_constraints: RoutingConstraints | None = None,
    allowed_worker_ids: Sequence[int] | None = None,
    **fields: Any,
) -> Routing | None:
    """Return the constraints of a request; None without any."""
    values = {name: value for name, value in fields.items() if value is not None}
    if allowed_worker_ids is not None:
        values["allowed_worker_ids"] = list(allowed_worker_ids)
    if routing_constraints is not None:
        required = routing_constraints.required_taints
        preferred = routing_constraints.preferred_taints
        values["required_taints"] = None if required is None else list(required)
        values["preferred_taints"] = None if preferred is None else dict(preferred)
    return Routing(**values) if values else None
