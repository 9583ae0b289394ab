"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: on all workers or none. For operators.

All workers of the base model load the weights first; when each has them, all register the adapter.
What fails before is discarded, what fails after is undone.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from dynamo.errors import (
    DynamoError,
    InvalidRequest,
    ModelNotFound,
    NoInstances,
    Unavailable,
    WorkerUnavailable,
    shorten,
)
from dynamo.frontend.models.listing import AdapterParents
from dynamo.frontend.models.model import ModelEntry
from dynamo.frontend.models.registry import Models
from dynamo.frontend.requests.errors import error_response
from dynamo.http import Exchange
from dynamo.http.access import operator_name
from dynamo.http.routes import Routes, in_task
from dynamo.protocols.control import (
    LORA_ADAPTERS,
    ROOT_KEY,
    AdapterName,
    AdapterPath,
    EndpointRecord,
    EngineCommand,
)
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.process.tasks import Tasks

LOAD_PATH = "/v1/load_lora_adapter"
UNLOAD_PATH = "/v1/unload_lora_adapter"
_LOAD_S = 120.0
_SHORT_S = 15.0
_DISCOVERY_S = 5.0
_POLL_S = 0.02
log = logging.getLogger(__name__)
T = TypeVar("T")


class LoadBody(msgspec.Struct):
    """vLLM's body; ``model`` is the base model where several are served."""

    lora_name: AdapterName
    lora_path: AdapterPath
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    model: str | None = None


class UnloadBody(msgspec.Struct):
    """vLLM's body; its ids are those of one engine, and are ignored."""

    lora_name: AdapterName
    lora_int_id: int | None = None
    model: str | None = None


class AdapterRoutes:
    """Loads and unloads adapters; of one name one operation at a time."""

    def __init__(
        self, runtime: DistributedRuntime, models: Models, tasks: Tasks, overload_status: int
    ) -> None:
        self._runtime = runtime
        self._models = models
        self._tasks = tasks
        self._overload_status = overload_status
        self._changing: set[str] = set()

    def install(self, routes: Routes) -> None:
        """Add the routes to the table."""
        load = partial(self._answer, change=self._load)
        unload = partial(self._answer, change=self._unload)
        routes.post(LOAD_PATH, in_task(self._tasks.spawn, load))
        routes.post(UNLOAD_PATH, in_task(self._tasks.spawn, unload))

    async def _answer(
        self, exchange: Exchange, change: Callable[[bytes], Coroutine[Any, Any, str]]
    ) -> None:
        name = operator_name(exchange, exchange.path)
        # A client that disconnects does not stop an operation half-way.
        work = self._tasks.spawn(_outcome(change(exchange.body)), name=exchange.path)
        outcome = await asyncio.shield(work)
        if isinstance(outcome, DynamoError):
            exchange.respond(*error_response(outcome, self._overload_status))
            return
        log.info("%s: %s", name, outcome)
        exchange.respond(200, outcome.encode(), "text/plain; charset=utf-8")

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Reject a second operation on the adapter. Raises Unavailable."""
        if name in self._changing:
            raise Unavailable(f"The lora adapter '{name}' is being changed: try again")
        self._changing.add(name)
        try:
            yield
        finally:
            self._changing.discard(name)

    async def _load(self, sent: bytes) -> str:
        body = _decoded(LoadBody, sent)
        name = body.lora_name
        if not name or not body.lora_path:
            raise InvalidRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if body.is_3d_lora_weight:
            raise InvalidRequest("'is_3d_lora_weight' must be false: it is not supported here")
        with self._alone(name):
            await self._load_on_all(body)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def _load_on_all(self, body: LoadBody) -> None:
        name, base = body.lora_name, self._base(body.model)
        before = self._check_name(name, base, body.load_inplace)
        operation = uuid.uuid4().hex
        fields = {
            "lora_name": name,
            "lora_path": body.lora_path,
            "load_inplace": body.load_inplace,
            "operation": operation,
        }
        workers = _workers(base)
        error, prepared = await self._call_all(workers, "prepare_lora", fields, _LOAD_S)
        if error is None:
            error, committed = await self._call_all(prepared, "commit_lora", fields, _SHORT_S)
            if error is not None:
                await self._undo(name, before, committed)
        if error is not None:
            await self._call_all(prepared, "discard_lora", fields, _SHORT_S)
            raise error
        await self._until(lambda: _is_at(self._models.named(name), body.lora_path))

    async def _unload(self, sent: bytes) -> str:
        body = _decoded(UnloadBody, sent)
        name = body.lora_name
        if not name:
            raise InvalidRequest("'lora_name' needs to be provided to unload a LoRA adapter.")
        with self._alone(name):
            await self._unload_on_all(body)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _unload_on_all(self, body: UnloadBody) -> None:
        name = body.lora_name
        adapter = self._models.named(name)
        base = None if adapter is None else self._base_of(adapter)
        wanted = None if body.model is None else self._base(body.model)
        if adapter is None or base is None or wanted not in (None, base):
            raise ModelNotFound(f"The lora adapter '{name}' cannot be found.")
        path = _root(adapter)
        workers = _workers(base)
        fields = {"lora_name": name}
        error, unloaded = await self._call_all(
            workers, "unload_lora", fields, _SHORT_S, ModelNotFound
        )
        if error is not None:
            await self._undo(name, path, unloaded)
            raise error
        await self._until(lambda: (entry := self._models.named(name)) is None or not entry.workers)

    async def _undo(self, name: str, path: str | None, workers: Sequence[EndpointRecord]) -> None:
        """Give ``workers`` the adapter that they had before; ``path`` None: none."""
        command, fields = "unload_lora", dict[str, Any](lora_name=name)
        if path is not None:
            command = "load_lora"
            fields |= {"lora_path": path, "load_inplace": True}
        error, _ = await self._call_all(workers, command, fields, _LOAD_S)
        if error is not None:
            log.error("the adapter %s is not as before on all workers: %s", name, error.message)

    def _base(self, name: str | None) -> ModelEntry:
        """Return the base model of a body. Raises ModelNotFound, InvalidRequest, NoInstances."""
        bases = {
            entry.name: entry
            for entry in self._models.entries()
            if entry.card.lora_name is None and not entry.relayed and entry.workers
        }
        if name is not None:
            entry = self._models.named(name)
            if entry is None or entry.name not in bases:
                raise ModelNotFound(
                    f"'model': no model {shorten(name)!r} has workers that load adapters; there "
                    f"are: {', '.join(bases) or 'none'}"
                )
            return entry
        if not bases:
            raise NoInstances("no model has a worker that could load the adapter")
        if len(bases) > 1:
            raise InvalidRequest(
                "'model': several models are served; name the base model of the adapter: "
                f"{', '.join(bases)}"
            )
        return next(iter(bases.values()))

    def _base_of(self, adapter: ModelEntry) -> ModelEntry | None:
        if adapter.card.lora_name is None or not adapter.workers:
            return None
        parent = AdapterParents(self._models.entries(), self._models.on_demand).parent(adapter)
        return None if parent is None else self._models.named(parent)

    def _check_name(self, name: str, base: ModelEntry, replaces: bool) -> str | None:
        """Return the directory of the adapter called ``name`` over ``base``, None: there is none.

        Raises InvalidRequest if the name is not free.
        """
        entry = self._models.named(name)
        on_demand = self._models.on_demand.record(name)
        is_adapter = entry is not None and entry.card.lora_name == name
        if not is_adapter and (entry is not None or on_demand is not None):
            raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")
        if entry is None or not entry.workers:
            return None
        if self._base_of(entry) is not base:
            raise InvalidRequest(
                f"The lora adapter '{name}' conflicts with an adapter of another model."
            )
        if not replaces:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        return _root(entry)

    async def _call_all(
        self,
        workers: Sequence[EndpointRecord],
        route: str,
        fields: dict[str, Any],
        timeout_s: float,
        ignored: type[DynamoError] | tuple[()] = (),
    ) -> tuple[DynamoError | None, list[EndpointRecord]]:
        """Call all workers at once; return the first error and the workers that have done it.

        A worker that has exited is in neither: with its next start it follows the record.
        """
        command = msgspec.to_builtins(EngineCommand(route, fields))
        async with asyncio.TaskGroup() as group:
            calls = [
                group.create_task(self._call(worker, command, timeout_s)) for worker in workers
            ]
        results = [(worker, call.result()) for worker, call in zip(workers, calls, strict=True)]
        done = [worker for worker, result in results if result is None]
        errors = [
            (worker, result)
            for worker, result in results
            if isinstance(result, DynamoError) and not isinstance(result, ignored)
        ]
        for worker, error in errors:
            text = f"worker {worker.instance_id:x}: {error.message}"
            return type(error)(text) if error.status != 500 else Unavailable(text), done
        if not done and not ignored:
            return NoInstances("no worker of the model is left to load the adapter"), done
        return None, done

    async def _call(
        self, worker: EndpointRecord, command: dict[str, Any], timeout_s: float
    ) -> DynamoError | bool | None:
        """Return the error of the worker, None if it has none, False if it has exited."""
        path = f"{worker.namespace}.{worker.component}.{LORA_ADAPTERS}"
        client = await self._runtime.endpoint(path).client()
        try:
            async with asyncio.timeout(timeout_s):
                if worker.instance_id not in client.instance_ids():
                    return Unavailable("it has no adapters: no engine of ours that takes them")
                stream = await client.direct(command, worker.instance_id, annotated=False)
                async for _ in stream:
                    pass
                return None
        except TimeoutError:
            return Unavailable(f"no answer in {timeout_s:g} s")
        except WorkerUnavailable as error:
            gone = await self._until(lambda: worker.instance_id not in client.instance_ids())
            return False if gone else error
        except DynamoError as error:
            return error
        finally:
            client.close()

    async def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait a few seconds until discovery reports it: cards arrive and leave without an event
        here, and an operation of an operator is rare."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _DISCOVERY_S
        while not condition():
            if loop.time() >= end_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True


async def _outcome(change: Coroutine[Any, Any, str]) -> str | DynamoError:
    """Return the text of a change, or its error: a task that raises is logged with a traceback."""
    try:
        return await change
    except DynamoError as error:
        return error


def _workers(base: ModelEntry) -> list[EndpointRecord]:
    """Return the live workers of the model, prefill workers included. Raises NoInstances."""
    workers = []
    if base.loaded is not None:
        # Other models may have workers at the same endpoint.
        cards = (*base.workers.values(), *base.prefill.cards.values())
        ids = {card.instance_id for card in cards}
        live = (*base.loaded.client.records(), *base.loaded.prefill.instances())
        workers = [record for record in live if record.instance_id in ids]
    if not workers:
        raise NoInstances(f"model {base.name} has no worker that is awake; start or wake one first")
    return workers


def _root(adapter: ModelEntry) -> str | None:
    for card in adapter.workers.values():
        root = card.runtime_config.runtime_data.get(ROOT_KEY)
        if isinstance(root, str):
            return root
    return None


def _is_at(entry: ModelEntry | None, path: str) -> bool:
    return entry is not None and entry.served and _root(entry) == path


def _decoded(kind: type[T], sent: bytes) -> T:
    try:
        return msgspec.json.decode(sent, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = f"Failed to deserialize the JSON body: {shorten(str(error))}"
        raise InvalidRequest(text) from None
