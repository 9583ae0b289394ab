"""Sends planned requests on their clock, at most so many at once, over keep-alive connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from dynamo.bench.client import Connection, Target
from dynamo.bench.stats import Outcome
from dynamo.bench.workload import PlannedRequest, Prompts
from dynamo.config.bench import BenchSettings
from dynamo.errors import CannotConnect, ConfigError, DynamoError

__all__ = ["Runner", "calibrate", "first_model"]

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CALIBRATION_WORDS = (16, 528)


class Runner:
    """One run. ``on_done`` is called after each request with its outcome (progress)."""

    def __init__(
        self,
        target: Target,
        settings: BenchSettings,
        model: str,
        prompts: Prompts,
        on_done: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self._target = target
        self._settings = settings
        self._model = model
        self._prompts = prompts
        self._on_done = on_done
        self._idle: list[Connection] = []
        self.outcomes: list[Outcome] = []
        self.in_flight = 0

    async def run(self, planned: Sequence[PlannedRequest], concurrency: int | None) -> float:
        """Send everything; returns the seconds from the first request to the last answer."""
        room = asyncio.Semaphore(concurrency) if concurrency else None
        started_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in planned:
                    if request.at_s is not None:
                        await _sleep_until(started_s + request.at_s)
                    if room is not None:
                        await room.acquire()
                    tasks.create_task(self._one(request, room))
        finally:
            for connection in self._idle:
                connection.close()
        return time.perf_counter() - started_s

    async def _one(self, request: PlannedRequest, room: asyncio.Semaphore | None) -> None:
        self.in_flight += 1
        try:
            outcome = await self._send(self.body(request))
            self.outcomes.append(outcome)
            self._on_done(outcome)
        finally:
            self.in_flight -= 1
            if room is not None:
                room.release()

    async def _send(self, body: bytes) -> Outcome:
        connection = self._idle.pop() if self._idle else Connection(self._target)
        if not connection.usable:
            connection = Connection(self._target)
            try:
                await connection.open()
            except OSError as error:
                now_s = time.perf_counter()
                reason = f"cannot connect: {error.strerror or error}"
                return Outcome(started_s=now_s, finished_s=now_s, error=reason)
        outcome, _ = await connection.request(
            "POST",
            PATHS[self._settings.endpoint_type],
            body,
            stream=self._settings.stream,
            timeout_s=self._settings.timeout_s,
        )
        if connection.usable:
            self._idle.append(connection)
        return outcome

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON body of one planned request."""
        settings = self._settings
        body: dict[str, Any] = {"model": self._model, "max_tokens": request.output_tokens}
        if settings.prompt_format == "tokens":
            body["prompt"] = self._prompts.token_ids(request.segments)
        elif settings.endpoint_type == "chat":
            text = self._prompts.text(request.segments)
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = self._prompts.text(request.segments)
        if settings.stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.worker_ids:
            body["nvext"] = {"extra_fields": ["worker_id"]}
        return orjson.dumps(body)


async def first_model(target: Target) -> str:
    """The id of the first model the endpoint offers. Raises DynamoError with a remedy."""
    connection = await _connect(target)
    try:
        outcome, text = await connection.request(
            "GET", "/v1/models", b"", stream=False, timeout_s=30
        )
    finally:
        connection.close()
    models = orjson.loads(text).get("data", []) if outcome.status == 200 else []
    if not models:
        raise ConfigError(
            f"no model at {target.host}:{target.port} ({outcome.error or 'empty list'})"
        )
    return str(models[0]["id"])


async def calibrate(runner: Runner, prompts: Prompts) -> float:
    """Tokens per word on this model, from the usage of two short prompts of known word counts."""
    counts = []
    for words in CALIBRATION_WORDS:
        planned = PlannedRequest(None, ((-2, words),), 1)
        outcome = await runner._send(runner.body(planned))
        if outcome.error is not None:
            raise DynamoError(f"the calibration request failed: {outcome.error}")
        counts.append(outcome.prompt_tokens)
    few, many = CALIBRATION_WORDS
    return max(0.1, (counts[1] - counts[0]) / (many - few))


async def _connect(target: Target) -> Connection:
    connection = Connection(target)
    try:
        await connection.open()
    except OSError as error:
        raise CannotConnect(
            f"nothing answers at {target.host}:{target.port} ({error.strerror or error});"
            " start it, or point --url at the endpoint"
        ) from None
    return connection


async def _sleep_until(when_s: float) -> None:
    delay_s = when_s - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
