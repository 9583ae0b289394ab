"""POST /clear_kv_blocks: drop the prefix cache of every worker's engine. For operators."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from dynamo.errors import DynamoError, InvalidRequest
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.errors import error_response
from dynamo.http import Exchange
from dynamo.http.routes import Routes, in_task
from dynamo.protocols.control import CLEAR_KV_BLOCKS, EndpointRecord
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.tasks import Tasks

_PATH = f"/{CLEAR_KV_BLOCKS}"
_ANSWER_S = 10.0


class CacheRoutes:
    """Calls each worker's endpoint ``clear_kv_blocks``. The answer is that of Dynamo's route."""

    def __init__(
        self, runtime: DistributedRuntime, models: Models, tasks: Tasks, overload_status: int
    ) -> None:
        self._runtime = runtime
        self._models = models
        self._tasks = tasks
        self._overload_status = overload_status

    def install(self, routes: Routes) -> None:
        """Add the route to the table."""
        routes.post(_PATH, in_task(self._tasks.spawn, self._clear), bodiless=True)

    async def _clear(self, exchange: Exchange) -> None:
        if exchange.body.strip() not in (b"", b"{}"):
            text = f"{_PATH} takes no fields: it clears all workers; send no body"
            exchange.respond(*error_response(InvalidRequest(text), self._overload_status))
            return
        # A worker has several endpoints, and perhaps several models: ask it once.
        workers = {
            (record.namespace, record.component, record.instance_id): record
            for record in self._models.instances()
        }
        if not workers:
            exchange.respond(200, b'{"message": "No active worker groups found"}')
            return
        async with asyncio.TaskGroup() as group:
            calls = [(worker, group.create_task(self._call(worker))) for worker in workers.values()]
        cleared: list[dict[str, str]] = []
        failed: list[dict[str, str]] = []
        for worker, call in calls:
            error = call.result()
            row = {
                "name": f"{worker.component}-instance-{worker.instance_id:x}",
                "endpoint": f"{worker.namespace}/{worker.component}/{CLEAR_KV_BLOCKS}",
                "status": error or "Successfully cleared KV cache",
            }
            (failed if error else cleared).append(row)
        answer = {"cleared_workers": cleared, "failed_workers": failed}
        exchange.respond(200, msgspec.json.encode(answer))

    async def _call(self, worker: EndpointRecord) -> str:
        """Return why the worker's cache was not cleared; "" if it was."""
        path = f"{worker.namespace}.{worker.component}.{CLEAR_KV_BLOCKS}"
        client = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                client = await self._runtime.endpoint(path).client()
                if worker.instance_id not in client.instance_ids():
                    return f"the worker has no endpoint {CLEAR_KV_BLOCKS}"
                stream = await client.direct({}, worker.instance_id, annotated=False)
                return _failure([answer async for answer in stream])
        except TimeoutError:
            return f"no answer in {_ANSWER_S:g} s"
        except DynamoError as error:
            return error.message
        finally:
            if client is not None:
                client.close()


def _failure(answers: list[Any]) -> str:
    """Return the error in the answer; Dynamo's workers send it as data."""
    answer = answers[-1] if answers else None
    if isinstance(answer, dict) and answer.get("status") == "error":
        return str(answer.get("message", "error"))
    return ""
