"""One simulated worker: its ranks, publishers, endpoint and model card."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo.config.mocker import MockerSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.model_source import resolve_model
from dynamo.llm.register import register_model
from dynamo.llm.types import ModelInput, ModelType, WorkerType, api_types
from dynamo.mocker.engine import EngineRank, EngineShape
from dynamo.mocker.metrics import MockerMetrics
from dynamo.mocker.script import ReplyScript
from dynamo.mocker.service import MockerService
from dynamo.mocker.sleep import SimulatedSleep
from dynamo.protocols.card import RuntimeConfig
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.endpoints.admission import AdmissionQueue
from dynamo.worker.engine_control import EngineControl
from dynamo.worker.health_payload import health_check_payload
from dynamo.worker.publish import KvEventSender, LoadSender, connect_kv_events, connect_load

__all__ = ["MockerWorker", "WorkerPlan", "make_plan"]

_WORKER_TYPES = {
    "agg": WorkerType.Aggregated,
    "prefill": WorkerType.Prefill,
    "decode": WorkerType.Decode,
}


@dataclass(frozen=True)
class WorkerPlan:
    """The settings that all workers of this process share."""

    settings: WorkerSettings
    mocker: MockerSettings
    shape: EngineShape
    model: ModelDirectory
    model_name: str
    model_type: ModelType
    endpoint: str
    script: ReplyScript | None = None

    @property
    def context_length(self) -> int:
        """Limit on the tokens of prompt and output together."""
        slots = self.shape.blocks * self.shape.block_size
        limits = (slots, self.shape.limits.max_model_len, self.model.context_length)
        return min(limit for limit in limits if limit is not None)


def make_plan(
    runtime: RuntimeSettings,
    worker_suffix: str | None,
    settings: WorkerSettings,
    mocker: MockerSettings,
    shape: EngineShape,
) -> WorkerPlan:
    """Check all settings before any worker starts. Raises ConfigError."""
    if settings.model_path is None:
        raise ConfigError("--model-path is missing; give a directory or an id on Hugging Face")
    model = resolve_model(settings.model_path).directory()
    model.require_worker_files()
    if mocker.kv_bytes_per_token is None and model.kv_bytes_per_token is not None:
        transfer = replace(shape.transfer, bytes_per_token=model.kv_bytes_per_token)
        shape = replace(shape, transfer=transfer)
    template = settings.custom_jinja_template
    if template is not None and not Path(template).is_file():
        raise ConfigError(f"--custom-jinja-template {template}: no such file")
    suffix = f"-{worker_suffix}" if worker_suffix else ""
    component = "prefill" if shape.prefill_only else "backend"
    return WorkerPlan(
        settings,
        mocker,
        shape,
        model,
        settings.model_name or model.name,
        ModelType.Prefill if shape.prefill_only else api_types(settings.endpoint_types),
        settings.endpoint_or(f"{runtime.namespace}{suffix}.{component}.generate"),
        _script(mocker, model),
    )


class MockerWorker:
    """Worker ``number`` of this process; each has its own runtime."""

    def __init__(self, plan: WorkerPlan, runtime: DistributedRuntime, number: int) -> None:
        self.plan = plan
        self.endpoint: Endpoint = runtime.endpoint(plan.endpoint)
        self.events = KvEventSender(runtime.instance_id)
        self.load = LoadSender(runtime.instance_id)
        self.publishes_events = plan.mocker.disaggregation_mode != "decode"
        first = number * plan.mocker.data_parallel_size
        self.ranks = [
            EngineRank(
                rank,
                plan.shape,
                MockerMetrics(runtime.metrics, str(first + rank), plan.model_name),
                runtime.tasks,
                self.events.record if self.publishes_events else lambda _rank, _changes: None,
                self.load.report,
                runtime.instance_id,
            )
            for rank in range(plan.mocker.data_parallel_size)
        ]
        admission = AdmissionQueue(
            plan.settings.engine_request_limit, plan.settings.request_queue_limit, runtime.metrics
        )
        self.control = EngineControl(
            self.endpoint, SimulatedSleep(self.ranks, plan.mocker.wake_time_s)
        )
        if plan.mocker.enable_sleep_mode:
            self.control.install(runtime)
        self.service = MockerService(
            self.ranks, admission, plan.mocker.reply, plan.script, plan.mocker.fatal_seed
        )

    async def serve(self) -> None:
        """Serve until the worker has drained. Raises the error of a rank that fails."""
        async with asyncio.TaskGroup() as group:
            ranks = [group.create_task(self._run_rank(rank)) for rank in self.ranks]
            await connect_kv_events(self.endpoint, self.events)
            await connect_load(self.endpoint, self.load)
            if self.plan.mocker.enable_sleep_mode:
                await self.control.connect()
            await self._register()
            await self.endpoint.serve_push(
                self.service.handle,
                metrics_labels=(("model", self.plan.model_name),),
                health_check_payload=health_check_payload(self.plan.model_name),
            )
            for rank in ranks:
                rank.cancel()

    async def _run_rank(self, rank: EngineRank) -> None:
        """Run ``rank``; if it fails, abort all streams, which would never end."""
        try:
            await rank.run()
        except Exception:
            self.endpoint.runtime.serving.abort()
            raise

    async def _register(self) -> None:
        plan = self.plan
        await register_model(
            ModelInput.Tokens,
            plan.model_type,
            self.endpoint,
            str(plan.model.path),
            plan.model_name,
            worker_type=_WORKER_TYPES[plan.mocker.disaggregation_mode],
            context_length=plan.context_length,
            kv_cache_block_size=plan.shape.block_size,
            custom_template_path=plan.settings.custom_jinja_template,
            runtime_config=RuntimeConfig(
                total_kv_blocks=plan.shape.blocks,
                max_num_seqs=plan.shape.limits.max_num_seqs,
                max_num_batched_tokens=plan.shape.limits.max_num_batched_tokens,
                data_parallel_size=plan.mocker.data_parallel_size,
                context_length=plan.context_length,
                enable_local_indexer=self.publishes_events,
                taints=list(plan.mocker.taints),
                tool_call_parser=plan.settings.tool_call_parser,
                reasoning_parser=plan.settings.reasoning_parser,
            ),
        )


def _script(mocker: MockerSettings, model: ModelDirectory) -> ReplyScript | None:
    if (mocker.reply == "script") != (mocker.reply_script is not None):
        raise ConfigError(
            f"--reply {mocker.reply} and --reply-script {mocker.reply_script}: give both "
            "--reply script and the file of --reply-script, or neither"
        )
    if mocker.reply_script is None:
        return None
    return ReplyScript(mocker.reply_script, model.tokenizer_path)
