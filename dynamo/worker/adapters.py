"""The LoRA adapters of a worker, which come and go while it serves.

Each has one source: the command line, the record that operators change, or the watched directory.
An adapter is replaced and removed by its source alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.errors import DynamoError, InvalidArgument, ModelNotFound, Unavailable, name_problem
from dynamo.protocols.control import AdapterName, AdapterPath
from dynamo.runtime.process.tasks import Tasks
from dynamo.runtime.process.threads import in_file_thread
from dynamo.worker.adapter_record import AdapterFiles, AdapterRecord, adapter_files, adapters_in

if TYPE_CHECKING:
    from dynamo.worker.engine_control import ControlledEngine

COMMAND_LINE = "--lora-modules"
RECORD = "record"
DIRECTORY = "--lora-dir"
_FOLLOW_S = 1.0
_LEAVE_S = 1.0  # until every frontend has seen that the card is gone
_ENDED_S = 0.1
_PREPARED_S = 150.0  # longer than a frontend waits for the other workers
_MAX_ADAPTERS = 4096
log = logging.getLogger(__name__)


class AdapterCommand(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a route; ``operation`` identifies a load on all workers."""

    lora_name: AdapterName
    lora_path: AdapterPath = ""
    load_inplace: bool = False
    operation: str = ""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter that requests can name."""

    files: AdapterFiles
    source: str
    operation: str = ""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Weights in the engine that wait for those of other workers."""

    files: AdapterFiles
    weights: object
    operation: str
    until_s: float


class Adapters:
    """The adapters over the model ``model_name``; ``turn`` is that of every engine operation.

    ``publish(name, path)`` stores a model card, ``withdraw(name)`` deletes it. ``fixed`` are the
    adapters of the command line, ``directory`` the watched one.
    """

    def __init__(
        self,
        engine: ControlledEngine,
        model_name: str,
        fixed: Mapping[str, str],
        record: AdapterRecord,
        directory: Path | None,
        publish: Callable[[str, str], Awaitable[None]],
        withdraw: Callable[[str], Awaitable[None]],
    ) -> None:
        self.turn = asyncio.Lock()
        self.routes: dict[str, Callable[[Any], Awaitable[dict[str, Any]]]] = {
            "load_lora": self.load,
            "unload_lora": self.unload,
            "list_loras": self.list,
            "prepare_lora": self.prepare,
            "commit_lora": self.commit,
            "discard_lora": self.discard,
        }
        self._engine = engine
        self._model_name = model_name
        self._fixed = fixed
        self._record = record
        self._directory = directory
        self._publish = publish
        self._withdraw = withdraw
        self._tasks = Tasks("adapters")
        self._adapters: dict[str, _Adapter] = {}
        self._weights: dict[str, object] = {}
        self._prepared: dict[str, _Prepared] = {}
        self._failed: dict[str, AdapterFiles] = {}
        self._recorded: dict[str, AdapterFiles] = {}
        self._scanned: dict[str, AdapterFiles] = {}
        self._stamp: tuple[int, ...] | None = None
        self._published = False

    async def start(self) -> None:
        """Load what the sources name, without cards. Raises DynamoError for the command line's."""
        for name, path in self._fixed.items():
            weights = await self._engine.load_lora(name, path, "")
            await self._activate(name, weights, _Adapter(AdapterFiles(path, ""), COMMAND_LINE))
        await self.follow()

    async def publish(self) -> None:
        """Store the cards of all adapters; from now on each gets its own when it is loaded."""
        self._published = True
        for name, adapter in self._adapters.items():
            await self._publish(name, adapter.files.path)

    async def run(self) -> None:
        """Follow the record and the directory until cancelled."""
        problem = ""
        try:
            while True:
                await asyncio.sleep(_FOLLOW_S)
                try:
                    async with self.turn:
                        if not await self._engine.is_sleeping():
                            await self.follow()
                except DynamoError as error:  # discovery on a full disk, or an engine that ends
                    if problem != error.message:
                        log.warning("adapters: %s; trying again", error.message)
                    problem = error.message
                else:
                    problem = ""
        finally:
            await self._tasks.close()

    async def follow(self) -> None:
        """Load and unload what the record and the directory have got and lost. Needs the turn."""
        await self._expire()
        stamp = await in_file_thread(self._record.stamp)
        if stamp != self._stamp or self._failed:
            self._recorded = await in_file_thread(self._read_record)
            await self._reconcile(RECORD, self._recorded)
            self._stamp = stamp
        if self._directory is not None:
            files = await in_file_thread(adapters_in, self._directory)
            before, self._scanned = self._scanned, files
            # A directory that is being written differs in two scans: it stays as it is until then.
            changing = {name for name in files if before and before.get(name) != files[name]}
            wanted = {name: files[name] for name in files.keys() - changing}
            for name in changing & self._adapters.keys():
                wanted[name] = self._adapters[name].files
            await self._reconcile(DIRECTORY, wanted)
        present = self._recorded.keys() | self._scanned.keys()
        self._failed = {name: files for name, files in self._failed.items() if name in present}

    async def load(self, body: Any) -> dict[str, Any]:
        """Load an adapter in this worker; the others of the model follow the record."""
        command = _command(body)
        async with self.turn:
            await self._prepare(command)
            return await self._commit(command)

    async def prepare(self, body: Any) -> dict[str, Any]:
        """Load an adapter into the engine; no request gets it before :meth:`commit`."""
        async with self.turn:
            return await self._prepare(_command(body))

    async def commit(self, body: Any) -> dict[str, Any]:
        """Record and register the adapter that :meth:`prepare` has loaded."""
        async with self.turn:
            return await self._commit(_command(body))

    async def discard(self, body: Any) -> dict[str, Any]:
        """Free what :meth:`prepare` has loaded for the same operation."""
        command = _command(body)
        async with self.turn:
            prepared = self._prepared.get(command.lora_name)
            if prepared is not None and prepared.operation == command.operation:
                del self._prepared[command.lora_name]
                await self._engine.remove_lora(prepared.weights)
        return _done(command, "discarded")

    async def unload(self, body: Any) -> dict[str, Any]:
        """Unregister an adapter; its weights are freed when its running requests have ended."""
        command = _command(body)
        name = command.lora_name
        async with self.turn:
            await self._check_awake()
            adapter = self._adapters.get(name)
            if adapter is None:
                raise ModelNotFound(f"The lora adapter '{name}' cannot be found.")
            _check_source(name, adapter)
            await in_file_thread(self._record.change, name, None)
            try:
                await self._remove(name)
            except DynamoError:
                await in_file_thread(self._record.change, name, adapter.files.path)
                raise
        return _done(command, "removed")

    async def list(self, body: Any) -> dict[str, Any]:
        """Return the adapters with their directories and sources."""
        rows = {
            name: {"path": adapter.files.path, "source": adapter.source}
            for name, adapter in self._adapters.items()
        }
        return {"loras": rows, "count": len(rows)}

    async def _prepare(self, command: AdapterCommand) -> dict[str, Any]:
        name, path = command.lora_name, command.lora_path
        if not name or not path:
            raise InvalidArgument("Both 'lora_name' and 'lora_path' must be provided.")
        await self._check_awake()
        adapter = self._adapters.get(name)
        if adapter is not None:
            _check_source(name, adapter)
            if not command.load_inplace:
                raise InvalidArgument(already_loaded(name))
        await self._expire()
        if name in self._prepared:
            raise InvalidArgument(
                f"The lora adapter '{name}' is being loaded by another request: try again"
            )
        files = await in_file_thread(adapter_files, path)
        weights = await self._load(name, files)
        until_s = time.monotonic() + _PREPARED_S
        self._prepared[name] = _Prepared(files, weights, command.operation, until_s)
        return _done(command, "prepared")

    async def _commit(self, command: AdapterCommand) -> dict[str, Any]:
        name = command.lora_name
        prepared = self._prepared.get(name)
        adapter = self._adapters.get(name)
        if prepared is None or prepared.operation != command.operation:
            # The record of another worker may have been faster.
            if adapter is None or not command.operation or adapter.operation != command.operation:
                raise Unavailable(f"the weights of the adapter {name!r} are gone: load it again")
            return _done(command, "added")
        recorded = None if adapter is None else adapter.files.path
        await in_file_thread(self._record.change, name, prepared.files.path)
        try:
            await self._take(name, prepared)
        except DynamoError:
            await in_file_thread(self._record.change, name, recorded)
            raise
        return _done(command, "added")

    async def _take(self, name: str, prepared: _Prepared) -> None:
        """Let requests name an adapter that was prepared."""
        del self._prepared[name]
        adapter = _Adapter(prepared.files, RECORD, prepared.operation)
        await self._activate(name, prepared.weights, adapter)

    async def _reconcile(self, source: str, wanted: Mapping[str, AdapterFiles]) -> None:
        """Load and unload until the adapters of ``source`` are those ``wanted``.

        What cannot be loaded is tried again when its files change.
        """
        for name, adapter in list(self._adapters.items()):
            if adapter.source == source and name not in wanted:
                await self._remove(name)
        for name, files in wanted.items():
            if self._failed.get(name) == files or self._has(name, files, source):
                continue
            try:
                await self._follow_one(name, files, source)
            except InvalidArgument as error:
                self._failed[name] = files
                log.error("the adapter %s (%s) is not loaded: %s", name, source, error.message)
            else:
                self._failed.pop(name, None)

    def _has(self, name: str, files: AdapterFiles, source: str) -> bool:
        adapter = self._adapters.get(name)
        if adapter is None or adapter.source != source:
            return False
        # An operator says when files of the record have changed.
        return adapter.files.path == files.path and (source == RECORD or adapter.files == files)

    async def _follow_one(self, name: str, files: AdapterFiles, source: str) -> None:
        present = self._adapters.get(name)
        prepared = self._prepared.get(name)
        if source == RECORD and prepared is not None and prepared.files.path == files.path:
            await self._take(name, prepared)
            return
        if present is not None and present.source != source:
            raise InvalidArgument(f"{present.source} has an adapter of this name")
        if not files.version:
            await in_file_thread(adapter_files, files.path)  # raises with the reason
        weights = await self._load(name, files)
        await self._activate(name, weights, _Adapter(files, source))
        log.info("loaded the adapter %s of %s (%s)", name, files.path, source)

    async def _load(self, name: str, files: AdapterFiles) -> object:
        if problem := name_problem(name):
            raise InvalidArgument(f"the name {name!r} {problem}")
        if name == self._model_name:
            raise InvalidArgument(f"The lora adapter '{name}' conflicts with a served base model.")
        if name not in self._adapters and len(self._adapters) >= _MAX_ADAPTERS:
            raise InvalidArgument(f"{_MAX_ADAPTERS} adapters are loaded: unload others first")
        return await self._engine.load_lora(name, files.path, files.version)

    async def _activate(self, name: str, weights: object, adapter: _Adapter) -> None:
        """Let requests name the adapter. If its card cannot be stored, it is removed again."""
        self._use(name, weights)
        self._adapters[name] = adapter
        if not self._published:
            return
        try:
            await self._publish(name, adapter.files.path)
        except BaseException:
            del self._adapters[name]
            self._use(name, None)
            raise

    async def _remove(self, name: str) -> None:
        """Unregister an adapter now, and reject its requests when no frontend sends any."""
        await self._withdraw(name)
        adapter = self._adapters.pop(name)
        weights = self._weights[name]
        self._tasks.spawn(self._leave(name, weights), name=f"adapter {name} leaves")
        log.info("unloaded the adapter %s (%s)", name, adapter.source)

    async def _leave(self, name: str, weights: object) -> None:
        await asyncio.sleep(_LEAVE_S)
        if self._weights.get(name) is weights:  # not loaded again since
            self._use(name, None)

    def _use(self, name: str, weights: object | None) -> None:
        """Exchange the weights of ``name``; free the old ones after their last request."""
        before = self._weights.pop(name, None)
        requests = self._engine.use_lora(name, weights)
        if weights is not None:
            self._weights[name] = weights
        if before is not None:
            self._tasks.spawn(self._free(before, requests), name=f"free the adapter {name}")

    async def _free(self, weights: object, requests: frozenset[str]) -> None:
        while self._engine.any_running(requests):  # noqa: ASYNC110 - the path of a token pays nothing
            await asyncio.sleep(_ENDED_S)
        while True:
            async with self.turn:
                if not await self._engine.is_sleeping():
                    await self._engine.remove_lora(weights)
                    return
            await asyncio.sleep(_FOLLOW_S)

    async def _expire(self) -> None:
        """Free what a frontend has prepared and never committed: it may have died."""
        now = time.monotonic()
        for name, prepared in list(self._prepared.items()):
            if prepared.until_s < now:
                del self._prepared[name]
                await self._engine.remove_lora(prepared.weights)

    async def _check_awake(self) -> None:
        if await self._engine.is_sleeping():
            raise Unavailable(
                "the engine sleeps or is paused: wake it up first; it then loads what was recorded"
            )

    def _read_record(self) -> dict[str, AdapterFiles]:
        """Read the record; a directory without an adapter has no version. Blocks."""
        recorded = {}
        for name, path in self._record.read().items():
            try:
                recorded[name] = adapter_files(path)
            except InvalidArgument:
                recorded[name] = AdapterFiles(path, "")
        return recorded


def already_loaded(name: str) -> str:
    """Return vLLM's text of a load under a name that is in use."""
    return (
        f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )


def _check_source(name: str, adapter: _Adapter) -> None:
    if adapter.source == RECORD:
        return
    remedy = "restart the worker without it" if adapter.source == COMMAND_LINE else "change that"
    raise InvalidArgument(f"The lora adapter '{name}' is one of {adapter.source}: {remedy}")


def _command(body: Any) -> AdapterCommand:
    try:
        return msgspec.convert(body, AdapterCommand)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{error}") from None


def _done(command: AdapterCommand, verb: str) -> dict[str, Any]:
    text = f"Success: LoRA adapter '{command.lora_name}' {verb} successfully."
    return {"status": "success", "message": text}
