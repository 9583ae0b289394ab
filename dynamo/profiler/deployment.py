"""One worker of a graph behind a frontend of its own, in its own namespace and state directory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from dynamo.attach.launch import free_port
from dynamo.config import environ
from dynamo.errors import ConfigError, DynamoError
from dynamo.http.client import Target, parse_url
from dynamo.runtime.process.tasks import Tasks
from dynamo.serve.graph.graph import Graph
from dynamo.serve.graph.service import Service
from dynamo.serve.supervision.processes import die_with_parent

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
    """

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
        except BaseException:
            await self._stop()
            raise
        return parse_url(f"http://127.0.0.1:{port}")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it and remove its files."""
        await self._stop()

    async def _start(self, port: int) -> None:
        document = profiled_graph(self._graph, self._service, port)
        words = [sys.executable, "-m", "dynamo", "serve", "--quiet", "--graceful-timeout", "10"]
        if self._gpus is not None:
            words += ["--gpus", str(self._gpus)]
        parent = os.getpid()
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=_directory(self._graph),
            env=_environment(self._state, json.dumps(document, default=str)),
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
