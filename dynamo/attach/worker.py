"""The worker in front of one server: endpoint, model cards, load, KV events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dynamo.attach.describe import ServerDescription
from dynamo.attach.launch import LaunchedServer, command_line
from dynamo.attach.models import ServerCards
from dynamo.attach.monitor import ServerMonitor
from dynamo.attach.pool import ConnectionPool
from dynamo.attach.probe import ServerProbe
from dynamo.attach.service import AttachService
from dynamo.config.attach import AttachSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError
from dynamo.http.target import Target, parse_url
from dynamo.llm import KvEventPublisher
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.model_source import resolve_model
from dynamo.protocols.load import KvMetrics
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.endpoints.admission import AdmissionQueue
from dynamo.worker.process_watch import ProcessWatch
from dynamo.worker.publish import LoadSender, connect_load

__all__ = ["PROBE_TIMEOUT_S", "AttachPlan", "AttachWorker", "check_settings", "make_plan"]

PROBE_TIMEOUT_S = 4.0
"""Seconds for one answer about health, load or models."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttachPlan:
    """The checked settings of the worker. ``words`` is the command of a server to start."""

    settings: AttachSettings
    target: Target
    words: list[str] | None
    model: ModelDirectory | None
    endpoint: str


def make_plan(
    runtime: RuntimeSettings, worker_suffix: str | None, settings: AttachSettings
) -> AttachPlan:
    """Check all settings before anything starts, and find the model. Raises ConfigError."""
    target, words = check_settings(settings)
    model = None
    if settings.model_path is not None:
        model = resolve_model(settings.model_path).directory()
        model.require_worker_files()
    suffix = f"-{worker_suffix}" if worker_suffix else ""
    endpoint = settings.endpoint_or(f"{runtime.namespace}{suffix}.backend.generate")
    return AttachPlan(settings, target, words, model, endpoint)


def check_settings(settings: AttachSettings) -> tuple[Target, list[str] | None]:
    """Return the server to attach to and the command that starts it. Raises ConfigError."""
    words = None
    target = None if settings.url is None else parse_url(settings.url, settings.api_key)
    if settings.command is not None:
        words, port = command_line(settings.command, None if target is None else target.port)
        target = target or parse_url(f"http://127.0.0.1:{port}", settings.api_key)
    if target is None:
        raise ConfigError(
            "--url and --exec are missing; give the URL of a running server, or a command that "
            "starts one"
        )
    if settings.kv_events_endpoint and settings.model_path is None:
        raise ConfigError(
            "--kv-events-endpoint needs --model-path: KV events name blocks of tokens, and only a "
            "tokenizer turns a prompt into tokens"
        )
    return target, words


class AttachWorker:
    """One worker; the listener of its monitor."""

    def __init__(
        self,
        plan: AttachPlan,
        runtime: DistributedRuntime,
        probe: ServerProbe,
        description: ServerDescription,
    ) -> None:
        settings = plan.settings
        self.endpoint = runtime.endpoint(plan.endpoint)
        self.load = LoadSender(runtime.instance_id)
        self.admission = AdmissionQueue(
            settings.engine_request_limit, settings.request_queue_limit, runtime.metrics
        )
        self.pool = ConnectionPool(
            plan.target, settings.connect_timeout_s, settings.response_timeout_s
        )
        self.cards = ServerCards(self.endpoint, settings, plan.model)
        self.monitor = ServerMonitor(
            probe, description, self, settings.poll_interval_s, settings.profile
        )
        self.service = AttachService(
            self.pool, self.admission, runtime.tasks, self.monitor.check_now
        )
        self._description = description
        self._kv_events_endpoint = settings.kv_events_endpoint
        self._publishers: list[KvEventPublisher] = []

    async def serve(self, launched: LaunchedServer | None) -> None:
        """Serve until the worker has drained. Raises ServerExited if ``launched`` ends first."""
        try:
            async with asyncio.TaskGroup() as group:
                background = []
                if launched is not None:
                    watch = ProcessWatch(self.endpoint.set_health)
                    background += [
                        group.create_task(_guard(launched)),
                        group.create_task(watch.run()),
                    ]
                await connect_load(self.endpoint, self.load)
                self._connect_kv_events()
                await self._offer(self._description)
                background.append(group.create_task(self.monitor.run()))
                await self.endpoint.serve_push(self.service.handle)
                for task in background:
                    task.cancel()
        finally:
            await self.pool.close()

    async def server_up(self, description: ServerDescription) -> None:
        """Offer the models of ``description`` again."""
        await self._offer(description)
        await self.endpoint.register_endpoint_instance()

    async def server_down(self) -> None:
        """Leave routing. The blocks that the server had cached are gone with it."""
        for publisher in self._publishers:
            publisher.publish_all_cleared()
        await self.endpoint.unregister_endpoint_instance()

    def server_load(self, states: list[KvMetrics]) -> None:
        """Send the load; without any, that of the requests of this worker."""
        if not states:
            running, waiting = self.admission.running, self.admission.waiting
            states = [
                KvMetrics(worker_id=0, num_requests_running=running, num_requests_waiting=waiting)
            ]
        elif len(states) > self.cards.ranks:
            states = [_sum(states)]
        for state in states:
            self.load.report(state)

    async def _offer(self, description: ServerDescription) -> None:
        chosen = await self.cards.apply(description)
        self.service.offer(chosen, description.routes)

    def _connect_kv_events(self) -> None:
        size = self.cards.block_size(self._description)
        self._publishers = [
            KvEventPublisher(self.endpoint, kv_block_size=size, dp_rank=rank, zmq_endpoint=address)
            for rank, address in enumerate(self._kv_events_endpoint)
        ]


async def _guard(launched: LaunchedServer) -> None:
    await launched.exited.wait()
    raise launched.cause()


def _sum(states: Sequence[KvMetrics]) -> KvMetrics:
    """The load of all ranks as that of one: the router cannot choose among them."""

    def total(values: Iterable[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return KvMetrics(
        worker_id=0,
        active_decode_blocks=total(state.active_decode_blocks for state in states),
        kv_used_blocks=total(state.kv_used_blocks for state in states),
        kv_total_blocks=total(state.kv_total_blocks for state in states),
        num_requests_running=total(state.num_requests_running for state in states),
        num_requests_waiting=total(state.num_requests_waiting for state in states),
    )
