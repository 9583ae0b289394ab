"""One simulated worker: its ranks, publishers, request handler, endpoint and model card."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.config.worker import WorkerSettings
from dynamo.errors import ConfigError, DynamoError, InvalidArgument
from dynamo.llm.answer_formats import format_name
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.model_source import resolve_model
from dynamo.llm.register import register_model, unregister_model
from dynamo.llm.types import ModelInput, ModelType, WorkerType, api_types
from dynamo.mocker.arguments import event_ports
from dynamo.mocker.blocks import CacheChange
from dynamo.mocker.engine import EngineRank, EngineShape, MockerMetrics
from dynamo.mocker.engine_events import EngineEventSockets
from dynamo.mocker.replies import (
    Reply,
    ReplyScript,
    echo_reply,
    random_reply,
    rest_of,
    sequence_reply,
)
from dynamo.mocker.settings import MockerSettings
from dynamo.protocols import codec
from dynamo.protocols.codec import Tokens
from dynamo.protocols.control import ROOT_KEY, RuntimeConfig
from dynamo.protocols.engine import GENERATED_TOKENS, PreprocessedRequest
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.runtime.requests.stream import ServerStream
from dynamo.worker.adapter_record import CONFIG, AdapterRecord
from dynamo.worker.adapters import Adapters
from dynamo.worker.engine_control import EngineControl, health_check_payload
from dynamo.worker.publish import (
    KvEventSender,
    LoadSender,
    connect_kv_events,
    connect_load,
    show_load_time,
)

_WORKER_TYPES = {
    "agg": WorkerType.Aggregated,
    "prefill": WorkerType.Prefill,
    "decode": WorkerType.Decode,
}
_KV_NUMBER_BYTES: dict[str, int | None] = {"auto": None, "bfloat16": 2}
"""By --kv-cache-dtype; the others have one byte."""
DEFAULT_MAX_TOKENS = 256
"""Reply length for a request without ``max_tokens``; less if the context is shorter."""
log = logging.getLogger(__name__)
_DECODE = codec.decoder(PreprocessedRequest).decode


class MockerService:
    """A push handler over the ranks of one worker. ``script`` has the replies, where given.

    A request with ``fatal_seed`` kills the process.
    """

    def __init__(
        self,
        ranks: Sequence[EngineRank],
        admission: AdmissionQueue,
        reply: str = "random",
        script: ReplyScript | None = None,
        fatal_seed: int | None = None,
    ) -> None:
        self.ranks = ranks
        self.admission = admission
        self._kind = reply
        self._script = script
        self._fatal_seed = fatal_seed

    def handle(self, stream: ServerStream, payload: bytes) -> None:
        """Answer one ``PreprocessedRequest``; an error ends the stream."""
        try:
            request = _DECODE(payload)
            rank = self._rank(request)
            reply = self._reply(request, rank)
            done = self.admission.release
            self.admission.enter(stream, lambda: rank.submit(stream, request, reply, done))
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not a request for a Tokens model: {error}"))
        except DynamoError as error:
            stream.error(error)

    def _rank(self, request: PreprocessedRequest) -> EngineRank:
        number = request.routing.dp_rank if request.routing else None
        if number is None:
            return min(self.ranks, key=lambda rank: rank.load)
        if not 0 <= number < len(self.ranks):
            raise InvalidArgument(
                f"routing.dp_rank {number} does not exist; this worker has {len(self.ranks)}"
            )
        return self.ranks[number]

    def _reply(self, request: PreprocessedRequest, rank: EngineRank) -> Reply:
        prompt = request.token_ids
        if not prompt:
            raise InvalidArgument("token_ids is empty; send at least one token")
        seed = request.sampling_options.seed
        if seed is not None and seed == self._fatal_seed:
            log.error("a request has the fatal seed %d: killing this process", seed)
            os.kill(os.getpid(), signal.SIGKILL)
        limit = request.stop_conditions.max_tokens
        if limit is None:
            # At least 1: the scheduler then refuses a prompt that leaves no room, with its text.
            limit = max(1, min(DEFAULT_MAX_TOKENS, rank.max_sequence_tokens - len(prompt)))
        if limit < 1:
            raise InvalidArgument(f"stop_conditions.max_tokens must be >= 1, got {limit}")
        if rank.prefill_only:
            return random_reply(1, seed)
        if (self._script is not None or self._kind == "echo") and (
            fixed := self._fixed_reply(request, limit)
        ):
            return fixed
        if self._kind == "sequence":
            return sequence_reply(prompt, limit, seed)
        return random_reply(limit, seed)

    def _fixed_reply(self, request: PreprocessedRequest, limit: int) -> Reply | None:
        """The reply to the prompt, from where it was when the request migrated here.

        None where the script has none and ``--reply`` decides. Raises InvalidArgument.
        """
        prompt, sent = _prompt_of(request)
        reply = None
        if self._script is not None:
            reply = self._script.reply(prompt, limit + sent)
            if reply is None and self._kind == "script":
                raise InvalidArgument("no line of the reply script matches the prompt")
        if reply is None and self._kind == "echo":
            reply = echo_reply(prompt, limit + sent, request.stop_conditions)
        return None if reply is None else rest_of(reply, sent)


def _prompt_of(request: PreprocessedRequest) -> tuple[Tokens, int]:
    """The prompt without the output that a migrated request has behind it, and that output's size.

    Raises InvalidArgument where the size is none.
    """
    ids, sent = request.token_ids, (request.extra_args or {}).get(GENERATED_TOKENS, 0)
    if not isinstance(sent, int) or not 0 <= sent < len(ids):
        raise InvalidArgument(
            f"extra_args.{GENERATED_TOKENS} must be from 0 to {len(ids) - 1}, got {sent!r:.40}"
        )
    return ids[: len(ids) - sent], sent


class SimulatedEngine:
    """A :class:`ControlledEngine` over the ranks of a worker.

    Waking takes ``wake_s`` seconds; adapters have a rank of at most ``max_lora_rank``.
    """

    def __init__(self, ranks: Sequence[EngineRank], wake_s: float, max_lora_rank: int = 16) -> None:
        self._ranks = ranks
        self._max_lora_rank = max_lora_rank
        self._wake_s = wake_s
        self._asleep = False

    async def sleep(self, level: int = 1) -> None:
        """Wait until no rank has a request."""
        for rank in self._ranks:
            if rank.load:
                await rank.idle.wait()
            rank.clear_cache()
        self._asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the time of loading the weights from CPU memory."""
        if self._asleep:
            await asyncio.sleep(self._wake_s)
        self._asleep = False

    async def reload_weights(self) -> None:
        """Do nothing: there are no weights."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self._asleep

    async def load_lora(self, name: str, path: str, version: str) -> object:
        """Check the rank of the adapter, and take its directory for weights."""
        try:
            rank = json.loads(Path(path, CONFIG).read_text(encoding="utf-8"))["r"]
            if not isinstance(rank, int):
                raise TypeError(f"{rank!r:.40} is no number")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"{path}/{CONFIG} has no rank 'r': {error}") from None
        if rank > self._max_lora_rank:
            raise InvalidArgument(
                f"LoRA rank {rank} is greater than max_lora_rank {self._max_lora_rank}."
            )
        return path

    def use_lora(self, name: str, weights: object | None) -> frozenset[str]:
        """Do nothing: a reply does not depend on an adapter."""
        return frozenset()

    def any_running(self, requests: frozenset[str]) -> bool:
        """Return False: nothing waits for the weights."""
        return False

    async def remove_lora(self, weights: object) -> None:
        """Do nothing."""

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False, and nothing is dropped, while requests use some."""
        if any(rank.pool.used for rank in self._ranks):
            return False
        for rank in self._ranks:
            rank.clear_cache()
        return True


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
    event_ports: Sequence[int] = ()

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
    bytes_per_token = model.kv_bytes_per_token(_KV_NUMBER_BYTES.get(mocker.kv_cache_dtype, 1))
    if mocker.kv_bytes_per_token is None and bytes_per_token is not None:
        transfer = replace(shape.transfer, bytes_per_token=bytes_per_token)
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
        event_ports(mocker),
    )


class MockerWorker:
    """Worker ``number`` of this process; each has its own runtime."""

    def __init__(self, plan: WorkerPlan, runtime: DistributedRuntime, number: int) -> None:
        self.plan = plan
        self.endpoint: Endpoint = runtime.endpoint(plan.endpoint)
        self.events = KvEventSender(runtime.instance_id)
        self.load = LoadSender(runtime.instance_id)
        self.publishes_events = plan.mocker.disaggregation_mode != "decode"
        self._sockets: EngineEventSockets | None = None
        if plan.event_ports and self.publishes_events:
            self._sockets = EngineEventSockets(
                runtime.settings.tcp_rpc_host,
                plan.event_ports[number],
                plan.mocker.data_parallel_size,
                plan.shape.block_size,
            )
            runtime.on_close(self._sockets.close)
        # The label of a metric counts the ranks of all workers of this process.
        first = number * plan.mocker.data_parallel_size
        self.ranks = [
            EngineRank(
                rank,
                plan.shape,
                MockerMetrics(runtime.metrics, str(first + rank), plan.model_name),
                runtime.tasks,
                self._record,
                self.load.report,
                runtime.instance_id,
            )
            for rank in range(plan.mocker.data_parallel_size)
        ]
        admission = AdmissionQueue(
            plan.settings.engine_request_limit, plan.settings.request_queue_limit, runtime.metrics
        )
        engine = SimulatedEngine(self.ranks, plan.mocker.wake_time_s, plan.mocker.max_lora_rank)
        self.adapters = Adapters(
            engine,
            plan.model_name,
            {},
            AdapterRecord(runtime.settings, plan.model_name),
            None,
            self._register,
            partial(unregister_model, self.endpoint),
        )
        # A rank publishes at once that it has cleared its cache.
        self.control = EngineControl(self.endpoint, engine, lambda: None, self.adapters)
        self.control.install(runtime, plan.mocker.enable_sleep_mode)
        self.service = MockerService(
            self.ranks, admission, plan.mocker.reply, plan.script, plan.mocker.fatal_seed
        )

    async def serve(self) -> None:
        """Serve until the worker has drained. Raises the error of a rank that fails."""
        async with asyncio.TaskGroup() as group:
            ranks = [group.create_task(self._run_rank(rank)) for rank in self.ranks]
            await connect_kv_events(self.endpoint, self.events)
            await connect_load(self.endpoint, self.load)
            if self.plan.mocker.startup_time_s:
                show_load_time(self.endpoint, self.plan.model_name, self.plan.mocker.startup_time_s)
            await self.adapters.start()
            await self.control.connect(self.plan.mocker.enable_sleep_mode)
            await self._register()
            await self.adapters.publish()
            following = group.create_task(self.adapters.run())
            await self.endpoint.serve_push(
                self.service.handle,
                metrics_labels=(("model", self.plan.model_name),),
                health_check_payload=health_check_payload(self.plan.model_name),
            )
            # Drained: the group waits for its tasks, and these never end by themselves.
            for task in (following, *ranks):
                task.cancel()

    def _record(self, dp_rank: int, changes: list[CacheChange]) -> None:
        """Publish what a rank has stored and removed."""
        if not self.publishes_events:
            return
        for tier, group in groupby(changes, key=attrgetter("storage_tier")):
            self.events.record(dp_rank, [change.change for change in group], tier)
        if self._sockets is not None:
            self._sockets.publish(dp_rank, changes)

    async def _run_rank(self, rank: EngineRank) -> None:
        """Run ``rank``; if it fails, abort all streams, which would never end."""
        try:
            await rank.run()
        except Exception:
            self.endpoint.runtime.serving.abort()
            raise

    async def _register(self, lora_name: str | None = None, root: str | None = None) -> None:
        """Store the card of the model, or of the adapter in the directory ``root``."""
        plan = self.plan
        await register_model(
            ModelInput.Tokens,
            plan.model_type,
            self.endpoint,
            str(plan.model.path),
            lora_name or plan.model_name,
            lora_name=lora_name,
            base_model_path=lora_name and str(plan.model.path),
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
                tool_call_parser=format_name(plan.settings.tool_call_parser),
                reasoning_parser=format_name(plan.settings.reasoning_parser),
                runtime_data={} if root is None else {ROOT_KEY: root},
            ),
        )


def _script(mocker: MockerSettings, model: ModelDirectory) -> ReplyScript | None:
    if mocker.reply_script is None:
        if mocker.reply == "script":
            raise ConfigError("--reply script needs the file of --reply-script; give both")
        return None
    return ReplyScript(mocker.reply_script, model.tokenizer_path)
