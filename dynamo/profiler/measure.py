"""Measures one point of a profile through a frontend that serves one worker.

Output is counted by the frontend's own metrics: the planner reads the same ones, and a stream does
not show every token (one that ends inside a character has no text).
"""

from __future__ import annotations

import asyncio
import statistics
import time

import orjson

from dynamo.attach.profiles import samples
from dynamo.bench.answers import error_message
from dynamo.bench.client import LoadConnection
from dynamo.errors import DynamoError
from dynamo.http.client import HttpClient, ResponseError, Target, get
from dynamo.profiler.results import DecodeSample, DecodeStep, Effort, EngineLimits, PrefillSample

_PATH = "/v1/completions"
_METRICS = "dynamo_frontend_"
_PAGE_LIMIT_BYTES = 16 << 20
_BODY_LIMIT_BYTES = 1 << 20
_PULL_S = 0.05
_STALLED_S = 60.0
_TIMEOUT_S = 600.0
_FIRST_TOKEN_ID, _TOKEN_IDS = 1000, 1000
_TTFTS, _GAPS = "time_to_first_token_seconds_count", "inter_token_latency_seconds_count"


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
        found = await self._gauges(
            "model_context_length",
            "model_kv_cache_block_size",
            "model_total_kv_blocks",
            "model_max_num_seqs",
            "model_max_num_batched_tokens",
        )
        context, block, blocks, seqs, batched = (int(value) for value in found)
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
            async with asyncio.timeout(_STALLED_S):
                page = await get(
                    self._target.host,
                    self._target.port,
                    self._target.authority,
                    "/metrics",
                    _PAGE_LIMIT_BYTES,
                )
        except (OSError, ResponseError) as error:
            raise MeasurementFailed(f"the frontend's metrics cannot be read: {error}") from None
        found = {
            name.removeprefix(_METRICS): value
            for name, labels, value in samples(bytes(page.body), *(_METRICS + n for n in names))
            if labels.get("model") == self._model
        }
        return [found.get(name, 0.0) for name in names]

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
                f"a request failed: {client.status}: {error_message(bytes(client.body))}"
            )
        raise MeasurementFailed(
            f"a request ended before all {step.concurrency} of them had decoded for long enough"
        )

    def _body(self, isl: int, osl: int, *, stream: bool) -> bytes:
        """Return a request whose prompt shares no block with an earlier one."""
        self._prompts += 1
        number, ids = self._prompts, []
        for place in range(isl):  # the number first, so that already the first block differs
            ids.append(_FIRST_TOKEN_ID + (number if place < 3 else number + place) % _TOKEN_IDS)
            number = number // _TOKEN_IDS if place < 2 else self._prompts
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
