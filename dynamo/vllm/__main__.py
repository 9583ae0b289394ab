"""``python -m dynamo.vllm``: a vLLM engine behind the router."""

from __future__ import annotations

import gc
import importlib.util
import logging
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from dynamo.config import from_env, preset
from dynamo.config.system import LogSettings, SystemSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.observability.logs import setup_logging
from dynamo.observability.metrics import Registry
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.os_process import freeze_heap
from dynamo.vllm.arguments import INSTALL, PROG, VllmArguments, check, parse
from dynamo.vllm.engine import TESTED_VERSIONS, Engine, is_tested
from dynamo.vllm.known_flags import unknown_flag
from dynamo.vllm.worker import (
    VllmPlan,
    VllmWorker,
    make_plan,
    preset_nixl_port,
    rpc_directory,
    start_engine,
)
from dynamo.worker.lifecycle import WorkerLifecycle, run_workers
from dynamo.worker.publish import show_load_time
from dynamo.worker.tree_guard import TreeGuard

log = logging.getLogger("dynamo.vllm")


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a graceful shutdown, 1 after a failure, 2: bad settings.

    75 (EX_TEMPFAIL): the model cannot be downloaded now.
    """
    arguments = parse(argv, _epilog(sys.argv[1:] if argv is None else argv))
    try:
        logs, system = from_env(LogSettings), from_env(SystemSettings)
        setup_logging("vllm", logs.level, logs.jsonl)
        check(arguments)
        if text := unknown_flag(arguments.engine_argv):
            raise ConfigError(f"vLLM has no flag {text}")
        plan = make_plan(arguments, system.namespace_worker_suffix)
        config = _engine_config(arguments, plan)
    except DynamoError as error:
        print(f"{PROG}: error: {error.message}", file=sys.stderr)
        return error.exit_status
    return run_workers(_serve(plan, system, config), log)


async def _serve(plan: VllmPlan, system: SystemSettings, config: Any) -> None:
    lifecycle, guard = WorkerLifecycle(), TreeGuard()

    async def worker() -> None:
        settings = plan.arguments.runtime
        runtime = DistributedRuntime(settings=settings, system=system, metrics=Registry())
        async with lifecycle.runtime(runtime):
            await runtime.start()
            worker_id = runtime.instance_id
            with rpc_directory(settings, worker_id):
                build = partial(_engine, plan, config, worker_id)
                begun = time.monotonic()
                engine = await start_engine(build, guard, lifecycle.stopping)
                if engine is None:
                    return
                loaded_s = time.monotonic() - begun
                show_load_time(runtime.endpoint(plan.endpoint), plan.model_name, loaded_s)
                runtime.serving.set_engine_device(config.device_config.device_type)
                freeze_heap()  # a full collection would traverse vLLM and torch: 0.3 s
                try:
                    log.info("serving %s at dyn://%s as %x", plan.model_name, plan.endpoint,
                              worker_id)  # fmt: skip
                    pooling = await engine.pooling_facts() if engine.info.pooling else None
                    await VllmWorker(plan, runtime, engine, pooling).serve()
                finally:
                    await engine.close()
                    gc.unfreeze()  # else extension modules report leaks at the exit

    try:
        await lifecycle.run([worker])
    finally:
        guard.close()
    log.info("exited")


def _engine_config(arguments: VllmArguments, plan: VllmPlan) -> Any:
    """Import vLLM and return its configuration. Raises ConfigError."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(INSTALL)
    begun = time.monotonic()
    log.info("importing vLLM, which takes a while")
    # As vLLM's own server: a child that starts afresh, not a copy of this process.
    preset("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from dynamo.vllm.engine_args import engine_config

    log.info("imported vLLM in %.1f s", time.monotonic() - begun)
    return engine_config(arguments, plan.weights, plan.model_name)


def _engine(plan: VllmPlan, config: Any, worker_id: int) -> Engine:
    """Start the engine; blocks until the model is loaded."""
    from vllm.version import __version__

    from dynamo.vllm.engine_args import set_event_socket
    from dynamo.vllm.engine_inputs import ParamsBuilder

    if config.kv_transfer_config is not None:
        preset_nixl_port(config.parallel_config.data_parallel_size)
    set_event_socket(config, plan.arguments.runtime, worker_id)
    params = ParamsBuilder(config, worker_id, plan.mode == "prefill")
    settings = plan.arguments.vllm
    if settings.use_async_llm or not is_tested(__version__):
        log.warning(
            "driving vLLM %s through AsyncLLM, which costs more CPU per token; the direct driver "
            "is tested with vLLM %s", __version__, ", ".join(TESTED_VERSIONS),
        )  # fmt: skip
        from dynamo.vllm.async_llm import AsyncLLMEngine

        return AsyncLLMEngine(config, params)
    from dynamo.vllm.core import CoreEngine

    return CoreEngine.start(config, params, settings.core_addresses)


def _epilog(argv: Sequence[str]) -> str | None:
    """Return the help of vLLM's arguments, if help is requested."""
    if not {"-h", "--help"} & set(argv):
        return None
    if importlib.util.find_spec("vllm") is None:
        return f"vLLM's engine arguments are not shown: {INSTALL}"
    from dynamo.vllm.engine_args import engine_help

    return engine_help()


if __name__ == "__main__":
    # Until the loop handles it: importing vLLM takes seconds.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    sys.exit(main())
