"""``python -m dynamo.attach``: any OpenAI-compatible server behind the router."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing

from dynamo.attach.describe import ServerProbe
from dynamo.attach.launch import LaunchedServer
from dynamo.attach.worker import (
    PROBE_TIMEOUT_S,
    AttachPlan,
    AttachWorker,
    make_plan,
    wait_until_ready,
)
from dynamo.config import from_env, load
from dynamo.config.programs import ATTACH, settings_groups
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings, SystemSettings
from dynamo.errors import DynamoError
from dynamo.http.head import allow_open_files
from dynamo.observability.logs import setup_logging
from dynamo.runtime import DistributedRuntime
from dynamo.worker.lifecycle import WorkerLifecycle, run_workers

log = logging.getLogger("dynamo.attach")
_OPEN_FILES = 16_384
"""A connection for each of the 10,000 requests that admission allows at most, and some more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a graceful shutdown, 1 after a failure, 2: bad settings.

    75 (EX_TEMPFAIL): the model cannot be downloaded now.
    """
    runtime, settings = load("python -m dynamo.attach", __doc__, settings_groups(ATTACH), argv)
    try:
        logs, system = from_env(LogSettings), from_env(SystemSettings)
        setup_logging("attach", logs.level, logs.jsonl)
        plan = make_plan(runtime, system.namespace_worker_suffix, settings)
    except DynamoError as error:
        print(f"python -m dynamo.attach: error: {error.message}", file=sys.stderr)
        return error.exit_status
    allow_open_files(_OPEN_FILES)
    return run_workers(_serve(runtime, system, plan), log)


async def _serve(runtime: RuntimeSettings, system: SystemSettings, plan: AttachPlan) -> None:
    lifecycle = WorkerLifecycle()
    probe = ServerProbe(plan.target, PROBE_TIMEOUT_S)

    async def worker() -> None:
        async with _launched(plan) as launched:
            settings = plan.settings
            description = await wait_until_ready(
                probe, settings.profile, lifecycle, launched, settings.startup_timeout_s
            )
            if description is None:
                return
            worker_runtime = DistributedRuntime(settings=runtime, system=system)
            async with lifecycle.runtime(worker_runtime):
                await worker_runtime.start()
                log.info(
                    "serving %s (%s) at dyn://%s as %x",
                    plan.target.url,
                    description.profile.name,
                    plan.endpoint,
                    worker_runtime.instance_id,
                )
                await AttachWorker(plan, worker_runtime, probe, description).serve(launched)

    with closing(probe):
        await lifecycle.run([worker])
    log.info("exited")


@asynccontextmanager
async def _launched(plan: AttachPlan) -> AsyncIterator[LaunchedServer | None]:
    """Yield the server that the worker starts and ends, if any."""
    if plan.words is None:
        yield None
        return
    server = LaunchedServer(plan.words)
    server.start()
    try:
        yield server
    finally:
        await server.stop()


if __name__ == "__main__":
    sys.exit(main())
