"""The models on disk, for the web page: list, find, download and delete them; serve one or not.

What takes long is a process of its own that runs the verb: ``dynamo pull``, ``run``, ``remove``. It
ends with the frontend, needs no memory here, and can be cancelled at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    Overloaded,
    as_path,
    shorten,
)
from dynamo.llm.model_source import NamedModel, named_model
from dynamo.operations.operate import ActionOutcome
from dynamo.operations.pull import HubHit, find_on_hub
from dynamo.operations.stored_models import deletable, delete, stored_models
from dynamo.runtime.process.paths import expanded
from dynamo.runtime.process.tasks import Tasks
from dynamo.status.deployment import running_deployment, running_documents

_T = TypeVar("_T")
_THREADS = 2
_DEADLINE_S = 20.0
_VERBS = 4
_LINES = 20
_OUTCOMES = 50
_STOP_S = 5.0
_RATE_S = 5.0
"""Seconds over which the rate of a download is measured."""
log = logging.getLogger(__name__)


class Download(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The last download. ``state`` is running, done, failed or cancelled."""

    name: str
    state: str
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    message: str = ""


class DiskModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model on disk, as ``dynamo list`` shows it."""

    name: str
    store: str
    size_bytes: int
    used_at_s: float
    formats: tuple[str, ...] = ()
    is_complete: bool = True
    served_by: tuple[str, ...] = ()


class DiskList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``GET /ui/models``; ``free_bytes`` are those of the disk of the Hub's cache."""

    models: tuple[DiskModel, ...]
    free_bytes: int


class _Progress(msgspec.Struct, omit_defaults=True):
    """A line of ``dynamo pull --json``."""

    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""


_progress = msgspec.json.Decoder(_Progress).decode


class ModelStore:
    """The models on the disks of this machine, for the deployment of ``settings``.

    ``on_change`` is called when the download, or a verb, begins or ends. ``outcomes`` has how they
    ended. Its methods run on the event loop, and what blocks runs in at most two threads.
    """

    def __init__(
        self, settings: RuntimeSettings, tasks: Tasks, on_change: Callable[[], object]
    ) -> None:
        self.download: Download | None = None
        self.outcomes: deque[ActionOutcome] = deque(maxlen=_OUTCOMES)
        self._settings = settings
        self._tasks = tasks
        self._on_change = on_change
        self._pulling: asyncio.Task[None] | None = None
        self._verbs: dict[str, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(_THREADS, "model-store")
        self._working: set[asyncio.Future[Any]] = set()
        self.actions = {
            "pull": self.pull,
            "cancel_pull": self.cancel,
            "delete_model": self.delete,
            "add_model": self.add,
            "remove_model": self.remove,
        }

    async def stored(self) -> DiskList:
        """Return what is on disk. Raises DynamoError."""
        return await self._in_thread("listing the models", self._list)

    async def find(self, text: str) -> list[HubHit]:
        """Return models on the Hub. Raises DynamoError that says why it cannot be asked."""
        return await self._in_thread("the search", lambda: find_on_hub(text))

    async def pull(self, name: str) -> str:
        """Begin to download a model. Raises DynamoError."""
        if self._pulling is not None and not self._pulling.done():
            assert self.download is not None
            raise ConfigError(f"{self.download.name} is being downloaded; wait, or cancel it")
        kind = _checked(name).kind
        if kind in ("directory", "gguf") and expanded(name).exists():
            raise InvalidArgument(f"{name} is on this machine already")
        self.download = Download(name=name, state="running")
        self._pulling = self._tasks.spawn(self._pull(self.download), name=f"pull {name}")
        return f"downloading {name}"

    async def cancel(self, name: str) -> str:
        """End the download of ``name``; files that are complete are kept."""
        running = self._pulling is not None and not self._pulling.done()
        if self.download is None or self.download.name != name or not running:
            raise InvalidArgument(f"{shorten(name, 128)} is not being downloaded")
        assert self._pulling is not None
        if not self._pulling.cancelling():  # a second one would leave its process alone
            self._pulling.cancel()
        await asyncio.wait([self._pulling])
        return f"the download of {name} was cancelled; files that are complete are kept"

    async def delete(self, name: str) -> str:
        """Delete a model from disk. Raises DynamoError if it is used."""
        return await self._in_thread("the deletion", lambda: self._delete(name))

    async def add(self, name: str) -> str:
        """Begin to serve a model beside the others: ``dynamo run NAME``. Raises DynamoError."""
        _checked(name)
        await self._check_running(f"dynamo run {as_path(name)}")
        self._begin("run", name)
        return f"adding {name}: it is listed when its worker starts"

    async def remove(self, name: str) -> str:
        """Begin to take a model out of the deployment: ``dynamo remove NAME``."""
        await self._check_running("dynamo ps")
        self._begin("remove", name)
        return f"removing {name}: requests in flight finish"

    # -- what blocks

    def _list(self) -> DiskList:
        from huggingface_hub import constants  # takes 0.2 s

        models = stored_models(running_documents(self._settings))
        cache = Path(constants.HF_HUB_CACHE)
        existing = next(path for path in (cache, *cache.parents) if path.exists())
        return DiskList(
            models=tuple(
                msgspec.convert(model, DiskModel, from_attributes=True) for model in models
            ),
            free_bytes=shutil.disk_usage(existing).free,
        )

    def _delete(self, name: str) -> str:
        download = self.download
        if download is not None and download.state == "running" and download.name == name:
            raise ConfigError(f"{name} is being downloaded; cancel that first")
        model = deletable(name, running_documents(self._settings))
        delete(model)
        log.info("deleted %s (%s), by the web page", model.name, model.path)
        return f"deleted {model.name}; {model.size_bytes / 1e9:.1f} GB are free"

    async def _in_thread(self, what: str, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns. A thread that is late is left alone, and counts."""
        if len(self._working) >= _THREADS:
            raise Overloaded("earlier searches of models have not ended; try again in a moment")
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # A thread cannot be cancelled: it counts until it ends, also for a client that has gone.
        self._working.add(future)
        future.add_done_callback(self._forget)
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await asyncio.shield(future)
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took more than {_DEADLINE_S:g} s") from None
        except OSError as error:
            raise ConfigError(f"{what} failed: {error}") from error

    def _forget(self, future: asyncio.Future[Any]) -> None:
        self._working.discard(future)
        if not future.cancelled():
            future.exception()  # of one that was late, or whose client has gone

    async def _check_running(self, instead: str) -> None:
        document = await self._in_thread(
            "reading the deployment", lambda: running_deployment(self._settings)
        )
        if document is None:
            raise ConfigError(
                f"no deployment runs in namespace {self._settings.namespace!r}, and this frontend "
                f"was started alone; in a terminal: {instead}"
            )

    # -- verbs as processes

    async def _pull(self, download: Download) -> None:
        seen: deque[tuple[float, int]] = deque(maxlen=round(_RATE_S) + 1)

        def on_line(line: bytes) -> None:
            try:
                progress = _progress(line)
            except msgspec.MsgspecError:
                return  # a line of the log
            download.message = progress.message
            if progress.total_bytes:
                download.done_bytes = progress.done_bytes
                download.total_bytes = progress.total_bytes
                seen.append((time.monotonic(), progress.done_bytes))
                took_s = seen[-1][0] - seen[0][0]
                fetched = seen[-1][1] - seen[0][1]
                download.bytes_per_s = max(0.0, fetched / took_s) if took_s else 0.0

        self._on_change()
        try:
            status, last = await _run(["pull", "--json", download.name], on_line)
        except asyncio.CancelledError:
            download.state = "cancelled"
            raise
        except OSError as error:
            status, last = 1, str(error)
        finally:
            download.bytes_per_s = 0.0
            self._on_change()
        download.state = "failed" if status else "done"
        download.message = last.removeprefix("dynamo pull: ") if status else download.message
        self._ended(download.message, failed=bool(status))

    def _begin(self, verb: str, name: str) -> None:
        if name in self._verbs:
            raise ConfigError(f"{name} is being added or removed already")
        if len(self._verbs) >= _VERBS:
            raise Overloaded(f"{_VERBS} models are being added or removed; wait for the end of one")
        log.info("dynamo %s %s, by the web page", verb, shorten(name, 128))
        self._verbs[name] = self._tasks.spawn(self._verb(verb, name), name=f"{verb} {name}")

    async def _verb(self, verb: str, name: str) -> None:
        try:
            # A name that is removed may begin with a dash; `run` gives what follows to the engine.
            cut = () if verb == "run" else ("--",)
            words = [verb, "--namespace", self._settings.namespace, *cut, name]
            status, last = await _run(words, lambda line: None)
        except OSError as error:
            status, last = 1, str(error)
        finally:
            del self._verbs[name]
        done = f"{name}: {'served' if verb == 'run' else 'removed'}"
        self._ended(last.removeprefix(f"dynamo {verb}: ") if status else done, failed=bool(status))

    def _ended(self, text: str, failed: bool) -> None:
        self.outcomes.append(ActionOutcome(at_s=time.time(), text=text, failed=failed))
        self._on_change()


def _checked(name: str) -> NamedModel:
    """Return the model that ``name`` means. Raises ConfigError."""
    if not name or name.startswith("-"):
        raise InvalidArgument("give a model: an id on Hugging Face, such as Qwen/Qwen3-0.6B")
    return named_model(name)


async def _run(words: Sequence[str], on_line: Callable[[bytes], object]) -> tuple[int, str]:
    """Run ``dynamo`` with ``words``; return its status and its last line of errors.

    It is ended when this task is cancelled.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynamo", *words,
        stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    last: deque[str] = deque(maxlen=_LINES)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_read(process.stdout, on_line))
            group.create_task(_read(process.stderr, lambda line: last.append(_text(line))))
        status = await process.wait()
    except BaseException:
        await _end(process)
        raise
    # The verb's own message, if it has one: libraries may print more behind it.
    texts = [line for line in last if line]
    lines = [line for line in texts if line.startswith("dynamo ")] or texts
    return status, lines[-1] if lines else f"it exited with status {status}"


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:  # also if the frontend stops now
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _read(stream: asyncio.StreamReader, on_line: Callable[[bytes], object]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the buffer: left out
            continue
        if not line:
            return
        on_line(line)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").strip()
