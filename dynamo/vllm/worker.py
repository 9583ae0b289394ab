"""One vLLM worker: the start of its engine, its publishers, endpoint and model card."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dynamo.config import preset
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, EngineDied, EngineFailure, EngineKilled
from dynamo.llm.answer_formats import choose_formats
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.publishers import KvEventPublisher
from dynamo.llm.register import register_model, unregister_model
from dynamo.llm.types import ModelInput, ModelType, WorkerType, api_types
from dynamo.protocols.control import MAX_IMAGES_KEY, ROOT_KEY, STRUCTURAL_TAGS_KEY, RuntimeConfig
from dynamo.protocols.kv import KvMetrics
from dynamo.protocols.pooling import POOLING_KEY, PoolingFacts
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.process.paths import (
    expanded,
    private_dir,
    socket_dirs,
    socket_path,
)
from dynamo.runtime.process.sockets import (
    StaleSockets,
    engine_directory_name,
    remove_sockets,
)
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_daemon_thread
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.vllm.arguments import VllmArguments, find_model, parse_loras
from dynamo.vllm.engine import Engine
from dynamo.vllm.operations import EngineOperations
from dynamo.vllm.pooling import PoolingService
from dynamo.vllm.service import VllmService
from dynamo.worker.adapter_record import AdapterRecord
from dynamo.worker.adapters import Adapters
from dynamo.worker.engine_control import (
    EngineControl,
    ProcessWatch,
    StallWatch,
    health_check_payload,
)
from dynamo.worker.publish import LoadSender, connect_load
from dynamo.worker.tree_guard import TreeGuard

_WORKER_TYPES = {
    "agg": WorkerType.Aggregated,
    "prefill": WorkerType.Prefill,
    "decode": WorkerType.Decode,
}
log = logging.getLogger(__name__)
_LOAD_INTERVAL_S = 0.05
_PROGRESS_S = 10.0
_START_POLL_S = 0.5
_PORT_ATTEMPTS = 64


@contextlib.contextmanager
def rpc_directory(runtime: RuntimeSettings, worker_id: int) -> Iterator[Path]:
    """Let vLLM create its own sockets in a private directory, and remove it at the end.

    vLLM gives them random names and leaves them when its processes are killed: by default in the
    temp directory. Those of other killed engines are removed, too. A ``VLLM_RPC_BASE_PATH`` that
    the user has set wins.
    """
    StaleSockets(lambda: socket_dirs(runtime)).sweep(lambda instance_id: False)
    # vLLM's sockets have UUIDs as names: the path of one must fit into 107 bytes.
    longest = f"{engine_directory_name(worker_id)}/{uuid.UUID(int=0)}"
    directory = private_dir(Path(socket_path(runtime, longest)).parent)
    preset("VLLM_RPC_BASE_PATH", str(directory))
    try:
        yield directory
    finally:
        remove_sockets(directory)


def preset_nixl_port(ranks: int) -> None:
    """Give NIXL's side channel a free port for each data-parallel rank, unless the user has.

    vLLM's default is one port for every engine of a machine. It adds the rank to it.
    """
    preset("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(ranks)))


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive TCP ports that are free now."""
    for _ in range(_PORT_ATTEMPTS):
        with contextlib.ExitStack() as stack:
            first = 0
            try:
                for number in range(count):
                    bound = stack.enter_context(socket.socket())
                    # The first one takes any free port, the others must follow it.
                    bound.bind(("", first + number if first else 0))
                    first = first or bound.getsockname()[1]
            except (OSError, OverflowError):  # in use, or above 65535
                continue
            return first
    raise EngineFailure(f"no {count} consecutive free TCP ports found; set the engine's ports")


async def start_engine(
    build: Callable[[], Engine], guard: TreeGuard, stopping: asyncio.Event
) -> Engine | None:
    """Return what ``build`` returns; None when the process is stopping.

    ``build`` runs in a thread, so that the lease is kept alive. A stop kills the processes that it
    has started. Raises EngineFailure if it fails.
    """
    tasks = Tasks("engine start")
    begun, reported = time.monotonic(), _PROGRESS_S
    building = tasks.spawn(_attempt(build), name="engine")
    stop = tasks.spawn(stopping.wait(), name="stop")
    while not building.done():
        # A stop that is done would end each wait at once: the loop would spin.
        waiting = {building} if stop.done() else {building, stop}
        await asyncio.wait(waiting, timeout=_START_POLL_S, return_when=asyncio.FIRST_COMPLETED)
        guard.update()
        if stopping.is_set() and not building.done():
            guard.kill()  # again until build() notices that its processes are gone
        passed = time.monotonic() - begun
        if passed >= reported:
            reported += _PROGRESS_S
            log.info("loading the engine: %.0f s", passed)
    await tasks.close()
    engine = building.result()
    if stopping.is_set():
        if not isinstance(engine, Exception):
            await engine.close()
        return None
    if isinstance(engine, Exception):
        raise EngineFailure(f"the vLLM engine did not start: {engine}") from engine
    log.info("engine ready after %.1f s: %s", time.monotonic() - begun, engine.info)
    return engine


async def _attempt(build: Callable[[], Engine]) -> Engine | Exception:
    try:
        return await in_daemon_thread(build)
    except Exception as error:  # noqa: BLE001 - the caller raises it
        return error


class LoadReporter:
    """Calls ``report`` at most every 50 ms for each rank, and at once when a rank becomes idle.

    ``blocks`` are those of one rank.
    """

    def __init__(self, blocks: int, report: Callable[[KvMetrics], None]) -> None:
        self._blocks = blocks
        self._report = report
        self._last_s: dict[int, float] = {}

    def __call__(self, dp_rank: int, running: int, waiting: int, kv_usage: float) -> None:
        """Record the state of a rank after a step; see ``StepStats``."""
        now = time.monotonic()
        if (running or waiting) and now - self._last_s.get(dp_rank, 0.0) < _LOAD_INTERVAL_S:
            return
        self._last_s[dp_rank] = now
        used = round(kv_usage * self._blocks)
        self._report(
            KvMetrics(
                worker_id=0,
                dp_rank=dp_rank,
                active_decode_blocks=used,
                kv_used_blocks=used,
                kv_total_blocks=self._blocks,
                num_requests_running=running,
                num_requests_waiting=waiting,
            )
        )


@dataclass(frozen=True)
class VllmPlan:
    """What the worker serves, checked before the engine starts.

    ``weights`` is the directory or GGUF file for vLLM, ``model`` what the frontend reads. ``loras``
    are the directories of the adapters by name. ``tool_format`` and ``reasoning_format`` are those
    of the answers.
    """

    arguments: VllmArguments
    model: ModelDirectory
    weights: str
    model_name: str
    model_type: ModelType
    endpoint: str
    loras: dict[str, str]
    tool_format: str | None
    reasoning_format: str | None

    @property
    def mode(self) -> str:
        """``agg``, ``prefill`` or ``decode``."""
        return self.arguments.vllm.disaggregation_mode


def make_plan(arguments: VllmArguments, worker_suffix: str | None) -> VllmPlan:
    """Check our settings and the model's files. Raises ConfigError."""
    settings, mode = arguments.worker, arguments.vllm.disaggregation_mode
    if settings.model_path is None:
        raise ConfigError("--model is missing; give a directory or an id on Hugging Face")
    weights, model, found_name = find_model(settings.model_path, arguments.engine_argv)
    template = settings.custom_jinja_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"--custom-jinja-template {template}: no such file")
    suffix = f"-{worker_suffix}" if worker_suffix else ""
    component = "prefill" if mode == "prefill" else "backend"
    name = settings.model_name or found_name
    return VllmPlan(
        arguments,
        model,
        weights,
        name,
        ModelType.Prefill if mode == "prefill" else api_types(settings.endpoint_types),
        settings.endpoint_or(f"{arguments.runtime.namespace}{suffix}.{component}.generate"),
        parse_loras(arguments.vllm.lora_modules, name),
        *choose_formats(settings, model),
    )


class VllmWorker:
    """The worker of this process, over a started engine; ``pooling`` is that of a pooling one."""

    def __init__(
        self,
        plan: VllmPlan,
        runtime: DistributedRuntime,
        engine: Engine,
        pooling: PoolingFacts | None,
    ) -> None:
        self.plan = plan
        self.pooling = pooling
        self.engine = engine
        self.endpoint: Endpoint = runtime.endpoint(plan.endpoint)
        self.load = LoadSender(runtime.instance_id)
        runtime.metrics.register_prometheus_expfmt_callback(engine.metrics)
        engine.on_stats = LoadReporter(engine.info.blocks, self.load.report)
        settings = plan.arguments.worker
        admission = AdmissionQueue(
            settings.engine_request_limit, settings.request_queue_limit, runtime.metrics
        )
        parts = engine, admission, runtime.tasks
        self.service = (
            VllmService(*parts, plan.mode == "prefill")
            if pooling is None
            else PoolingService(*parts, pooling)
        )
        directory = plan.arguments.vllm.lora_dir
        self.adapters = Adapters(
            engine,
            plan.model_name,
            plan.loras,
            AdapterRecord(runtime.settings, plan.model_name),
            None if directory is None else expanded(directory).resolve(),
            self._register,
            partial(unregister_model, self.endpoint),
        )
        self.control = EngineControl(self.endpoint, engine, self._on_cleared, self.adapters)
        self._publishers: list[KvEventPublisher] = []
        self.control.install(runtime)
        EngineOperations(self.endpoint, engine, self.control).install(runtime)

    async def serve(self) -> None:
        """Serve until the worker has drained. Raises EngineDied if the engine dies."""
        plan = self.plan
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._run_engine())
            # The CPU time of an engine that another process runs says nothing here.
            is_ours = not plan.arguments.vllm.core_addresses
            stall = StallWatch(self.engine.progress, self.engine.is_sleeping) if is_ours else None
            processes = ProcessWatch(self.endpoint.set_health, stall)
            watch = group.create_task(processes.run())
            # Before the cards: a router that finds the worker queries its blocks at once.
            self._relay_events()
            await connect_load(self.endpoint, self.load)
            await self.adapters.start()
            await self.control.connect(self.engine.info.can_sleep)
            await self._register()
            await self.adapters.publish()
            following = group.create_task(self.adapters.run())
            # A pooling engine generates no tokens, so it cannot answer the health check.
            check = None if self.pooling is not None else health_check_payload(plan.model_name)
            await self.endpoint.serve_push(
                self.service.handle,
                metrics_labels=(("model", plan.model_name),),
                health_check_payload=check,
            )
            # Drained: the group waits for its tasks, and these never end by themselves.
            following.cancel()
            watch.cancel()
            running.cancel()

    async def _run_engine(self) -> None:
        """Run the engine; if it dies, abort all streams, which would never end."""
        try:
            await self.engine.run()
        except Exception as error:
            kind = EngineKilled if isinstance(error, EngineKilled) else EngineDied
            self.endpoint.runtime.serving.abort(kind)
            raise

    def _relay_events(self) -> None:
        info = self.engine.info
        self._publishers = [
            KvEventPublisher(
                self.endpoint,
                kv_block_size=info.block_size,
                dp_rank=rank,
                zmq_endpoint=endpoint,
                zmq_replay_endpoint=info.replay_endpoints.get(rank),
            )
            for rank, endpoint in info.event_endpoints.items()
        ]

    def _on_cleared(self) -> None:
        """Clear the published blocks. With requests in it, the engine publishes that itself."""
        if not self.engine.progress()[0]:
            for publisher in self._publishers:
                publisher.publish_all_cleared()

    async def _register(self, lora_name: str | None = None, root: str | None = None) -> None:
        """Store the card of the model, or of an adapter, which is a model over the same weights;
        ``root`` is the adapter's directory."""
        plan, info = self.plan, self.engine.info
        root = root or plan.arguments.worker.model_path
        await register_model(
            ModelInput.Tokens,
            plan.model_type if self.pooling is None else _pooling_types(self.pooling),
            self.endpoint,
            str(plan.model.path),
            lora_name or plan.model_name,
            worker_type=_WORKER_TYPES[plan.mode],
            context_length=info.context_length,
            kv_cache_block_size=info.block_size,
            custom_template_path=plan.arguments.worker.custom_jinja_template,
            lora_name=lora_name,
            base_model_path=lora_name and str(plan.model.path),
            runtime_config=RuntimeConfig(
                total_kv_blocks=info.blocks,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                tool_call_parser=plan.tool_format,
                reasoning_parser=plan.reasoning_format,
                data_parallel_size=info.data_parallel_size,
                context_length=info.context_length,
                enable_local_indexer=bool(info.event_endpoints),
                taints=list(plan.arguments.vllm.taints),
                runtime_data=self._runtime_data(root),
            ),
        )

    def _runtime_data(self, root: str | None) -> dict[str, Any]:
        data: dict[str, Any] = {MAX_IMAGES_KEY: self.engine.info.max_images, ROOT_KEY: root}
        if self.engine.info.structural_tags:
            data[STRUCTURAL_TAGS_KEY] = True
        if self.pooling is not None:
            data[POOLING_KEY] = msgspec.to_builtins(self.pooling)
        return data


def _pooling_types(facts: PoolingFacts) -> ModelType:
    """The APIs of a pooling model; all have /pooling."""
    types = ModelType.Pooling
    if facts.task == "embed":
        types |= ModelType.Embedding
    elif facts.task == "classify":
        types |= ModelType.Classify
    return types | ModelType.Rerank if facts.scoring else types
