"""``python -m dynamo.mocker``: a simulated engine, without a GPU."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dynamo.config import from_env, load
from dynamo.config.programs import settings_groups
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.system import LogSettings, SystemSettings
from dynamo.errors import DynamoError
from dynamo.mocker.arguments import engine_shape, stagger_delay_s, with_extra_arguments
from dynamo.mocker.worker import MockerWorker, WorkerPlan, make_plan
from dynamo.observability.logs import setup_logging
from dynamo.observability.metrics import Registry
from dynamo.runtime import DistributedRuntime
from dynamo.worker.lifecycle import WorkerLifecycle, run_workers

log = logging.getLogger("dynamo.mocker")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a graceful shutdown, 1 after a failure, 2: bad settings.

    75 (EX_TEMPFAIL): the model cannot be downloaded now.
    """
    runtime, worker, mocker = load(
        "python -m dynamo.mocker", __doc__, settings_groups("dynamo.mocker"), argv
    )
    try:
        logs, system = from_env(LogSettings), from_env(SystemSettings)
        setup_logging("mocker", logs.level, logs.jsonl)
        mocker = with_extra_arguments(mocker)
        shape = engine_shape(mocker)
        plan = make_plan(runtime, system.namespace_worker_suffix, worker, mocker, shape)
    except DynamoError as error:
        print(f"python -m dynamo.mocker: error: {error.message}", file=sys.stderr)
        return error.exit_status
    return run_workers(_serve(runtime, system, plan), log)


async def _serve(runtime: RuntimeSettings, system: SystemSettings, plan: WorkerPlan) -> None:
    lifecycle, metrics = WorkerLifecycle(), Registry()
    delay_s = stagger_delay_s(plan.mocker)

    async def worker(number: int) -> None:
        startup_s = number * delay_s + (plan.mocker.startup_time_s or 0.0)
        if not await lifecycle.wait(startup_s):
            return
        worker_runtime = _runtime(runtime, system, metrics, number)
        async with lifecycle.runtime(worker_runtime):
            await worker_runtime.start()
            log.info("serving %s at dyn://%s as %x", plan.model_name, plan.endpoint,
                      worker_runtime.instance_id)  # fmt: skip
            await MockerWorker(plan, worker_runtime, number).serve()

    await lifecycle.run([partial(worker, number) for number in range(plan.mocker.num_workers)])
    log.info("exited")


def _runtime(
    settings: RuntimeSettings, system: SystemSettings, metrics: Registry, number: int
) -> DistributedRuntime:
    """Return the runtime of worker ``number``; all share a status port, each has a TCP port."""
    if number:
        system = replace(system, port=-1)
        if settings.tcp_rpc_port:
            settings = replace(settings, tcp_rpc_port=settings.tcp_rpc_port + number)
    return DistributedRuntime(settings=settings, system=system, metrics=metrics)


if __name__ == "__main__":
    sys.exit(main())
