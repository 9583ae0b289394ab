"""One vLLM worker: its engine, publishers, endpoint and model card."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from dynamo.errors import ConfigError
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.publishers import KvEventPublisher
from dynamo.llm.register import register_model
from dynamo.llm.types import ModelInput, ModelType, WorkerType, api_types
from dynamo.protocols.card import MAX_IMAGES_KEY, RuntimeConfig
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.endpoints.admission import AdmissionQueue
from dynamo.vllm.arguments import VllmArguments
from dynamo.vllm.embeddings import EmbeddingService
from dynamo.vllm.engine import Engine
from dynamo.vllm.load import LoadReporter
from dynamo.vllm.loras import parse_loras
from dynamo.vllm.model import find_model
from dynamo.vllm.service import VllmService
from dynamo.worker.engine_control import EngineControl
from dynamo.worker.engine_watch import StallWatch
from dynamo.worker.health_payload import health_check_payload
from dynamo.worker.process_watch import ProcessWatch
from dynamo.worker.publish import LoadSender, connect_load

__all__ = ["VllmPlan", "VllmWorker", "make_plan"]

_WORKER_TYPES = {
    "agg": WorkerType.Aggregated,
    "prefill": WorkerType.Prefill,
    "decode": WorkerType.Decode,
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VllmPlan:
    """What the worker serves, checked before the engine starts.

    ``weights`` is the directory or GGUF file for vLLM, ``model`` what the frontend reads. ``loras``
    are the directories of the adapters by name.
    """

    arguments: VllmArguments
    model: ModelDirectory
    weights: str
    model_name: str
    model_type: ModelType
    endpoint: str
    loras: dict[str, str]

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
    )


class VllmWorker:
    """The worker of this process, over a started engine."""

    def __init__(self, plan: VllmPlan, runtime: DistributedRuntime, engine: Engine) -> None:
        self.plan = plan
        self.engine = engine
        self.endpoint: Endpoint = runtime.endpoint(plan.endpoint)
        self.load = LoadSender(runtime.instance_id)
        runtime.metrics.register_prometheus_expfmt_callback(engine.metrics)
        engine.on_stats = LoadReporter(engine.info.blocks, self.load.report)
        settings = plan.arguments.worker
        admission = AdmissionQueue(
            settings.engine_request_limit, settings.request_queue_limit, runtime.metrics
        )
        kind = EmbeddingService if engine.info.pooling else VllmService
        self.service = kind(engine, admission, runtime.tasks, plan.mode == "prefill")
        self.control = EngineControl(self.endpoint, engine)
        self.control.install(runtime)

    async def serve(self) -> None:
        """Serve until the worker has drained. Raises EngineFailure if the engine dies."""
        plan = self.plan
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self._run_engine())
            # The CPU time of an engine that another process runs says nothing here.
            is_ours = not plan.arguments.vllm.core_addresses
            stall = StallWatch(self.engine) if is_ours else None
            processes = ProcessWatch(self.endpoint.set_health, stall)
            watch = group.create_task(processes.run())
            self._relay_events()
            await connect_load(self.endpoint, self.load)
            for name, path in plan.loras.items():
                await self.engine.add_lora(name, path)
            if self.engine.info.can_sleep:
                await self.control.connect()
            for lora_name in (None, *plan.loras):
                await self._register(lora_name)
            # A pooling engine generates no tokens, so it cannot answer the health check.
            check = None if self.engine.info.pooling else health_check_payload(plan.model_name)
            await self.endpoint.serve_push(
                self.service.handle,
                metrics_labels=(("model", plan.model_name),),
                health_check_payload=check,
            )
            watch.cancel()
            running.cancel()

    async def _run_engine(self) -> None:
        """Run the engine; if it dies, abort all streams, which would never end."""
        try:
            await self.engine.run()
        except Exception:
            self.endpoint.runtime.serving.abort(engine_died=True)
            raise

    def _relay_events(self) -> None:
        info = self.engine.info
        for rank, endpoint in info.event_endpoints.items():
            KvEventPublisher(
                self.endpoint, kv_block_size=info.block_size, dp_rank=rank, zmq_endpoint=endpoint
            )

    async def _register(self, lora_name: str | None = None) -> None:
        """Store the card of the model, or of an adapter, which is a model over the same weights."""
        plan, info = self.plan, self.engine.info
        await register_model(
            ModelInput.Tokens,
            ModelType.Embedding if info.pooling else plan.model_type,
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
                tool_call_parser=plan.arguments.worker.tool_call_parser,
                reasoning_parser=plan.arguments.worker.reasoning_parser,
                data_parallel_size=info.data_parallel_size,
                context_length=info.context_length,
                enable_local_indexer=bool(info.event_endpoints),
                taints=list(plan.arguments.vllm.taints),
                runtime_data={MAX_IMAGES_KEY: info.max_images},
            ),
        )
