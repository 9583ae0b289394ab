"""``python -m dynamo.frontend``: the OpenAI API for the workers of a namespace."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

import uvloop

from dynamo.config.frontend import FrontendSettings
from dynamo.config.option import deprecations, load
from dynamo.config.router import RouterSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings
from dynamo.errors import ConfigError, Unavailable
from dynamo.frontend.prompt.off_loop import end_without_threads
from dynamo.frontend.service import Frontend
from dynamo.observability.logs import setup_logging
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.os_process import freeze_heap

log = logging.getLogger("dynamo.frontend")
_LAST_THREAD_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status."""
    frontend, router, runtime, logs = load(
        "python -m dynamo.frontend",
        "OpenAI-compatible HTTP frontend with a KV-cache-aware router.",
        [FrontendSettings, RouterSettings, RuntimeSettings, LogSettings],
        argv,
    )
    setup_logging("frontend", logs.level, logs.jsonl)
    for line in (*deprecations(frontend), *deprecations(router)):
        log.warning("%s", line)
    try:
        uvloop.run(_serve(frontend, router, runtime))
    except (ConfigError, Unavailable) as error:  # Unavailable: the disk is full
        log.error("%s", error.message)
        return 1
    return 0


async def _serve(
    settings: FrontendSettings, router: RouterSettings, runtime_settings: RuntimeSettings
) -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), runtime_settings)
    frontend = Frontend(runtime, settings, router, on_loaded=freeze_heap)
    # Before the start: a signal ends the wait for models, too.
    undo = frontend.stop_on_signals()
    status = 1
    try:
        await runtime.start()
        print(f"OpenAI API at {frontend.url(*await frontend.start())}/v1", flush=True)
        await frontend.run_until_stopped()
        status = 0
    finally:
        await frontend.close()
        await runtime.close()
        undo()
        end_without_threads(_LAST_THREAD_S, status)


if __name__ == "__main__":
    sys.exit(main())
