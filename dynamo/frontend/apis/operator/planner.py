"""The planner of this deployment over HTTP: its state, and changes of an operator."""

from __future__ import annotations

import logging
from functools import partial

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, InvalidRequest, Unavailable, shorten
from dynamo.frontend.requests.errors import error_response
from dynamo.http import Exchange
from dynamo.http.access import operator_name
from dynamo.http.routes import Routes, in_task
from dynamo.operations.planner_client import call_planner_of, check_change, no_planner
from dynamo.protocols.control import PLANNER_PAUSE, PlannerChange
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.paths import state_path
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread
from dynamo.serve.state.events import BoxEventLog

_PATH = "/v1/planner"
log = logging.getLogger(__name__)
_change = msgspec.json.Decoder(PlannerChange).decode


class PlannerRoutes:
    """GET and POST /v1/planner. For operators.

    The planner checks and applies a change; a frontend holds no state of it.
    """

    def __init__(self, runtime: DistributedRuntime, tasks: Tasks, overload_status: int) -> None:
        self._runtime = runtime
        self._events = BoxEventLog(state_path(runtime.settings) / runtime.settings.namespace)
        self._tasks = tasks
        self._overload_status = overload_status

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        routes.get(_PATH, in_task(self._tasks.spawn, partial(self._answer, change=PlannerChange())))
        routes.post(_PATH, in_task(self._tasks.spawn, self._set))

    async def _set(self, exchange: Exchange) -> None:
        try:
            change = _change(exchange.body)
            check_change(change)
        except InvalidArgument as error:
            self._refuse(exchange, error)
            return
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            text = f"Failed to deserialize the JSON body: {shorten(str(error))}"
            self._refuse(exchange, InvalidRequest(text))
            return
        await self._answer(exchange, change)

    async def _answer(self, exchange: Exchange, change: PlannerChange) -> None:
        try:
            request = msgspec.to_builtins(change)
            state = await call_planner_of(self._runtime, PLANNER_PAUSE, request)
            if state is None:
                error = await in_file_thread(no_planner, self._runtime.settings)
                raise Unavailable(error.message)
        except DynamoError as error:
            self._refuse(exchange, error)
            return
        if change != PlannerChange():
            text = msgspec.json.encode(change).decode()
            log.info("planner changed: %s", text)
            self._events.add("planner", "planner", text, by=operator_name(exchange, "/v1/planner"))
        exchange.respond(200, msgspec.json.encode(state))

    def _refuse(self, exchange: Exchange, error: DynamoError) -> None:
        exchange.respond(*error_response(error, self._overload_status))
