"""The worker that is profiled: started in a deployment of its own, and measured point by point.

Output is counted by the frontend's own metrics: the planner reads the same ones, and a stream does
not show every token (one that ends inside a character has no text).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from dynamo.attach.launch import free_port
from dynamo.bench.client import LoadConnection, refusal
from dynamo.config import environ, from_env
from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.client import HttpClient, ResponseError, Target, call, parse_url
from dynamo.observability.metrics_page import samples
from dynamo.operations.steps.sleeping import open_engines
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import Service
from dynamo.serve.state.entries import read_services
from dynamo.serve.state.process_table import die_with_parent
from dynamo.status.deployment import running_deployment
from dynamo.status.reading import process_uptimes
from dynamo_lab.profiler.results import (
    DecodeSample,
    DecodeStep,
    Effort,
    EngineLimits,
    PrefillSample,
)

_PATH = "/v1/completions"
_METRICS = "dynamo_frontend_"
_PAGE_LIMIT_BYTES = 16 << 20
_BODY_LIMIT_BYTES = 1 << 20
_PULL_S = 0.05
_STALLED_S = 60.0
_TIMEOUT_S = 600.0
_FIRST_TOKEN_ID, _TOKEN_IDS = 1000, 1000
_TTFTS, _GAPS = "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"
NAMESPACE = "profile"
_FRONTEND = "Frontend"
_STOP_TIMEOUT_S = 90.0
_TAIL_LINES = 20
_READY = re.compile(r"ready: http")
_USERS_FRONTEND = ("DYN_API_KEY_FILE", "DYN_TLS_", "DYN_HTTP_", "DYN_METRICS_PREFIX")
_LOCATION = ("DYN_NAMESPACE", "DYN_FILE_KV", "DYN_DISCOVERY_BACKEND", "DYN_EVENT_PLANE")


class ServeFailed(DynamoError):
    """The worker to profile did not start, or ended."""

    code = "serve_failed"


def profiled_graph(graph: Graph, service: Service, port: int) -> dict[str, Any]:
    """Return the document of a graph with one worker of ``service`` and a frontend on ``port``.

    Prefill and decode workers run aggregated: a worker alone has to do both, and each is measured
    while it does only one.
    """
    worker = dict(graph.config[service.name])
    if "disaggregation-mode" in service.options:
        worker["disaggregation-mode"] = "agg"
    kept = {
        key: value
        for key, value in dict(worker.get("ServiceArgs") or {}).items()
        if key in ("resources", "graceful_timeout")
    }
    worker["ServiceArgs"] = {**kept, "workers": 1, "envs": dict(service.envs)}
    frontend = {
        "run": "dynamo.frontend",
        "http-host": "127.0.0.1",
        "http-port": port,
        "router-mode": "round-robin",
    }
    name = _FRONTEND if service.name != _FRONTEND else f"{_FRONTEND}1"
    document = {"namespace": NAMESPACE, name: frontend, service.name: worker}
    common = graph.config.get("Common")
    return {**document, "Common": common} if common else document


class ProfiledDeployment:
    """``dynamo serve`` of one worker, as an async context manager; nothing of it is left after.

    ``gpus`` is passed to it as ``--gpus``. ``on_line`` gets its messages until it is ready.
    :attr:`start_s` is the time from the start of its worker until it was ready.
    """

    start_s: float

    def __init__(
        self,
        graph: Graph,
        service: Service,
        gpus: int | None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._graph = graph
        self._service = service
        self._gpus = gpus
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ready = asyncio.Event()
        self._tasks = Tasks("profile")

    async def __aenter__(self) -> Target:
        """Start it; return the address of its frontend once the worker serves.

        Raises ServeFailed with the last lines of output. Loading a model has no time limit.
        """
        self._state = tempfile.mkdtemp(prefix="dynamo-profile-")
        port = free_port()
        try:
            await self._start(port)
            await self._wait()
            self._see_worker()
        except BaseException:
            await self._stop()
            raise
        return parse_url(f"http://127.0.0.1:{port}")

    async def wake_s(self) -> float | None:
        """Put the worker to sleep, wake it, and return the seconds until it serves again.

        None if its engine has no sleep mode. Raises DynamoError.
        """
        lease = self._worker.lease
        async with open_engines(self._runtime) as engines:
            if lease is None or not await engines.can_sleep(lease):
                return None
            await engines.sleep(lease)
            began_s = time.monotonic()
            await engines.wake(lease, _TIMEOUT_S)
            return time.monotonic() - began_s

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it and remove its files."""
        await self._stop()

    async def _start(self, port: int) -> None:
        document = json.dumps(profiled_graph(self._graph, self._service, port), default=str)
        words = [sys.executable, "-m", "dynamo", "serve", "--quiet", "--graceful-timeout", "10"]
        if self._gpus is not None:
            words += ["--gpus", str(self._gpus)]
        parent, env = os.getpid(), _environment(self._state, document)
        self._runtime = from_env(RuntimeSettings, env, namespace=NAMESPACE)
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=_directory(self._graph),
            env=env,
            # Ctrl-C at a terminal reaches this process alone, which then stops it in order.
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM, parent),
        )
        self._reader = self._tasks.spawn(self._read(), name="output")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for data in self._process.stdout:
            line = data.decode("utf-8", "replace").rstrip()
            self._tail.append(line)
            if _READY.search(line):
                self._ready.set()
            elif not self._ready.is_set():
                self._on_line(line)

    async def _wait(self) -> None:
        ready = self._tasks.spawn(self._ready.wait(), name="ready")
        await asyncio.wait((ready, self._reader), return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.is_set():
            status = await self._process.wait()
            lines = "".join(f"\n  {line}" for line in self._tail) or " (none)"
            kind = ConfigError if status == 2 else ServeFailed
            raise kind(f"{self._service.name} cannot be started; dynamo serve said:{lines}")

    def _see_worker(self) -> None:
        """Find the worker in the statefile, and how old it is now that it is ready."""
        document = running_deployment(self._runtime)
        services = {} if document is None else read_services(document)
        if document is None or self._service.name not in services:
            raise ServeFailed(f"{self._service.name} is not in the statefile of {NAMESPACE}")
        (self._worker,) = services[self._service.name].entries
        ages = process_uptimes(document)
        self.start_s = max((ages[pid] for pid in self._worker.pids if pid in ages), default=0.0)

    async def _stop(self) -> None:
        if hasattr(self, "_process") and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()  # its arbiter ends with it
                await self._process.wait()
        await self._tasks.close()
        shutil.rmtree(self._state, ignore_errors=True)


def _environment(state: str, document: str) -> dict[str, str]:
    """Return the user's environment without what is about their own deployment."""
    env = {
        name: value
        for name, value in environ().items()
        if not name.startswith(_USERS_FRONTEND) and name not in _LOCATION
    }
    return {**env, "DYN_LOCAL_STATE_DIR": state, "DYN_DEPLOYMENT_CONFIG": document}


def _directory(graph: Graph) -> Path:
    """Return where the services run: relative paths in a graph are relative to its file."""
    path = Path(graph.source)
    return path.absolute().parent if path.exists() else Path.cwd()


class MeasurementFailed(DynamoError):
    """A point of the profile could not be measured."""

    code = "measurement_failed"


class WorkerProbe:
    """Sends requests for ``model`` to ``target``; ``gpus`` is what its one worker holds."""

    def __init__(self, target: Target, model: str, gpus: float) -> None:
        self._target = target
        self._model = model
        self._gpus = gpus
        self._prompts = 0

    async def limits(self) -> EngineLimits:
        """Return the limits in the model card. Raises MeasurementFailed if it has none."""
        gauges = await self._gauges(
            "model_context_length",
            "model_kv_cache_block_size",
            "model_total_kv_blocks",
            "model_max_num_seqs",
            "model_max_num_batched_tokens",
        )
        context, block, blocks, seqs, batched = (int(value) for value in gauges)
        if not context or not block * blocks:
            raise MeasurementFailed(
                f"the worker of {self._model} does not say how long its sequences and how large "
                "its KV cache may be (model card: context length, total KV blocks), so it cannot "
                "be profiled"
            )
        return EngineLimits(
            context_tokens=context,
            kv_tokens=block * blocks,
            max_seqs=seqs or None,
            batched_tokens=batched or None,
        )

    async def prefill(self, isl: int, repeats: int) -> PrefillSample:
        """Return the median TTFT of prompts of ``isl`` tokens, one at a time."""
        ttft_s = statistics.median([await self._ttft_s(isl) for _ in range(repeats)])
        return PrefillSample(
            isl=isl, ttft_ms=1000 * ttft_s, tokens_per_s_per_gpu=isl / ttft_s / self._gpus
        )

    async def decode(self, step: DecodeStep, effort: Effort, kv_tokens: int) -> DecodeSample:
        """Measure requests while all of ``step`` decode; then cancel them.

        Raises MeasurementFailed if they do not all decode at the same time.
        """
        meter = _Meter(self, step.concurrency)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._stream(step)) for _ in range(step.concurrency)]
                itl_s, tokens_per_s, generated = await meter.measure(effort)
                for task in running:
                    task.cancel()
        except* MeasurementFailed as failed:
            raise failed.exceptions[0] from None
        context = step.isl + generated
        return DecodeSample(
            concurrency=step.concurrency,
            context_tokens=context,
            kv_usage=min(1.0, step.concurrency * context / kv_tokens),
            itl_ms=1000 * itl_s,
            tokens_per_s_per_gpu=tokens_per_s / self._gpus,
        )

    async def counts(self) -> tuple[float, float]:
        """Return how many requests have had a first token, and how many tokens followed."""
        first, further = await self._gauges(_TTFTS, _GAPS)
        return first, further

    async def _gauges(self, *names: str) -> list[float]:
        """Return the model's values of ``names`` on the frontend's metrics page, else 0."""
        try:
            page = await call(self._target, "GET", "/metrics", _PAGE_LIMIT_BYTES, _STALLED_S)
        except (OSError, ResponseError) as error:
            raise MeasurementFailed(f"the frontend's metrics cannot be read: {error}") from None
        values = {
            name.removeprefix(_METRICS): value
            for name, labels, value in samples(bytes(page.body), *(_METRICS + n for n in names))
            if labels.get("model") == self._model
        }
        return [values.get(name, 0.0) for name in names]

    async def _ttft_s(self, isl: int) -> float:
        connection = LoadConnection(self._target)
        try:
            await connection.open()
            # One token, not streamed: the answer is complete when the first token is.
            body = self._body(isl, 1, stream=False)
            outcome = await connection.measure(_PATH, body, stream=False, timeout_s=_TIMEOUT_S)
        except OSError as error:
            raise MeasurementFailed(f"cannot connect to the frontend: {error}") from None
        finally:
            connection.close()
        if outcome.error is not None:
            raise MeasurementFailed(f"a prompt of {isl} tokens failed: {outcome.error}")
        return outcome.latency_s

    async def _stream(self, step: DecodeStep) -> None:
        """Run one request of ``step`` until it is cancelled; its end is a failure."""
        client = _Discarding(_BODY_LIMIT_BYTES)
        body = self._body(step.isl, step.osl, stream=True)
        try:
            await client.connect(self._target.host, self._target.port)
            await client.request(self._target.head("POST", _PATH, len(body)) + body)
        except (OSError, ResponseError) as error:
            raise MeasurementFailed(f"a request failed: {error}") from None
        finally:
            client.close()
        if client.status != 200:
            raise MeasurementFailed(
                f"a request failed: {refusal(client.status, bytes(client.body))}"
            )
        raise MeasurementFailed(
            f"a request ended before all {step.concurrency} of them had decoded for long enough"
        )

    def _body(self, isl: int, osl: int, *, stream: bool) -> bytes:
        """Return a request whose prompt shares no block with an earlier one."""
        self._prompts += 1
        number, ids = self._prompts, []
        for position in range(isl):  # the number first, so that already the first block differs
            ids.append(
                _FIRST_TOKEN_ID + (number if position < 3 else number + position) % _TOKEN_IDS
            )
            number = number // _TOKEN_IDS if position < 2 else self._prompts
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": osl,
            "min_tokens": osl,
            "ignore_eos": True,
            "stream": stream,
        }
        return orjson.dumps(body)


class _Discarding(HttpClient):
    """A client that reads an answer of status 200 and keeps nothing of it."""

    def on_body(self, data: bytes) -> None:
        """httptools: a piece of the body."""
        if self.status != 200:
            super().on_body(data)


class _Meter:
    """Watches ``requests`` streams by the metrics of their frontend, from now on."""

    def __init__(self, probe: WorkerProbe, requests: int) -> None:
        self._probe = probe
        self._requests = requests

    async def measure(self, effort: Effort) -> tuple[float, float, float]:
        """Return seconds between tokens, tokens per second, and the tokens generated by a stream
        in the middle of the measurement. Raises MeasurementFailed if nothing arrives for long."""
        first0, gaps0 = await self._probe.counts()
        await self._until(first0 + self._requests, 0, "first token")
        _, gaps = await self._probe.counts()
        start = await self._until(0, gaps + self._requests * effort.settle, "token")
        began_s = time.perf_counter()
        end = await self._until(0, start + self._requests * effort.window, "token")
        seconds = time.perf_counter() - began_s
        tokens = end - start
        # The first token, and what has followed it in the middle of the measurement.
        generated = 1 + ((start + end) / 2 - gaps0) / self._requests
        return seconds * self._requests / tokens, tokens / seconds, generated

    async def _until(self, first: float, gaps: float, what: str) -> float:
        """Wait until both counts are reached; return the second."""
        before = (-1.0, -1.0)
        changed_s = time.monotonic()
        while True:
            counts = await self._probe.counts()
            if counts[0] >= first and counts[1] >= gaps:
                return counts[1]
            now_s = time.monotonic()
            if counts != before:
                before, changed_s = counts, now_s
            elif now_s - changed_s > _STALLED_S:
                missing = max(first - counts[0], 0)
                raise MeasurementFailed(
                    f"no {what} for {_STALLED_S:.0f} s: {missing:.0f} of {self._requests} requests "
                    "wait; the worker does not run as many at the same time"
                )
            await asyncio.sleep(_PULL_S)
