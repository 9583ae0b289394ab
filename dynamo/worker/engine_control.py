"""An engine as its worker sees it: asleep, awake, healthy, dead or waiting for ever.

While the engine sleeps, its memory is free for other programs and the worker is not registered, so
no frontend sends it requests. The planner calls the endpoint ``engine_control``, the frontend's
``/clear_kv_blocks`` that of this name.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.errors import ConfigError, DynamoError, EngineFailure, InvalidArgument, Unavailable
from dynamo.health_check import HealthCheckPayload
from dynamo.protocols import codec
from dynamo.protocols.control import (
    CLEAR_KV_BLOCKS,
    ENGINE_CONTROL,
    LORA_ADAPTERS,
    EngineCommand,
)
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread
from dynamo.runtime.requests.stream import ServerStream
from dynamo.worker.adapters import Adapters
from dynamo.worker.tree_guard import Process, cpu_ticks, descendants, process_state

_decode = codec.decoder(EngineCommand).decode
_LEVELS = (1, 2)
_SLEEP_ROUTES = ("sleep", "wake_up", "is_sleeping")
_TAGS = ("weights", "kv_cache")
_LOOK_S = 0.02  # a worker that was stopped reads in this time that its caller has gone
log = logging.getLogger(__name__)
_IDLE_POLLS = 3
_IDLE_TICKS = 2
"""CPU time of a poll, in units of 10 ms, that an idle engine may use: 4 % of a core."""
_POLL_S = 0.5
_STALLED_POLLS = 4  # the silence of a worker is waited for as long
_STOPPED = ("T", "t")  # by a signal, by a tracer; proc(5)


class TokensCheck(HealthCheckPayload):
    """A prompt of one token, shorter than any KV block, answered by one token."""

    def __init__(self, model: str) -> None:
        self.default_payload = {
            "model": model,
            "token_ids": [1],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
        }
        super().__init__()


def health_check_payload(model: str) -> dict[str, Any]:
    """Return the payload, or that of ``DYN_HEALTH_CHECK_PAYLOAD``. ConfigError: bad token ids."""
    payload = TokensCheck(model).to_dict()
    try:
        return {"model": model, **payload, "token_ids": codec.tokens(payload["token_ids"])}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            "DYN_HEALTH_CHECK_PAYLOAD needs token_ids, a list of token ids: "
            f"{type(error).__name__}: {error}"
        ) from None


class ControlledEngine(Protocol):
    """An engine that can free its memory, drop its prefix cache, and load adapters."""

    async def sleep(self, level: int = 1) -> None:
        """Let the running requests finish, then free memory."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what :meth:`sleep` freed; ``tags`` are weights and kv_cache, default both."""

    async def reload_weights(self) -> None:
        """Read the weights from the model's files again, in place."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False, and nothing is dropped, while requests use some."""

    async def load_lora(self, name: str, path: str, version: str) -> object:
        """Load the adapter in ``path``; return its weights, which no request gets yet.

        Blocks of ``name`` are kept apart by ``version``. Raises InvalidArgument: it cannot be
        loaded.
        """

    def use_lora(self, name: str, weights: object | None) -> frozenset[str]:
        """Compute later requests for ``name`` with ``weights``, None: reject them.

        Return the running requests that have those before.
        """

    def any_running(self, requests: frozenset[str]) -> bool:
        """Return whether one of the requests runs still."""

    async def remove_lora(self, weights: object) -> None:
        """Free the weights, which no request uses."""


class EngineControl:
    """``POST /engine/sleep``, ``wake_up``, ``is_sleeping`` and ``clear_kv_blocks``, one at a time.

    ``on_cleared`` is called when the engine has dropped its cache. Engines publish that only with
    their next step, so until then the worker's blocks would attract requests. Other
    operations on the engine take its ``turn``, and set ``paused`` while it does not compute.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        engine: ControlledEngine,
        on_cleared: Callable[[], None],
        adapters: Adapters | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._adapters = adapters
        self.on_cleared = on_cleared
        self.turn = asyncio.Lock() if adapters is None else adapters.turn
        self.paused = False  # by an operator; vLLM counts it as asleep
        self._discarded = False  # the weights: waking does not bring them back
        self._routes = {
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": self.is_sleeping,
            CLEAR_KV_BLOCKS: self.clear_kv_blocks,
            **({} if adapters is None else adapters.routes),
        }

    def install(self, runtime: DistributedRuntime, can_sleep: bool = True) -> None:
        """Answer the routes on the status server (``DYN_SYSTEM_PORT``)."""
        for name, route in self._routes.items():
            if can_sleep or name not in _SLEEP_ROUTES:
                runtime.register_engine_route(name, route)

    async def connect(self, can_sleep: bool) -> None:
        """Serve the endpoints of the worker's component; ``engine_control`` if it can sleep."""
        namespace, component, _ = self._endpoint.path
        serving = await self._endpoint.runtime.start_serving()
        await serving.add((namespace, component, CLEAR_KV_BLOCKS), self._handle_clear, True)
        if can_sleep:
            await serving.add((namespace, component, ENGINE_CONTROL), self._handle, True)
        if self._adapters is not None:
            await serving.add((namespace, component, LORA_ADAPTERS), self._handle, True)

    def _handle_clear(self, stream: ServerStream, _: bytes) -> None:
        self._handle(stream, codec.encode(EngineCommand(CLEAR_KV_BLOCKS)))

    def _handle(self, stream: ServerStream, payload: bytes) -> None:
        tasks = self._endpoint.runtime.tasks
        tasks.spawn(self._answer(stream, payload), name=ENGINE_CONTROL)

    async def _answer(self, stream: ServerStream, payload: bytes) -> None:
        try:
            command = _decode(payload)
            route = self._routes.get(command.route)
            if route is None:
                raise InvalidArgument(f"no engine route {command.route!r:.40}")
            await asyncio.sleep(_LOOK_S)
            if stream.closed:
                log.warning("%s: not done, its caller has given up", command.route)
                return
            answer = await route(command.body)
        except msgspec.MsgspecError as error:
            stream.error(InvalidArgument(f"not an engine command: {error}"))
        except DynamoError as error:
            stream.error(error)
        except Exception as error:  # the caller gets the error of the engine
            log.exception("an engine command failed")
            stream.error(EngineFailure(f"{type(error).__name__}: {error}"))
        else:
            stream.send(codec.encode(answer))
            stream.end()

    async def sleep(self, body: Any) -> dict[str, Any]:
        """Unregister the worker, finish its requests, then free memory.

        ``level`` 1 (the default) keeps the weights in CPU memory, 2 discards them
        until the engine wakes and reads the model's files again. Raises
        InvalidArgument for another level. A failure of the engine registers the worker again.
        """
        level = members(body, "level").get("level", 1)
        if level not in _LEVELS:
            raise InvalidArgument(f"'level' must be 1 or 2, got {level!r:.40}")
        async with self.turn:
            self._check_runs()
            if await self._engine.is_sleeping():
                return {"status": "ok", "message": "the engine sleeps already"}
            try:
                # Frontends that have not noticed it yet send their requests to other workers. What
                # waits for its turn would come to an engine that sleeps, and wait until it wakes.
                await self._endpoint.unregister_endpoint_instance(asleep=True)
                await self._engine.sleep(level)
                self._discarded = level == 2
            except BaseException:
                await self._endpoint.register_endpoint_instance()
                raise
            self.on_cleared()
        log.info("the engine sleeps (level %d); the worker gets no requests", level)
        return {"status": "ok", "message": f"the engine sleeps at level {level}"}

    async def wake_up(self, body: Any) -> dict[str, Any]:
        """Restore memory, then register the worker. ``tags`` (weights, kv_cache) restore a part:
        the worker is registered when nothing sleeps any more."""
        tags = members(body, "tags").get("tags")
        if tags is not None and not (isinstance(tags, list) and set(map(str, tags)) <= {*_TAGS}):
            raise InvalidArgument(f"'tags' must be a list of {', '.join(_TAGS)}, got {tags!r:.80}")
        async with self.turn:
            self._check_runs()
            await self._engine.wake_up(tags)
            if self._discarded and (tags is None or "weights" in tags):
                await self._engine.reload_weights()
                self._discarded = False
            if await self._engine.is_sleeping():
                return {"status": "ok", "message": "a part of the engine sleeps still"}
            self.on_cleared()  # of events that the engine sent before its sleep
            if self._adapters is not None:
                await self._adapters.follow()
            await self._endpoint.register_endpoint_instance()
        log.info("the engine is awake; the worker gets requests")
        return {"status": "ok", "message": "the engine is awake"}

    async def is_sleeping(self, body: Any) -> dict[str, Any]:
        """Return ``{"is_sleeping": bool}``."""
        return {"is_sleeping": not self.paused and await self._engine.is_sleeping()}

    def _check_runs(self) -> None:
        if self.paused:
            raise Unavailable("the engine is paused; resume it first (/engine/resume)")

    async def clear_kv_blocks(self, body: Any) -> dict[str, Any]:
        """Drop the engine's prefix cache. Unavailable while requests use its blocks."""
        async with self.turn:
            if not await self._engine.reset_prefix_cache():
                raise Unavailable(
                    "the prefix cache is kept: requests use its blocks; try again when the engine "
                    "is idle"
                )
            self.on_cleared()
        log.info("the prefix cache of the engine is cleared")
        return {"status": "success", "message": "KV cache cleared"}


def members(body: Any, *names: str) -> dict[str, Any]:
    """The members of ``body``; {} without one. Raises InvalidArgument for unknown members."""
    fields = {} if body is None else body
    if not isinstance(fields, dict) or not fields.keys() <= set(names):
        allowed = " and ".join(map(repr, names))
        raise InvalidArgument(
            f"the body must be a JSON object with {allowed} alone, or empty"
            if names
            else "the body must be empty"
        )
    return fields


class ProcessWatch:
    """Watches the processes that this one had started when :meth:`run` began.

    ``report`` receives the problem, or "" when all run again, and whether that has lasted so long
    that requests should move. A profiler that stops a process for less than half a second is not
    reported. ``stall`` finds an engine that waits for ever.

    The worker's own process still answers pings, so clients cannot notice a stopped engine. A
    process that is stopped makes no progress, so this is never mistaken for a long step.
    """

    def __init__(
        self,
        report: Callable[[str, bool], Awaitable[None]],
        stall: StallWatch | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        self._report = report
        self._stall = stall
        self._poll_s = poll_s
        self._processes: list[Process] = []
        self._reported = (False, False)

    async def run(self) -> None:
        """Watch until cancelled."""
        self._processes = await in_file_thread(descendants, os.getpid())
        before: set[Process] = set()
        polls = 0
        try:
            while True:
                await asyncio.sleep(self._poll_s)
                stopped = {
                    process for process in self._processes if process_state(process) in _STOPPED
                }
                still, before = stopped & before, stopped
                polls = polls + 1 if still else 0
                if still:
                    await self._change(_stopped(still), polls >= _STALLED_POLLS)
                elif not stopped:
                    problem = "" if self._stall is None else await self._stall.check()
                    await self._change(problem, bool(problem))
        finally:
            if self._stall is not None:
                await self._stall.close()

    async def _change(self, problem: str, stalled: bool) -> None:
        if self._reported == (bool(problem), stalled):
            return
        try:
            await self._report(problem, stalled)
        except DynamoError as error:  # it is reported with the next poll
            log.warning("the state of the engine's processes cannot be reported: %s", error)
            return
        if not problem:
            log.info("the engine runs again")
        elif stalled:
            log.error("%s: its requests move to other workers", problem)
        else:
            log.error("%s: no requests until it continues", problem)
        self._reported = bool(problem), stalled


def _stopped(processes: set[Process]) -> str:
    pids = ", ".join(str(pid) for pid, _ in sorted(processes))
    return f"the engine's process {pids} is stopped"


class StallWatch:
    """Decides at each :meth:`check` whether an engine has stopped computing.

    ``progress`` returns the number of requests in the engine, and that of its messages so far.
    ``ask`` asks it a question that it answers between two steps.

    It has stopped if it holds requests, sends nothing, does not answer a question, and its
    processes use no CPU time in three polls. It has resumed with its next message or answer.

    A long step looks the same from outside: no output for seconds. Two things tell them apart. An
    engine answers a question between two steps, and during a step its processes use the CPU, also
    while they wait for a GPU, which they do by polling. An engine that does neither has stopped.
    """

    def __init__(
        self, progress: Callable[[], tuple[int, int]], ask: Callable[[], Awaitable[object]]
    ) -> None:
        self.problem = ""
        self._progress = progress
        self._ask_engine = ask
        self._tasks = Tasks("stall watch")
        self._question: asyncio.Task[None] | None = None
        self._answers = 0
        self._seen = (0, 0)
        self._ticks = 0
        self._idle_polls = 0

    async def check(self) -> str:
        """Return why the engine counts as stopped, or "". Call it about twice a second."""
        requests, messages = self._progress()
        seen, self._seen = self._seen, (messages, self._answers)
        if self._seen != seen or not (requests or self.problem):
            self.problem = ""
            self._idle_polls = -1  # the next poll measures from here
            return ""
        if self._question is None:
            self._question = self._tasks.spawn(self._ask(), name="question")
        ticks, runnable = await in_file_thread(cpu_ticks, os.getpid())
        # Below 0 a process has ended, and its time is missing in the sum.
        idle = 0 <= ticks - self._ticks <= _IDLE_TICKS and not runnable
        self._ticks = ticks
        if not self.problem:
            self._idle_polls = self._idle_polls + 1 if idle or self._idle_polls < 0 else 0
            if self._idle_polls >= _IDLE_POLLS:
                self.problem = f"the engine has stopped computing; requests in it: {requests}"
        return self.problem

    async def close(self) -> None:
        """Forget the open question."""
        await self._tasks.close()

    async def _ask(self) -> None:
        try:
            await self._ask_engine()
            self._answers += 1
        finally:
            self._question = None
