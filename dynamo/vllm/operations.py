"""The operations on one engine: pause it, replace its weights, profile it.

While it is paused or gets other weights the worker is not registered, so that frontends send their
requests elsewhere.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from dynamo.errors import InvalidArgument, Unavailable
from dynamo.runtime import DistributedRuntime, Endpoint
from dynamo.runtime.process.threads import in_file_thread
from dynamo.vllm.engine import Engine
from dynamo.worker.engine_control import EngineControl, members

_WAIT, _KEEP = "wait", "keep"
log = logging.getLogger(__name__)


class EngineOperations:
    """``POST /engine/pause``, ``resume``, ``is_paused``, ``update_weights``, ``start_profile`` and
    ``stop_profile``, one at a time with the routes of ``control``."""

    def __init__(self, endpoint: Endpoint, engine: Engine, control: EngineControl) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._control = control
        self._updates = False  # update_weights paused the engine, not an operator

    def install(self, runtime: DistributedRuntime) -> None:
        """Answer the routes on the status server (``DYN_SYSTEM_PORT``)."""
        routes = (self.pause, self.resume, self.is_paused, self.update_weights,
                  self.start_profile, self.stop_profile)  # fmt: skip
        for route in routes:
            runtime.register_engine_route(route.__name__, route)

    async def pause(self, body: Any) -> dict[str, Any]:
        """Unregister the worker, then stop the engine between two steps.

        ``mode`` wait (the default) lets the running requests finish, keep holds them until
        :meth:`resume`. ``clear_cache`` (default true) drops the cached blocks.
        """
        fields = members(body, "mode", "clear_cache")
        mode, clears = fields.get("mode", _WAIT), fields.get("clear_cache", True)
        if mode not in (_WAIT, _KEEP):
            raise InvalidArgument(f"'mode' must be {_WAIT} or {_KEEP}, got {mode!r:.40}")
        if not isinstance(clears, bool):
            raise InvalidArgument(f"'clear_cache' must be true or false, got {clears!r:.40}")
        async with self._control.turn:
            await self._check_awake()
            if self._control.paused:
                return {"status": "ok", "message": "the engine is paused already"}
            await self._stop(mode == _KEEP, clears)
        log.info("the engine is paused (%s); the worker gets no requests", mode)
        return {"status": "ok", "message": "the engine is paused"}

    async def resume(self, body: Any) -> dict[str, Any]:
        """Continue after :meth:`pause`, and register the worker."""
        members(body)
        async with self._control.turn:
            await self._check_awake()
            await self._start()
        return {"status": "ok", "message": "the engine runs"}

    async def is_paused(self, body: Any) -> dict[str, Any]:
        """Return ``{"is_paused": bool}``."""
        members(body)
        return {"is_paused": self._control.paused}

    async def update_weights(self, body: Any) -> dict[str, Any]:
        """Let the running requests finish, read other weights of the same shape, go on if the
        engine was not paused before.

        ``weights_path`` is their directory, by default that of the model. Raises InvalidArgument
        for a path without weights. If reading fails the engine stays paused: its weights may be of
        both kinds.
        """
        path = members(body, "weights_path").get("weights_path")
        if path is not None and not await in_file_thread(_has_weights, path):
            raise InvalidArgument(
                f"'weights_path' must be a directory with *.safetensors, *.bin or *.pt, got "
                f"{path!r:.200}"
            )
        async with self._control.turn:
            await self._check_awake()
            if not self._control.paused:
                await self._stop(False, True)
                self._updates = True
            await self._engine.reload_weights(path)
            if self._updates:
                await self._start()
        log.info("the engine has the weights of %s", path or "the model's directory")
        return {"status": "ok", "message": "the weights are updated"}

    async def start_profile(self, body: Any) -> dict[str, Any]:
        """Begin a profile of the engine's processes, as ``--profiler-config`` says."""
        prefix = members(body, "profile_prefix").get("profile_prefix")
        if prefix is not None and not isinstance(prefix, str):
            raise InvalidArgument(f"'profile_prefix' must be a text, got {prefix!r:.40}")
        await self._profile(True, prefix)
        return {"status": "ok", "message": "the profile has begun"}

    async def stop_profile(self, body: Any) -> dict[str, Any]:
        """End the profile; vLLM writes its files."""
        members(body)
        await self._profile(False, None)
        return {"status": "ok", "message": "the profile is written"}

    async def _profile(self, starts: bool, prefix: str | None) -> None:
        if not self._engine.info.can_profile:
            raise InvalidArgument(
                "the worker was started without --profiler-config, such as "
                '\'{"profiler": "torch", "torch_profiler_dir": "/tmp/profile"}\''
            )
        async with self._control.turn:
            await self._engine.profile(starts, prefix)

    async def _check_awake(self) -> None:
        # vLLM counts a paused engine as asleep.
        if not self._control.paused and await self._engine.is_sleeping():
            raise Unavailable("the engine sleeps; wake it up first (/engine/wake_up)")

    async def _stop(self, keeps: bool, clears: bool) -> None:
        try:
            # Requests that are kept do not end before the engine goes on.
            await self._endpoint.unregister_endpoint_instance(asleep=True, waits=not keeps)
            await self._engine.pause(keeps, clears)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                await self._engine.resume()
            await self._endpoint.register_endpoint_instance()
            raise
        self._control.paused = True
        if clears:
            self._control.on_cleared()

    async def _start(self) -> None:
        await self._engine.resume()
        self._control.paused = self._updates = False
        await self._endpoint.register_endpoint_instance()


def _has_weights(path: Any) -> bool:
    if not isinstance(path, str) or not Path(path).is_dir():
        return False
    return any(any(Path(path).glob(f"*{suffix}")) for suffix in (".safetensors", ".bin", ".pt"))
