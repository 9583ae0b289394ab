"""The worker in front of one server: endpoint, model cards, load, health, KV events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import orjson

from dynamo.attach.describe import (
    ServerDescription,
    ServerLoading,
    ServerProbe,
    ServerUnreachable,
    describe,
)
from dynamo.attach.launch import LaunchedServer, ServerExited, command_line
from dynamo.attach.models import ServerCards
from dynamo.attach.pool import ConnectionPool
from dynamo.attach.profiles import json_load, prometheus_load
from dynamo.attach.service import AttachService
from dynamo.attach.settings import AttachSettings
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, EngineShutdown
from dynamo.http.client import Target, parse_url
from dynamo.llm import KvEventPublisher
from dynamo.llm.model_directory import ModelDirectory
from dynamo.llm.model_source import resolve_model
from dynamo.protocols.kv import KvMetrics
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.requests.admission import AdmissionQueue
from dynamo.worker.engine_control import ProcessWatch
from dynamo.worker.lifecycle import WorkerLifecycle
from dynamo.worker.publish import LoadSender, connect_load

PROBE_TIMEOUT_S = 4.0
"""Seconds for one answer about health, load or models."""
log = logging.getLogger(__name__)
_SLOW_ANSWERS = 2
_ANY_SERVER_INTERVAL_S = 10.0
_READY_POLL_S = 0.25
_PROGRESS_S = 10.0


async def wait_until_ready(
    probe: ServerProbe,
    profile_name: str,
    lifecycle: WorkerLifecycle,
    launched: LaunchedServer | None,
    timeout_s: float,
) -> ServerDescription | None:
    """Return what the server offers as soon as it is ready; None if the worker has to stop.

    A running server is waited for without limit, a ``launched`` one for ``timeout_s``. Raises
    ServerExited if it exits first or is too slow, ConfigError if it can never be used.
    """
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    phase, logged_s = "", started_s - _PROGRESS_S
    while True:
        try:
            description = await describe(probe, profile_name)
            # A signal that arrived just now finds no runtime to shut down.
            return None if lifecycle.stopping.is_set() else description
        except ServerUnreachable as error:
            now_phase = "loading" if isinstance(error, ServerLoading) else "not reachable"
            reason = str(error)
        if launched is not None and launched.exited.is_set():
            raise launched.cause()
        now_s = loop.time()
        if now_phase != phase or now_s - logged_s >= _PROGRESS_S:
            phase, logged_s = now_phase, now_s
            log.info(
                "waiting for %s: %s, %.0f s (%s)",
                probe.target.url,
                phase,
                now_s - started_s,
                reason,
            )
        if launched is not None and now_s - started_s > timeout_s:
            raise ServerExited(
                f"{probe.target.url} did not get ready within {timeout_s:g} s ({phase}: {reason}); "
                "raise --startup-timeout-secs if it only needs longer"
            )
        if not await lifecycle.wait(_READY_POLL_S):
            return None


class ServerMonitor:
    """Polls the server of ``probe`` every ``interval_s`` until cancelled.

    A refused or broken connection and a status from 500 on mean down at once; a missing answer
    means down the second time in a row, because a busy server is slow too. So a server that hangs
    is down within the poll interval and two timeouts of the probe.
    """

    def __init__(
        self,
        probe: ServerProbe,
        description: ServerDescription,
        listener: AttachWorker,
        interval_s: float,
        profile_name: str,
    ) -> None:
        self.is_up = True
        self._probe = probe
        self._description = description
        self._listener = listener
        self._interval_s = interval_s
        self._profile_name = profile_name
        self._wake = asyncio.Event()
        self._slow = 0
        self._reports_load = True

    def check_now(self) -> None:
        """Poll at once: a request could not reach the server. No effect while it is down."""
        if self.is_up:
            self._wake.set()

    async def run(self) -> None:
        """Poll until cancelled, or until the worker is shutting down."""
        while True:
            try:
                await self._poll()
            except EngineShutdown as error:
                log.debug("no further polls: %s", error)
                return
            # Ask again without a pause: the next answer decides whether the server is down.
            if self.is_up and self._slow:
                continue
            try:
                async with asyncio.timeout(self._interval()):
                    await self._wake.wait()
            except TimeoutError:
                continue
            finally:
                self._wake.clear()

    def _interval(self) -> float:
        # Any server may be one on the internet, with limits on requests.
        if self._description.profile.name == "openai":
            return max(self._interval_s, _ANY_SERVER_INTERVAL_S)
        return self._interval_s

    async def _poll(self) -> None:
        try:
            if self.is_up:
                await self._check_health()
                await self._read_load()
            else:
                await self._ask_again()
        except ServerUnreachable as error:
            await self._on_failure(error)
        else:
            self._slow = 0

    async def _check_health(self) -> None:
        path = self._description.profile.health_path
        status, _ = await self._probe.get(path)
        if status >= 500:
            raise ServerLoading(f"{path} answers {status}")

    async def _read_load(self) -> None:
        profile = self._description.profile
        states: list[KvMetrics] = []
        if profile.load_path is not None and self._reports_load:
            status, page = await self._probe.get(profile.load_path)
            # A server without the page stays without it: it is asked again after an outage only.
            self._reports_load = status == 200
            if self._reports_load:
                states = self._parse(page)
            else:
                log.warning(
                    "%s%s answers %d, so only requests of this worker count as load: %s",
                    self._probe.target.url,
                    profile.load_path,
                    status,
                    profile.load_hint,
                )
        self._listener.server_load(states)

    def _parse(self, page: bytes) -> list[KvMetrics]:
        names = self._description.profile.load_names
        if names is not None:
            return prometheus_load(page, names, self._description.capacity.total_blocks)
        try:
            return json_load(orjson.loads(page))
        except orjson.JSONDecodeError:
            return []

    async def _ask_again(self) -> None:
        self._description = await describe(self._probe, self._profile_name)
        self.is_up = self._reports_load = True
        log.info("%s answers again: its models get requests", self._probe.target.url)
        await self._listener.server_up(self._description)

    async def _on_failure(self, error: ServerUnreachable) -> None:
        if not self.is_up:
            log.debug("%s: %s", self._probe.target.url, error)
            return
        self._slow += 1
        if error.slow and self._slow < _SLOW_ANSWERS:
            log.warning("%s: %s (%d)", self._probe.target.url, error, self._slow)
            return
        self.is_up = False
        log.error(
            "%s is down (%s): no requests until it answers again", self._probe.target.url, error
        )
        await self._listener.server_down()


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
    if len(settings.kv_replay_endpoint) not in (0, len(settings.kv_events_endpoint)):
        raise ConfigError(
            f"--kv-replay-endpoint is given {len(settings.kv_replay_endpoint)} times and "
            f"--kv-events-endpoint {len(settings.kv_events_endpoint)} times; give one of each for "
            "each data-parallel rank"
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
            self.pool, self.admission, runtime.tasks, self.monitor.check_now, self.cards.ranks
        )
        self._description = description
        self._kv_events_endpoint = settings.kv_events_endpoint
        self._kv_replay_endpoint = settings.kv_replay_endpoint
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
                # Drained: the group waits for its tasks, and these never end by themselves.
                for task in background:
                    task.cancel()
        finally:
            await self.pool.close()

    async def server_up(self, description: ServerDescription) -> None:
        """Offer the models of ``description`` again. The server may have kept its blocks."""
        for publisher in self._publishers:
            publisher.ask_engine_again()
        # Before the instance is listed: the requests that follow name these models.
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
            KvEventPublisher(
                self.endpoint,
                kv_block_size=size,
                dp_rank=rank,
                zmq_endpoint=address,
                zmq_replay_endpoint=replay,
            )
            for rank, (address, replay) in enumerate(
                zip_longest(self._kv_events_endpoint, self._kv_replay_endpoint)
            )
        ]


async def _guard(launched: LaunchedServer) -> None:
    await launched.exited.wait()
    raise launched.cause()


def _sum(states: Sequence[KvMetrics]) -> KvMetrics:
    """The load of all ranks as that of one: the router cannot choose among them."""

    def total(values: Iterable[int | None]) -> int | None:
        reported = [value for value in values if value is not None]
        return sum(reported) if reported else None

    return KvMetrics(
        worker_id=0,
        active_decode_blocks=total(state.active_decode_blocks for state in states),
        kv_used_blocks=total(state.kv_used_blocks for state in states),
        kv_total_blocks=total(state.kv_total_blocks for state in states),
        num_requests_running=total(state.num_requests_running for state in states),
        num_requests_waiting=total(state.num_requests_waiting for state in states),
    )
