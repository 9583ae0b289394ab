"""Sends planned requests at their times, with a concurrency limit, over kept connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import orjson

from dynamo.bench.client import LoadConnection, error_message, refusal
from dynamo.bench.stats import Outcome
from dynamo.bench.workload import PlannedRequest, Prompts
from dynamo.config.client import BenchSettings
from dynamo.errors import CannotConnect, ConfigError, DynamoError
from dynamo.http.client import ResponseError, Target, cause, remedy
from dynamo.protocols.openai import ModelList

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CALIBRATION_WORDS = (16, 528)
CONNECT_TIMEOUT_S = 30.0
MODELS_TIMEOUT_S = 30.0


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
        self._idle: list[LoadConnection] = []
        self._slots: asyncio.Semaphore | None = None
        self._answers: dict[int, asyncio.Event] = {}
        self._started_s = self.duration_s = 0.0
        self.outcomes: list[Outcome] = []
        self.in_flight = 0

    async def run(self, planned: Sequence[PlannedRequest], concurrency: int | None) -> None:
        """Send all; set ``duration_s``, from the first request to the last answer or Ctrl-C.

        A scheduled request is measured from its time, even if ``concurrency`` delays it. A turn of
        a session is measured from when its user would send it.
        """
        self._slots = asyncio.Semaphore(concurrency) if concurrency else None
        self._answers = {
            request.after: asyncio.Event() for request in planned if request.after is not None
        }
        self._started_s = started_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, request in enumerate(planned):
                    due_s = None if request.at_s is None else started_s + request.at_s
                    if request.after is not None:
                        if due_s is not None:
                            await _sleep_until(due_s)
                        tasks.create_task(self._turn(number, request, self._answers[request.after]))
                        continue
                    body = self.body(request)  # in advance: a long prompt takes time to build
                    if due_s is not None:
                        await _sleep_until(due_s)
                    if self._slots is not None:
                        await self._slots.acquire()
                    # With a slot: a closed loop would else create all of its tasks at once.
                    tasks.create_task(self._one(number, body, due_s))
        finally:
            for connection in self._idle:
                connection.close()
            self.duration_s = time.perf_counter() - started_s

    async def _turn(self, number: int, request: PlannedRequest, answered: asyncio.Event) -> None:
        """Send a turn after the answer to the one before it, however that ended."""
        await answered.wait()
        due_s = time.perf_counter() + request.delay_s
        if request.at_s is not None:
            due_s = max(due_s, self._started_s + request.at_s)
        body = self.body(request)
        await _sleep_until(due_s)
        if self._slots is not None:
            await self._slots.acquire()
        await self._one(number, body, None if request.at_s is None else due_s)

    async def _one(self, number: int, body: bytes, due_s: float | None) -> None:
        self.in_flight += 1
        try:
            outcome = await self.send(body, due_s)
            self.outcomes.append(outcome)
            self._on_done(outcome)
        finally:
            self.in_flight -= 1
            if self._slots is not None:
                self._slots.release()
            if number in self._answers:
                self._answers[number].set()

    async def send(self, body: bytes, due_s: float | None = None) -> Outcome:
        """Send one request; its clock starts at ``due_s``, else before it connects."""
        begun_s = time.perf_counter()
        started_s = begun_s if due_s is None else due_s
        deadline_s = begun_s + self._settings.timeout_s
        # The latest one used: the server may have closed older idle connections.
        connection = self._idle.pop() if self._idle else LoadConnection(self._target)
        outcome = None
        if not connection.usable:
            connection = LoadConnection(self._target)
            outcome = await self._open(connection, started_s)
        if outcome is None:
            outcome = await connection.measure(
                PATHS[self._settings.endpoint_type],
                body,
                stream=self._settings.stream,
                # The connect has used a part of the timeout.
                timeout_s=deadline_s - time.perf_counter(),
                started_s=started_s,
            )
        if due_s is not None:
            outcome.schedule_lag_s = begun_s - due_s
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return outcome

    async def _open(self, connection: LoadConnection, started_s: float) -> Outcome | None:
        """Connect; return None, or the outcome of a request that cannot be sent."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await connection.open()
        except TimeoutError:
            reason = "timeout"
        except (OSError, UnicodeError) as error:
            reason = f"cannot connect: {cause(error)}"
        else:
            return None
        return Outcome(started_s=started_s, finished_s=time.perf_counter(), error=reason)

    def body(self, request: PlannedRequest) -> bytes:
        """Return the JSON body of one planned request."""
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
    """Return the id of the endpoint's first model. Raises DynamoError with a remedy."""
    connection = await _connect(target)
    reason = "the list is empty"
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            await connection.request(target.head("GET", "/v1/models", 0))
        body = bytes(connection.body)
        if connection.status != 200:
            reason = refusal(connection.status, body)
        elif models := msgspec.json.decode(body, type=ModelList).data:
            return models[0].id
    except TimeoutError:
        reason = "timeout"
    except ResponseError as error:
        reason = str(error)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        reason = f"its answer is not a list of models: {error_message(body)}"
    finally:
        connection.close()
    raise ConfigError(
        f"no model at {target.authority} ({reason}); point --url at an OpenAI endpoint, or name "
        "one with --model"
    )


async def calibrate(runner: Runner, prompts: Prompts) -> float:
    """Return the tokens per word of this model, from the usage of two prompts of known length.

    It is 1 if the endpoint sends no usage.
    """
    counts: list[int] = []
    for words in CALIBRATION_WORDS:
        # -2 is an id that no prompt of the run has.
        planned = PlannedRequest(None, ((-2, words),), 1)
        outcome = await runner.send(runner.body(planned))
        if outcome.error is not None and not outcome.prompt_tokens:
            raise DynamoError(f"the calibration request failed: {outcome.error}")
        if outcome.prompt_tokens is None:
            return 1.0
        counts.append(outcome.prompt_tokens)
    few, many = CALIBRATION_WORDS
    if counts[1] <= counts[0]:
        raise DynamoError(
            f"the usage of prompts of {few} and {many} words is {counts[0]} and {counts[1]} "
            "tokens, so prompts of a given length cannot be made; send token ids instead: "
            "--endpoint-type completions --prompt-format tokens"
        )
    # The difference of two prompts has no tokens of the chat template.
    return max(0.1, (counts[1] - counts[0]) / (many - few))


async def _connect(target: Target) -> LoadConnection:
    connection = LoadConnection(target)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await connection.open()
    except (OSError, UnicodeError) as error:  # TimeoutError is one
        raise CannotConnect(
            f"cannot connect to {target.authority} ({cause(error)}); "
            + remedy(error, "start the endpoint, or point --url at it")
        ) from None
    return connection


async def _sleep_until(when_s: float) -> None:
    delay_s = when_s - time.perf_counter()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
