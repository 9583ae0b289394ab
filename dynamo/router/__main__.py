"""``python -m dynamo.router``: a KV-aware router for the workers of one endpoint.

Its endpoints choose a worker for a caller, or send the caller's request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import uvloop

from dynamo.config import deprecations, load
from dynamo.config.router import RouterProcessSettings, RouterSettings, with_policies
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings
from dynamo.errors import DynamoError, InvalidArgument
from dynamo.observability.logs import setup_logging
from dynamo.protocols import codec
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.router.connect.routed import RoutedEndpoint
from dynamo.router.decision.explanation import overlap_scores
from dynamo.router.modes.factory import ineffective_settings, summarize
from dynamo.router.modes.policy_types import check_policies
from dynamo.runtime import Context, DistributedRuntime
from dynamo.runtime.distributed.component import parse_endpoint
from dynamo.runtime.worker_main import run_until_signalled

log = logging.getLogger("dynamo.router")
_DESCRIPTION = (
    "A KV-aware router for the workers of one endpoint: chooses workers, or forwards requests."
)
_GROUPS = (RouterProcessSettings, RouterSettings, RuntimeSettings, LogSettings)
_request = codec.decoder(PreprocessedRequest).decode


class RouterService:
    """Serves ``generate``, ``best_worker_id``, ``get_overlap_scores`` and ``explain`` of component
    ``router`` in the namespace of the workers that ``routed`` follows.

    All but ``generate`` take a list of token ids, or ``{"token_ids": …, "router_config_override":
    …}``, and return one item.
    """

    def __init__(self, runtime: DistributedRuntime, routed: RoutedEndpoint) -> None:
        self._runtime = runtime
        self._routed = routed
        self._picker = routed.picker

    async def serve(self) -> None:
        """Serve until the process shuts down."""
        handlers: dict[str, Callable[..., Any]] = {
            "generate": self.generate,
            "best_worker_id": self.best_worker_id,
            "get_overlap_scores": self.get_overlap_scores,
            "explain": self.explain,
        }
        namespace = self._routed.path[0]
        async with asyncio.TaskGroup() as group:
            for name, handler in handlers.items():
                endpoint = self._runtime.endpoint(f"{namespace}.router.{name}")
                group.create_task(endpoint.serve_endpoint(handler))

    async def generate(self, request: Any, context: Context) -> AsyncIterator[dict[str, Any]]:
        """Route a preprocessed request and yield the worker's items."""
        if not isinstance(request, dict) or "token_ids" not in request:
            raise InvalidArgument("generate needs a preprocessed request with token_ids")
        tokens, _ = _parse(request)
        decoded = _decode({**request, "token_ids": tokens})
        async for item in self._routed.generate(decoded, context):
            yield item

    async def best_worker_id(self, request: Any) -> AsyncIterator[int]:
        """The worker that would be chosen for the prompt. Books nothing."""
        tokens, override = _parse(request)
        yield self._picker.pick(None, tokens, override=override).worker_id

    async def get_overlap_scores(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        """The cached blocks of the prompt by worker."""
        picker = self._picker
        yield overlap_scores(picker.weigh(_parse(request)[0]), picker.worker_pool)

    async def explain(self, request: Any) -> AsyncIterator[Any]:
        """The candidates' table; see :class:`dynamo.router.decision.explanation.Explanation`."""
        tokens, override = _parse(request)
        queued = self._routed.queue or ()
        yield self._picker.explain(tokens, override=override, queued=queued)


def _decode(request: dict[str, Any]) -> PreprocessedRequest:
    try:
        return _request(codec.encode({"model": "", **request}))
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"not a preprocessed request: {error}") from None


def _parse(request: Any) -> tuple[codec.Tokens, dict[str, Any] | None]:
    """Return token ids and override. Raises InvalidArgument, which the caller receives."""
    override = None
    if isinstance(request, dict):
        request, override = request.get("token_ids"), request.get("router_config_override")
    try:
        return codec.tokens(request), override
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"token_ids must be a list of token ids: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    process, router, runtime, logs = load("python -m dynamo.router", _DESCRIPTION, _GROUPS, argv)
    setup_logging("router", logs.level, logs.jsonl)
    for line in deprecations(router):
        log.warning("%s", line)
    try:
        if process.endpoint is None:
            raise DynamoError("--endpoint (or DYN_ROUTER_ENDPOINT) is required")
        path = parse_endpoint(process.endpoint)
        router = with_policies(router)
        check_policies(router.policies)
    except DynamoError as error:
        print(f"python -m dynamo.router: error: {error.message}", file=sys.stderr)
        return 2
    settings = dataclasses.replace(router, mode="kv")
    # The default mode is no choice of the user, so there is nothing to warn of.
    if router.mode not in (RouterSettings.mode, "kv"):
        log.warning("--router-mode %s has no effect: this router is always kv", router.mode)
    block_size = settings.kv_cache_block_size or process.block_size
    try:
        uvloop.run(_serve(runtime, path, block_size, settings))
    except DynamoError as error:
        log.error("%s", error.message)
        return 1
    return 0


async def _serve(
    runtime_settings: RuntimeSettings,
    path: tuple[str, str, str],
    block_size: int,
    settings: RouterSettings,
) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), runtime_settings)
    routed = RoutedEndpoint(runtime, path, block_size, settings)
    try:
        await runtime.start()
        await routed.start()
        log.info("router: %s", summarize(settings))
        for line in ineffective_settings(settings):
            log.warning("%s", line)
        log.info("routing to dyn://%s as dyn://%s.router.generate", ".".join(path), path[0])
        await run_until_signalled(runtime, RouterService(runtime, routed).serve())
    finally:
        await routed.close()
        await runtime.close()


if __name__ == "__main__":
    sys.exit(main())
