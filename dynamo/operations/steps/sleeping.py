"""Workers that sleep: they keep their process, and hold neither GPU memory nor a GPU of the budget.

Their entry has the state ``asleep``. A sleeping worker is bound to its GPUs: it can be woken while
nothing else holds them, and is removed if a new worker needs their memory.

Calls the engines of workers that can sleep, through their endpoint ``engine_control``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection
from functools import partial
from typing import Any

from dynamo.config.runtime import RuntimeSettings
from dynamo.errors import Disconnected, DynamoError, StatefileError, WorkerUnavailable
from dynamo.operations.steps.access import LocalAccess
from dynamo.operations.steps.limits import ActionFailed, check_unreserved, reserve
from dynamo.operations.steps.removal import remove_entry
from dynamo.protocols.control import (
    ENGINE_CONTROL,
    INSTANCES,
    EndpointRecord,
    EngineCommand,
    record_decoder,
)
from dynamo.runtime import DistributedRuntime
from dynamo.serve.state.document import ASLEEP, RUNNING, SLEEP, WAKE, Document, Entry
from dynamo.serve.state.entries import ServiceEntries, read_services
from dynamo.serve.state.process_table import is_reserved, ledger_of, reservation

log = logging.getLogger(__name__)
_ANSWER_S = 10.0
_SLEEP_LEVEL = 1  # the weights stay in CPU memory
_decode = record_decoder(EndpointRecord)


@contextlib.asynccontextmanager
async def open_engines(settings: RuntimeSettings) -> AsyncIterator[RemoteEngines]:
    """Open the engines in the namespace of ``settings`` for the block."""
    runtime = DistributedRuntime(asyncio.get_running_loop(), settings)
    try:
        await runtime.start()
        yield RemoteEngines(runtime, runtime.system.shutdown_timeout_s)
    finally:
        await runtime.close()


class RemoteEngines:
    """The engines of workers that can sleep: keep their process, but free their GPU memory.

    ``drain_s`` bounds the way to sleep.
    """

    def __init__(self, runtime: DistributedRuntime, drain_s: float) -> None:
        self._runtime = runtime
        self._drain_s = drain_s

    async def can_sleep(self, lease: int) -> bool:
        """Whether the worker under ``lease`` has an engine with a sleep mode."""
        return await self._record(lease) is not None

    async def is_sleeping(self, lease: int) -> bool | None:
        """Whether its engine sleeps; None if it cannot, or does not answer."""
        if await self._record(lease) is None:
            return None
        try:
            answer = await self._call(lease, EngineCommand("is_sleeping"), _ANSWER_S)
        except DynamoError:
            return None
        return bool(answer.get("is_sleeping"))

    async def sleep(self, lease: int) -> None:
        """Let its requests finish, and free its memory. Raises DynamoError."""
        command = EngineCommand("sleep", {"level": _SLEEP_LEVEL})
        await self._call(lease, command, self._drain_s)

    async def wake(self, lease: int, timeout_s: float) -> None:
        """Restore its memory; return when it serves. Raises DynamoError."""
        await self._call(lease, EngineCommand("wake_up"), timeout_s)

    async def _record(self, lease: int) -> EndpointRecord | None:
        prefix = f"{INSTANCES}{self._runtime.settings.namespace}/"
        for value in (await self._runtime.discovery.list(prefix)).values():
            try:
                record = _decode(value)
            except ValueError:
                continue  # reported by the processes that call it
            if record.endpoint == ENGINE_CONTROL and record.lease_id == lease:
                return record
        return None

    async def _call(self, lease: int, command: EngineCommand, timeout_s: float) -> dict[str, Any]:
        try:
            return await self._send(lease, command, timeout_s)
        except Disconnected:  # the engine goes on, and the same command again waits for it
            return await self._send(lease, command, timeout_s)

    async def _send(self, lease: int, command: EngineCommand, timeout_s: float) -> dict[str, Any]:
        record = await self._record(lease)
        if record is None:
            raise WorkerUnavailable(f"the worker with lease {lease:x} has no {ENGINE_CONTROL}")
        path = f"{record.namespace}.{record.component}.{record.endpoint}"
        client = await self._runtime.endpoint(path).client()
        try:
            async with asyncio.timeout(timeout_s):
                await client.wait_for_instances()
                stream = await client.direct(command, record.instance_id, annotated=False)
                answers = [answer async for answer in stream]
        except TimeoutError:
            raise WorkerUnavailable(
                f"worker {record.instance_id:x}: {command.route} took more than {timeout_s:g} s"
            ) from None
        finally:
            client.close()
        return answers[-1] if answers and isinstance(answers[-1], dict) else {}


async def can_sleep(engines: RemoteEngines, entry: Entry) -> bool:
    """Whether a worker serves, and its engine has a sleep mode."""
    lease = entry.lease
    return lease is not None and len(entry.pids) == 1 and await engines.can_sleep(lease)


async def put_to_sleep(access: LocalAccess, engines: RemoteEngines, entry: Entry) -> bool:
    """Let a worker finish its requests and sleep; False if it cannot, and still serves."""
    if not await can_sleep(engines, entry):
        return False
    try:
        await sleep_worker(access, engines, entry)
    except DynamoError as error:
        log.warning("%s", error.message)
        return False
    return True


async def sleep_worker(access: LocalAccess, engines: RemoteEngines, entry: Entry) -> None:
    """Let a worker finish its requests and sleep. No effect on one that sleeps by now.

    Raises ActionFailed, StatefileError; then it serves as before.
    """
    lease = await check_sleepable(engines, entry)
    with access.acting_on(entry.name):
        document = access.statefile.update(partial(_reserve_awake, name=entry.name))
        if document.components[entry.name].reserved_by is None:
            return  # another process has put it to sleep
        try:
            state = await _sleep(access, engines, entry.name, lease)
        except ActionFailed:
            raise
        except BaseException:  # cancelled, or a full disk: check_sleepers finds out if it sleeps
            access.needs_repair = True
            raise
        if state != ASLEEP:
            raise ActionFailed(f"{entry.name}: was restarted while it fell asleep")


async def _sleep(access: LocalAccess, engines: RemoteEngines, name: str, lease: int) -> str:
    """Put the engine of a reserved worker to sleep; return its state, which is written."""
    try:
        log.info("%s: putting its engine to sleep", name)
        await engines.sleep(lease)
        # Its GPUs stay its own until the arbiter would not restart it and it is known to sleep.
        access.statefile.update(partial(_fall_asleep, name=name))
        state = ASLEEP if await engines.is_sleeping(lease) else RUNNING
    except StatefileError:
        # Not a refusal of the engine: whether it sleeps is found out by check_sleepers().
        raise
    except DynamoError as error:
        access.statefile.update(partial(_set_state, name=name, state=RUNNING))
        raise ActionFailed(f"{name}: does not sleep: {error.message}") from error
    access.statefile.update(partial(_set_state, name=name, state=state))
    return state


async def check_sleepable(engines: RemoteEngines, entry: Entry) -> int:
    """Return the lease of a worker that can sleep. Raises ActionFailed that says why not."""
    if entry.lease is None:
        raise ActionFailed(f"{entry.name}: it does not serve yet, so it cannot sleep")
    if len(entry.pids) != 1:
        raise ActionFailed(
            f"{entry.name}: it has {len(entry.pids)} processes, and only 1 can sleep"
        )
    if not await engines.can_sleep(entry.lease):
        raise ActionFailed(
            f"{entry.name}: its engine has no sleep mode (vLLM: enable-sleep-mode: true in the "
            f"graph); free its GPU with: dynamo drain {entry.name}"
        )
    return entry.lease


async def wake_worker(
    access: LocalAccess, engines: RemoteEngines, service: ServiceEntries, entry: Entry
) -> str:
    """Wake a sleeping worker; return its watcher when it serves.

    One that cannot be woken is removed. Raises ActionFailed, StatefileError.
    """

    def take(document: Document) -> None:
        current = document.components.get(entry.name)
        # Else an interrupted wake holds its GPUs.
        if current is not None and current.reserved_by is None:
            access.check_budget(document, service)
        _reserve_sleeper(document, entry.name)

    with access.acting_on(entry.name):
        access.statefile.update(take, True)
        return await finish_wake(access, engines, service, entry)


async def finish_wake(
    access: LocalAccess, engines: RemoteEngines, service: ServiceEntries, entry: Entry
) -> str:
    """Wake a worker that is reserved for it; see :func:`wake_worker`."""
    log.info("%s: waking its engine", entry.name)
    try:
        await engines.wake(entry.lease or 0, access.limits.start_timeout_s)
        access.statefile.update(partial(_set_state, name=entry.name, state=RUNNING))
    except (asyncio.CancelledError, StatefileError):  # check_sleepers finds out if it is awake
        access.needs_repair = True
        raise
    except DynamoError as error:
        log.warning("%s: cannot be woken: %s; removing it", entry.name, error.message)
        await remove_entry(access, service, entry)
        text = f"{entry.name}: cannot be woken: {error.message}; it is removed"
        raise ActionFailed(text) from error
    finally:
        access.active.discard(entry.name)
    return entry.name


async def check_sleepers(access: LocalAccess, engines: RemoteEngines) -> list[str]:
    """Make the statefile agree with the engines; return what was corrected."""
    corrections = []
    for service in read_services(access.document()).values():
        for entry in service.entries:
            reserved = entry.name in access.active or is_reserved(entry, access.active)
            if entry.lease is None or entry.draining or reserved:
                continue
            asleep = await engines.is_sleeping(entry.lease)
            begun = interrupted(entry, access.active)
            agrees = asleep != (begun == SLEEP) if begun else asleep == entry.asleep
            if asleep is None or agrees:  # what was interrupted may still go on in the engine
                continue
            if not asleep:
                access.statefile.update(partial(_undo, before=entry))
            elif not await put_to_sleep(access, engines, entry):  # reserved, as one that is awake
                continue
            corrections.append(f"{entry.name}: its state is {ASLEEP if asleep else RUNNING}")
    return corrections


async def finish_interrupted(access: LocalAccess, engines: RemoteEngines) -> list[str]:
    """Put to sleep, and wake, what processes that have exited began; return what was done.

    An engine goes on with a command whose caller has gone, and the same command again waits for it.
    """
    finished = []
    for service in read_services(access.document()).values():
        for entry in service.entries:
            begun = interrupted(entry, access.active)
            if not begun or entry.draining:
                continue
            try:
                if begun == SLEEP:
                    await sleep_worker(access, engines, entry)
                else:
                    await wake_worker(access, engines, service, entry)
                finished.append(f"{entry.name}: finished its {begun}")
            except ActionFailed as error:
                access.statefile.update(partial(_undo, before=entry))
                finished.append(f"{entry.name}: undid its {begun}: {error.message}")
    return finished


def interrupted(entry: Entry, active: Collection[str]) -> str:
    """Return the sleep or wake that no living process carries out; "" without one."""
    if entry.reserved_by is None or not entry.pids or is_reserved(entry, active):
        return ""
    operation = entry.reserved_by.operation
    return operation if operation in (SLEEP, WAKE) else ""


def is_woken(entry: Entry, active: Collection[str]) -> bool:
    """Whether a living process is waking the worker now; ``active``: those of this one."""
    owner = entry.reserved_by
    return owner is not None and owner.operation == WAKE and is_reserved(entry, active)


def check_wakeable(document: Document, name: str) -> None:
    """Raise ActionFailed that says why the worker ``name`` cannot be woken now, if so."""
    entry = document.components.get(name)
    owner = entry.reserved_by if entry is not None else None
    falls_asleep = owner is not None and owner.operation == SLEEP
    if entry is None or not (entry.asleep or falls_asleep):
        raise ActionFailed(f"{name}: it does not sleep any more")
    check_unreserved(document, name)
    ledger = ledger_of(document)
    if not ledger.can_hold(name):
        holders = ledger.holders(entry.gpus, without=name)
        used = f"{name}: GPU {', '.join(entry.gpus)} is in use by {', '.join(holders)}"
        if holders[0] not in ledger.held:
            raise ActionFailed(f"{used}; free it there, or start another worker: dynamo load")
        raise ActionFailed(
            f"{used}; free it with: dynamo drain {holders[0]} (or, if its engine has a sleep mode: "
            f"dynamo sleep {holders[0]})"
        )


def _reserve_sleeper(document: Document, name: str) -> None:
    """Take the GPUs of a sleeping worker again. Raises ActionFailed."""
    check_wakeable(document, name)
    reserve(document, name, WAKE)


def _reserve_awake(document: Document, name: str) -> None:
    """Reserve a worker that is to sleep; not one that sleeps, which would hold its GPUs again."""
    entry = document.components.get(name)
    if entry is None or not entry.asleep or entry.reserved_by is not None:
        reserve(document, name, SLEEP)


def _fall_asleep(document: Document, name: str) -> None:
    entry = document.components.get(name)
    if entry is not None:
        entry.state, entry.reserved_by = ASLEEP, reservation(SLEEP)


def _set_state(document: Document, name: str, state: str) -> None:
    entry = document.components.get(name)
    if entry is not None:
        entry.state, entry.reserved_by = state, None


def _undo(document: Document, before: Entry) -> None:
    """Count a worker as awake, unless another operation or process came since ``before``."""
    entry = document.components.get(before.name)
    if entry is None or entry.replacing is not None:
        return
    if (entry.reserved_by, entry.pids) == (before.reserved_by, before.pids):
        _set_state(document, before.name, RUNNING)
