"""``python -m dynamo.router``: a KV-aware router for the workers of one endpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Sequence

import uvloop

from dynamo.config import deprecations, load
from dynamo.config.router import RouterProcessSettings, RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings
from dynamo.errors import DynamoError
from dynamo.observability.logs import setup_logging
from dynamo.router.factory import ineffective_settings, summarize
from dynamo.router.routed import RoutedEndpoint
from dynamo.router.service import RouterService
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.endpoints.component import parse_endpoint
from dynamo.runtime.worker_main import run_until_signalled

log = logging.getLogger("dynamo.router")
_DESCRIPTION = (
    "A KV-aware router for the workers of one endpoint: chooses workers, or forwards requests."
)
_GROUPS = (RouterProcessSettings, RouterSettings, RuntimeSettings, LogSettings)


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
    except DynamoError as error:
        print(f"python -m dynamo.router: error: {error.message}", file=sys.stderr)
        return 2
    settings = dataclasses.replace(router, mode="kv")
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
