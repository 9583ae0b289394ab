"""What an operator does to the workers of a running deployment: restart, drain, sleep, wake, load.

Each action is an asynchronous generator. It first checks what it is given and takes the first step,
which may fail with a DynamoError; then it yields a sentence about what happens now. It ends when
the action is complete, or raises. The statefile changes as it does for the planner.
:class:`BoxControl` runs them for callers without an event loop of their own: top, the web page.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import DynamoError, Overloaded, StatefileError, Unavailable
from dynamo.operations.loading import (
    ModelLoad,
    check_turn,
    follow,
    note_load,
    sleepers_and_others,
    wait_until_served,
)
from dynamo.operations.planner_client import ask_planner, no_planner
from dynamo.operations.reconcile import repair_loads
from dynamo.operations.steps.access import LocalAccess, complete_all, open_access
from dynamo.operations.steps.circus import CircusEndpoint, retried
from dynamo.operations.steps.limits import ActionFailed, ActionLimits
from dynamo.operations.steps.removal import finish_removal, mark_draining
from dynamo.operations.steps.sleeping import (
    check_sleepable,
    check_sleepers,
    check_wakeable,
    interrupted,
    is_woken,
    open_engines,
    sleep_worker,
    wake_worker,
)
from dynamo.operations.targets import find_model, find_workers, named_processes, restartable
from dynamo.protocols.control import PlannerChange, PlannerState
from dynamo.runtime.process.paths import state_path
from dynamo.serve.state.document import SLEEP, WAKE
from dynamo.serve.state.entries import ServiceWorker
from dynamo.serve.state.events import BoxEventLog
from dynamo.serve.state.process_table import is_reserved, runs_here
from dynamo.status.deployment import hang_of

Steps = AsyncIterator[str]
_RUNNING = 32
_OUTCOMES = 50
log = logging.getLogger(__name__)


async def recorded(
    runtime: RuntimeSettings, action: str, name: str, by: str, steps: Steps
) -> Steps:
    """Run ``steps``; add to the events of the deployment what begins, and what fails after that."""
    events = BoxEventLog(state_path(runtime) / runtime.namespace)
    text = ""
    try:
        async for sentence in steps:
            if not text:
                events.add(action, name, sentence, by=by)
            text = sentence
            yield sentence
    except DynamoError as error:
        if text:
            events.add("error", name, f"{action}: {error.message}", by=by)
        raise


class BoxActions:
    """The actions on the deployment in the namespace of ``runtime``, on one event loop.

    NAME is a worker (``dynamo_Worker_1``), or a service or a model: then all of its workers.
    """

    def __init__(self, runtime: RuntimeSettings) -> None:
        self._runtime = runtime
        self._active: set[str] = set()

    async def restart(self, name: str) -> Steps:
        """Replace the processes of a watcher or a service, one after another; start failed ones."""
        async with self._open() as access:
            document = access.document()
            processes = named_processes(document, name, await access.statuses(), access.model)
            targets = restartable(processes, self._active)
            names = [target.name for target in targets]
            yield f"restarting {_joined(names)}" + (", one after another" if names[1:] else "")
            circus = CircusEndpoint(document.circus_endpoint)
            try:
                await retried(lambda: circus.roll(names, partial(_is_alive, access)))
            finally:
                circus.close()
            await wait_until_served(access, [target.name for target in targets if target.owner])
        yield f"{_joined(names)}: restarted"

    async def drain(self, name: str) -> Steps:
        """Let workers finish their requests and exit; their GPUs are free then."""
        async with self._open() as access, contextlib.AsyncExitStack() as stack:
            named = await _find(access, name)
            workers = [
                worker
                for worker in named
                # A drain whose command has exited is carried on.
                if not worker.entry.draining or not is_reserved(worker.entry, self._active)
            ]
            if not workers:
                raise ActionFailed(f"{name} is being drained already")
            note = await self._planner_note(access, workers, "start another one")
            self._mark(access, stack, workers)
            names = _names(workers)
            yield f"draining {names}: requests in flight finish, then it exits{note}"
            await complete_all(
                finish_removal(access, e, service.is_prefill) for service, e in workers
            )
        yield f"{names}: drained" + _freed(workers)

    async def sleep(self, name: str) -> Steps:
        """Let workers finish their requests and free the memory of their GPUs."""
        async with self._open() as access, open_engines(self._runtime) as engines:
            await check_sleepers(access, engines)
            named = await _find(access, name)
            # An engine goes on with an interrupted wake, and sleeps after it.
            workers = [
                worker
                for worker in named
                if not worker.entry.asleep or interrupted(worker.entry, access.active) == WAKE
            ]
            if not workers:
                raise ActionFailed(f"{name} sleeps already; wake it with: dynamo wake {name}")
            for _, entry in workers:
                await check_sleepable(engines, entry)
            note = await self._planner_note(access, workers, "wake it")
            yield f"putting {_names(workers)} to sleep when the requests are finished{note}"
            await complete_all(sleep_worker(access, engines, entry) for _, entry in workers)
        yield f"{_names(workers)}: asleep" + _freed(workers)

    async def wake(self, name: str) -> Steps:
        """Restore the memory of workers that sleep; they serve again."""
        async with self._open() as access, open_engines(self._runtime) as engines:
            await check_sleepers(access, engines)
            named = await _find(access, name)
            workers = [
                worker
                for worker in named
                if worker.entry.asleep or interrupted(worker.entry, access.active) == SLEEP
            ]
            if not workers:
                raise ActionFailed(f"{name} is not asleep")
            begun = [worker for worker in workers if is_woken(worker.entry, access.active)]
            others = [worker for worker in workers if worker not in begun]
            for _, entry in others:
                check_wakeable(access.document(), entry.name)
            check_turn(access.document(), [service for service, _ in others], access.active)
            parts = [f"waking {_names(others)}"] if others else []
            parts += [f"{_names(begun)}: being woken already, waiting for it"] if begun else []
            yield "; ".join(parts)
            access.statefile.update(partial(note_load, names=[e.name for _, e in workers]))
            work = [wake_worker(access, engines, service, e) for service, e in others]
            await complete_all(
                [*work, *(follow(access, engines, service, e.name) for service, e in begun)]
            )
        yield f"{_names(workers)}: awake, ready for requests"

    async def load(self, model: str) -> Steps:
        """Wake or start a worker in each service of a model that has none."""
        async with self._open() as access, open_engines(self._runtime) as engines:
            await check_sleepers(access, engines)
            services = find_model(access.document(), model, access.model, access.adapters)
            loads = await ModelLoad(access, engines, services).prepare()
            yield f"loading {model}: " + ", ".join(load.text for load in loads)
            await complete_all(load.work() for load in loads)
        yield f"{model}: loaded, ready for requests"

    async def unload(self, model: str) -> Steps:
        """Free the GPUs of a model: one worker of each service sleeps if it can, others drain."""
        async with self._open() as access, open_engines(self._runtime) as engines:
            await check_sleepers(access, engines)
            document, watchers = access.document(), await access.statuses()
            services = find_model(document, model, access.model, access.adapters)
            await self._check_unload(model)
            sleepers, drained = await sleepers_and_others(engines, services, watchers)
            if not sleepers and not drained:
                raise ActionFailed(f"{model} holds no GPU: it has no worker that is awake")
            async with contextlib.AsyncExitStack() as stack:
                self._mark(access, stack, drained)
                parts = [f"putting {_names(sleepers)} to sleep"] if sleepers else []
                parts += [f"draining {_names(drained)}"] if drained else []
                yield f"unloading {model}: {'; '.join(parts)}"
                work: list[Awaitable[object]] = [
                    finish_removal(access, e, service.is_prefill) for service, e in drained
                ]
                await complete_all(work + [sleep_worker(access, engines, e) for _, e in sleepers])
        yield f"{model}: unloaded" + _freed([*sleepers, *drained])

    async def pause_planner(self) -> Steps:
        """Let the planner observe only, until it is resumed."""
        await self.change_planner(PlannerChange(paused=True))
        yield "the planner is paused: it observes, and changes no workers; changes in flight end"

    async def resume_planner(self) -> Steps:
        """End the pause."""
        await self.change_planner(PlannerChange(paused=False))
        yield "the planner is resumed: its next decisions follow within an interval"

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[LocalAccess]:
        # No budget: the GPUs of the deployment limit what a person loads.
        async with open_access(self._runtime, ActionLimits(), self._active, bound=True) as access:
            await repair_loads(access)
            yield access

    def _mark(
        self,
        access: LocalAccess,
        stack: contextlib.AsyncExitStack,
        workers: Iterable[ServiceWorker],
    ) -> None:
        """Mark workers as draining, all or none; they are active until ``stack`` ends."""
        names = [entry.name for _, entry in workers]
        for name in names:
            stack.enter_context(access.acting_on(name))
        mark_draining(access, names)

    async def change_planner(self, change: PlannerChange) -> PlannerState:
        """Change a running planner, return its state. Raises DynamoError without one."""
        state = await ask_planner(self._runtime, change)
        if state is None:
            raise no_planner(self._runtime)
        return state

    async def _scaling(self) -> PlannerState | None:
        """Return the state of a planner that changes workers now, None without one."""
        try:
            state = await ask_planner(self._runtime)
        except DynamoError:
            return None  # an operator's action does not depend on it
        return state if state is not None and state.acts and not state.paused else None

    async def _planner_note(
        self, access: LocalAccess, workers: Iterable[ServiceWorker], would: str
    ) -> str:
        state = await self._scaling()
        models = {access.model(entry) or service.model for service, entry in workers}
        if state is None or models.isdisjoint(state.models):
            return ""
        return f"; the planner may {would} (to prevent that: dynamo planner pause)"

    async def _check_unload(self, model: str) -> None:
        state = await self._scaling()
        if state is not None and model in state.models and model not in state.on_demand:
            raise ActionFailed(
                f"the planner keeps a worker of {model}: pause it first with: dynamo planner "
                "pause, or let the model go to zero with min: 0 in its ServiceArgs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutcome:
    """What became of an action, at ``at_s`` (Unix time)."""

    at_s: float
    text: str
    failed: bool = False


class BoxControl:
    """Operates the deployment in the namespace of ``runtime``; see :class:`BoxActions`.

    :meth:`begin` returns a sentence about what happens now, or raises DynamoError; the rest goes on
    in a thread of this object, and its end is appended to ``outcomes``. It is thread-safe and
    blocks for some milliseconds, for at most about 30 s while the arbiter is busy: call it in a
    thread, not on an event loop.
    """

    def __init__(self, runtime: RuntimeSettings) -> None:
        self.outcomes: deque[ActionOutcome] = deque(maxlen=_OUTCOMES)
        self.actions = BoxActions(runtime)
        self._running: set[concurrent.futures.Future[None]] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def running(self) -> int:
        """The number of actions that are not complete."""
        return len(self._running)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all actions have ended; return whether they have."""
        with self._lock:
            running = set(self._running)
        return not concurrent.futures.wait(running, timeout_s).not_done

    def close(self) -> None:
        """End the thread; actions that are not complete are left as they are. Idempotent."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            # Not loop.stop(): from another thread it would not wake the loop.
            loop.call_soon_threadsafe(loop.stop)

    def begin(self, action: Callable[[], Steps]) -> str:
        """Run ``action``, one of ``actions``, in the thread; return its first sentence."""
        begun: concurrent.futures.Future[str] = concurrent.futures.Future()
        with self._lock:
            if len(self._running) >= _RUNNING:
                raise Overloaded(f"{_RUNNING} actions run already; wait for the end of one")
            work = asyncio.run_coroutine_threadsafe(self._run(action, begun), self._thread())
            self._running.add(work)
        # Outside the lock: if the work has ended, this calls _ended(), which takes it, at once.
        work.add_done_callback(self._ended)
        return begun.result()

    async def _run(
        self, action: Callable[[], Steps], begun: concurrent.futures.Future[str]
    ) -> None:
        text = ""
        try:
            async for text in action():
                if not begun.done():
                    begun.set_result(text)
        except Exception as error:  # ends one action, not the thread
            if not begun.done():
                begun.set_exception(error)
                return
            if not isinstance(error, DynamoError):
                log.exception("an action failed")
            text = error.message if isinstance(error, DynamoError) else repr(error)
            self.outcomes.append(ActionOutcome(at_s=time.time(), text=text, failed=True))
        else:
            self.outcomes.append(ActionOutcome(at_s=time.time(), text=text))

    def _ended(self, work: concurrent.futures.Future[None]) -> None:
        with self._lock:
            self._running.discard(work)

    def _thread(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the thread, started on first use."""
        if self._loop is None:
            # A daemon: at the exit of the process, what is not complete is left as after a crash,
            # which the arbiter and the planner finish.
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=_run_loop, args=(self._loop,), name="box-control", daemon=True
            ).start()
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _find(access: LocalAccess, name: str) -> list[ServiceWorker]:
    """Return the workers that ``name`` stands for. Raises InvalidArgument."""
    return find_workers(access.document(), name, await access.statuses(), access.model)


def _is_alive(access: LocalAccess) -> bool:
    try:
        document = access.document()
    except StatefileError:
        return False
    if hang := hang_of(document, 0):
        raise Unavailable(hang)
    return runs_here(document.arbiter)


def _names(workers: Iterable[ServiceWorker]) -> str:
    return _joined(entry.name for _, entry in workers)


def _joined(names: Iterable[str]) -> str:
    return ", ".join(names)


def _freed(workers: Iterable[ServiceWorker]) -> str:
    gpus = sorted({gpu for _, entry in workers for gpu in entry.gpus})
    return f"; GPU {_joined(gpus)} is free" if gpus else ""
