"""The start of one worker: GPUs, watcher, registration; undone completely if a step fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from dynamo.errors import ConfigError, StatefileError
from dynamo.operations.steps.access import LocalAccess, wait_until, without_room
from dynamo.operations.steps.circus import STOPPED, CircusBusy, CircusError, retried
from dynamo.operations.steps.limits import ActionFailed
from dynamo.operations.steps.removal import remove_entry, wait_until_gone
from dynamo.serve.graph.engine_gpus import MemoryRanks
from dynamo.serve.state.document import DRAINING, LOAD, Document
from dynamo.serve.state.entries import next_name, release
from dynamo.serve.state.ledger import GpuLedger
from dynamo.serve.state.process_table import ledger_of, reservation
from dynamo.serve.state.room import free_gpus, in_the_way

_UNDO_TIMEOUT_S = 60.0
_GPUS = "CUDA_VISIBLE_DEVICES"
log = logging.getLogger(__name__)


class WorkerStart:
    """Starts one worker of ``service``. Use it once.

    ``name`` is that of its watcher, once it is reserved.
    """

    def __init__(self, access: LocalAccess, service: str) -> None:
        self._access = access
        self._service = service
        self.name = ""
        self._argv: tuple[str, ...] = ()
        self._gpus: tuple[str, ...] = ()
        self._avoid: frozenset[str] = frozenset()
        self._rank: Mapping[str, int] = {}
        self._scope: asyncio.Timeout | None = None
        self._given_up = ""

    def give_up(self, reason: str) -> None:
        """Make :meth:`run` undo its steps and fail for ``reason``, unless it has ended."""
        self._given_up = self._given_up or reason
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def prepare(self) -> None:
        """Reserve its name and its GPUs. Raises ActionFailed, StatefileError."""
        watchers = await self._access.statuses()
        await self.find_room()
        # Blocks, so that a cancellation cannot arrive between the write and our note of it.
        self._access.statefile.update(lambda document: self.reserve(document, watchers), True)
        self._access.active.add(self.name)

    async def find_room(self) -> None:
        """Avoid the GPUs that have too little memory; remove workers that sleep on the last."""
        access = self._access
        document = access.document()
        service = access.service(document, self._service)
        share = service.facts.memory_share
        free = free_gpus(ledger_of(document))
        self._avoid = await without_room(free, share, access.devices)
        if service.gpus and len(free) > 1:
            self._rank = MemoryRanks(await access.devices() or (), {}).of(service.name)
        sleepers = in_the_way(document, service, free, self._avoid)
        for owner, entry in sleepers:
            log.info("%s: removing it; %s needs the memory of its GPU", entry.name, self._service)
            await remove_entry(access, owner, entry)
        # Their memory is free now: look again.
        if sleepers:
            self._avoid = await without_room(free, share, access.devices)

    async def run(self) -> str:
        """Start it; return the name of its watcher once it serves. See :class:`Connector`.

        A cancelled start leaves its reservation to the planner's reconcile, like a crash.
        """
        access = self._access
        deadline_s = asyncio.get_running_loop().time() + access.limits.start_timeout_s
        if not self.name:
            await self.prepare()
        try:
            await self._start_unless_given_up(deadline_s)
            access.statefile.update(self._confirm)
        except (ActionFailed, CircusError, StatefileError) as error:
            level = logging.INFO if self._given_up else logging.WARNING
            log.log(level, "%s: not added: %s; undoing it", self.name, error.message)
            await self._undo()
            raise ActionFailed(f"{self.name}: {error.message}") from error
        except BaseException:  # cancelled, or a bug: a later action repairs it
            access.needs_repair = True
            raise
        finally:
            access.active.discard(self.name)
        return self.name

    def reserve(self, document: Document, watchers: Collection[str]) -> None:
        """Write the entry of a new worker with its GPUs. Raises ActionFailed.

        ``watchers`` are those of the arbiter.
        """
        service = self._access.service(document, self._service)
        ledger = ledger_of(document)
        self._access.check_budget(document, service)
        # An entry may be gone before its watcher, and before an action of this process has ended.
        taken = {*watchers, *self._access.active}
        self.name = next_name(document, self._service, taken)
        self._argv = service.template.argv
        self._gpus = ()
        pinned = tuple(str(gpu) for gpu in service.template.pinned)
        if service.gpus and ledger.ids and not pinned:  # none if the user places the workers
            self._gpus = self._free_gpus(ledger, service.gpus)
        entry = service.new_entry(self.name, self._argv, pinned or self._gpus)
        entry.reserved_by = reservation(LOAD)
        document.components[self.name] = entry

    def _free_gpus(self, ledger: GpuLedger, count: float) -> tuple[str, ...]:
        try:
            return ledger.assign(self.name, count, avoid=self._avoid, rank=self._rank)
        except ConfigError as error:
            raise ActionFailed(error.message.partition("\nLower workers")[0]) from None

    async def _start_unless_given_up(self, deadline_s: float) -> None:
        try:
            # No deadline until give_up() sets one.
            async with asyncio.timeout(None) as scope:
                self._scope = scope
                # It was given up before there was a scope to end.
                if self._given_up:
                    self.give_up(self._given_up)
                await self._start(deadline_s)
        except TimeoutError:
            if not scope.expired():  # an error of the start itself
                raise
            raise ActionFailed(f"given up: {self._given_up}") from None
        finally:
            self._scope = None

    async def _start(self, deadline_s: float) -> None:
        access, name = self._access, self.name
        env = {_GPUS: ",".join(self._gpus)} if self._gpus else {}
        await retried(lambda: access.circus.add(name, self._argv, env), deadline_s)
        # Added stopped, then started: only the second command can find circus busy.
        await retried(lambda: access.circus.start(name), deadline_s)
        if not await wait_until(self._serves, access.registrations, deadline_s):
            raise ActionFailed(
                f"it did not serve within {access.limits.start_timeout_s:g} s"
                + access.last_output(self.name)
            )

    async def _serves(self) -> bool:
        """Whether the worker is registered. Raises ActionFailed if it will never be."""
        access = self._access
        service = access.service(access.document(), self._service)
        entry = next(
            (candidate for candidate in service.entries if candidate.name == self.name), None
        )
        if entry is not None and access.model(entry) is not None:
            return True
        try:
            status = (await access.circus.statuses()).get(self.name)
        except CircusBusy:
            return False
        if status is None:
            raise ActionFailed("its watcher was removed")
        if status == STOPPED:
            raise ActionFailed(f"its watcher was {access.why_stopped(self.name)}")
        return False

    def _confirm(self, document: Document) -> None:
        if self.name not in document.components:
            raise ActionFailed("its entry was deleted from the statefile")
        release(document, self.name)

    def _withdraw(self, document: Document) -> None:
        entry = document.components.get(self.name)
        if entry is not None:
            entry.state = DRAINING

    async def _undo(self) -> None:
        """Remove the watcher, free the GPUs. What fails is left to the planner's reconcile."""
        access, name = self._access, self.name
        try:
            deadline_s = asyncio.get_running_loop().time() + _UNDO_TIMEOUT_S
            graceful_s = await access.graceful_timeout_s(name)
            # From here on the arbiter deletes the entry, when the last process has exited, and
            # others do not start the worker again.
            access.statefile.update(self._withdraw)
            # Without a watcher, a person removed it, or circus refused it.
            await access.remove_watcher(name, deadline_s)
            await wait_until_gone(access, name, graceful_s)
        except (ActionFailed, CircusError, StatefileError) as error:
            access.needs_repair = True
            log.error("%s: cannot undo its start now: %s", name, error.message)
