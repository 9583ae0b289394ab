"""--frontend-route-extension: find the functions that make routes, and serve their routes."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import orjson

from dynamo.errors import ConfigError
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.registry import RequestRegistry
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.llm.types import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_daemon_thread

GROUP = "dynamo.frontend.routes"
"""The group of entry points whose names may be given."""
_FLAG = "--frontend-route-extension"
_MAX_RUNNING = 16
"""Requests to extensions at once, each in a thread of its own; more get 503."""
log = logging.getLogger(__name__)


def load_routes(names: Sequence[str]) -> list[FrontendRoute]:
    """Return the routes of the extensions. Raises ConfigError."""
    return [route for name in dict.fromkeys(names) for route in _routes_of(name)]


class ExtensionRoutes:
    """Serves ``extensions`` with the state of the frontend and its models."""

    def __init__(
        self,
        extensions: Sequence[FrontendRoute],
        models: Models,
        requests: RequestRegistry,
        tasks: Tasks,
    ) -> None:
        self._extensions = extensions
        self._models = models
        self._requests = requests
        self._tasks = tasks
        self._free = threading.BoundedSemaphore(_MAX_RUNNING)
        self._off: dict[str, str] = {}

    def install(self, routes: Routes) -> None:
        """Add the routes, after all others. Raises ConfigError for a path that is taken."""
        for extension in self._extensions:
            if routes.serves(extension.path):
                raise ConfigError(f"{_FLAG}: the frontend serves {extension.path} itself")
            handle = partial(self._serve, extension)
            routes.get(extension.path, in_task(self._tasks.spawn, handle))
            log.info("route GET %s is that of an extension", extension.path)

    async def _serve(self, extension: FrontendRoute, exchange: Exchange) -> None:
        if (reason := self._off.get(extension.path)) is not None:
            exchange.refuse(503, f"This extension is switched off until a restart: {reason}")
            return
        # Before a thread is taken: if this fails, none is left counted.
        context = self._context()
        if not self._free.acquire(blocking=False):
            exchange.refuse(503, "Too many requests to extensions are running, please retry")
            return
        exchange.respond(*await in_daemon_thread(self._answer, extension, context))

    def _answer(
        self, extension: FrontendRoute, context: FrontendExtensionContext
    ) -> tuple[int, bytes]:
        """Call the handler. Its thread outlives a client that leaves, and counts until it ends."""
        try:
            result = extension.handler(context)
            if isinstance(result, FrontendResponse):
                return result.status_code, orjson.dumps(result.body)
            return 200, orjson.dumps(result)
        except Exception:
            raise
        except BaseException as error:  # SystemExit, for example: the process serves others, too
            reason = f"it raised {type(error).__name__}"
            self._off[extension.path] = reason
            log.exception(
                "route GET %s is switched off until a restart: %s", extension.path, reason
            )
            raise RuntimeError(reason) from error
        finally:
            self._free.release()

    def _context(self) -> FrontendExtensionContext:
        entries = self._models.entries()
        draining = self._requests.draining
        models = tuple((entry.name, entry.served and not draining) for entry in entries)
        return FrontendExtensionContext(ready=not draining, draining=draining, models=models)


def _routes_of(name: str) -> list[FrontendRoute]:
    where = f"{_FLAG} {name}"
    provider = _provider(name, where)
    try:
        provided: Any = provider()
        if provided is None:
            return []
        routes = [provided] if isinstance(provided, FrontendRoute) else list(provided)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error
    for route in routes:
        if not isinstance(route, FrontendRoute):
            raise ConfigError(f"{where}: gave {route!r}, not a dynamo.llm.FrontendRoute")
    return routes


def _provider(name: str, where: str) -> Callable[[], FrontendRoute | Iterable[FrontendRoute]]:
    from importlib.metadata import entry_points  # takes 25 ms

    registered = {entry.name: entry for entry in entry_points(group=GROUP)}
    try:
        target: Any
        if name in registered:
            target = registered[name].load()
        elif ":" in name:
            module, _, path = name.partition(":")
            target = importlib.import_module(module)
            for part in path.split("."):
                target = getattr(target, part)
        else:
            raise ConfigError(
                f"{where}: no such extension; give MODULE:FUNCTION or an entry point of the group "
                f"{GROUP}: {', '.join(sorted(registered)) or 'there is none'}"
            )
    except ConfigError:
        raise
    # A module may exit while it is imported; the log would not say which one.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: can't be loaded: {type(error).__name__}: {error}") from error
    if not callable(target):
        raise ConfigError(f"{where}: is no function")
    provider: Callable[[], FrontendRoute | Iterable[FrontendRoute]] = target
    return provider
