"""Control of an engine from outside: sleep, wake-up, and its health check.

While the engine sleeps, its memory is free for other programs and the worker is not registered, so
no frontend sends it requests. The planner calls the endpoint ``engine_control``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dynamo.errors import ConfigError, DynamoError, EngineFailure, InvalidArgument
from dynamo.health_check import HealthCheckPayload
from dynamo.protocols import codec
from dynamo.protocols.control import ENGINE_CONTROL, EngineCommand
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.requests.stream import ServerStream

_decode = codec.decoder(EngineCommand).decode
_LEVELS = (1, 2)
_TAGS = ("weights", "kv_cache")
_LOOK_S = 0.02  # a worker that was stopped reads in this time that its caller has gone
log = logging.getLogger(__name__)


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


class SleepingEngine(Protocol):
    """An engine that can free its memory."""

    async def sleep(self, level: int = 1) -> None:
        """Let the running requests finish, then free memory."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what :meth:`sleep` freed; ``tags`` are weights and kv_cache, default both."""

    async def reload_weights(self) -> None:
        """Read the weights from the model's files again, in place."""

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""


class EngineControl:
    """``POST /engine/sleep``, ``/engine/wake_up`` and ``/engine/is_sleeping``, one at a time."""

    def __init__(self, endpoint: Endpoint, engine: SleepingEngine) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._turn = asyncio.Lock()
        self._discarded = False  # the weights: waking does not bring them back

    def install(self, runtime: DistributedRuntime) -> None:
        """Answer the routes on the status server (``DYN_SYSTEM_PORT``)."""
        runtime.register_engine_route("sleep", self.sleep)
        runtime.register_engine_route("wake_up", self.wake_up)
        runtime.register_engine_route("is_sleeping", self.is_sleeping)

    async def connect(self) -> None:
        """Serve the endpoint ``engine_control`` of the worker's component."""
        namespace, component, _ = self._endpoint.path
        serving = await self._endpoint.runtime.start_serving()
        await serving.add((namespace, component, ENGINE_CONTROL), self._handle, True)

    def _handle(self, stream: ServerStream, payload: bytes) -> None:
        tasks = self._endpoint.runtime.tasks
        tasks.spawn(self._answer(stream, payload), name=ENGINE_CONTROL)

    async def _answer(self, stream: ServerStream, payload: bytes) -> None:
        routes = {
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": self.is_sleeping,
        }
        try:
            command = _decode(payload)
            if command.route not in routes:
                raise InvalidArgument(f"no engine route {command.route!r:.40}")
            await asyncio.sleep(_LOOK_S)
            if stream.closed:
                log.warning("%s: not done, its caller has given up", command.route)
                return
            answer = await routes[command.route](command.body)
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
        level = _fields(body, "level").get("level", 1)
        if level not in _LEVELS:
            raise InvalidArgument(f"'level' must be 1 or 2, got {level!r:.40}")
        async with self._turn:
            if await self._engine.is_sleeping():
                return {"status": "ok", "message": "the engine sleeps already"}
            await self._endpoint.unregister_endpoint_instance()
            try:
                await self._engine.sleep(level)
                self._discarded = level == 2
            except BaseException:
                await self._endpoint.register_endpoint_instance()
                raise
        log.info("the engine sleeps (level %d); the worker gets no requests", level)
        return {"status": "ok", "message": f"the engine sleeps at level {level}"}

    async def wake_up(self, body: Any) -> dict[str, Any]:
        """Restore memory, then register the worker. ``tags`` (weights, kv_cache) restore a part:
        the worker is registered when nothing sleeps any more."""
        tags = _fields(body, "tags").get("tags")
        if tags is not None and not (isinstance(tags, list) and set(map(str, tags)) <= {*_TAGS}):
            raise InvalidArgument(f"'tags' must be a list of {', '.join(_TAGS)}, got {tags!r:.80}")
        async with self._turn:
            await self._engine.wake_up(tags)
            if self._discarded and (tags is None or "weights" in tags):
                await self._engine.reload_weights()
                self._discarded = False
            if await self._engine.is_sleeping():
                return {"status": "ok", "message": "a part of the engine sleeps still"}
            await self._endpoint.register_endpoint_instance()
        log.info("the engine is awake; the worker gets requests")
        return {"status": "ok", "message": "the engine is awake"}

    async def is_sleeping(self, body: Any) -> dict[str, Any]:
        """Return ``{"is_sleeping": bool}``."""
        return {"is_sleeping": await self._engine.is_sleeping()}


def _fields(body: Any, name: str) -> dict[str, Any]:
    """The members of ``body``; {} without one. Raises InvalidArgument for unknown members."""
    fields = {} if body is None else body
    if not isinstance(fields, dict) or not fields.keys() <= {name}:
        raise InvalidArgument(f"the body must be a JSON object with {name!r} alone, or empty")
    return fields
