"""The end of a watcher: its processes exit, and the arbiter frees its GPUs in the statefile."""

from __future__ import annotations

import asyncio
import logging

from dynamo.box.actions.patience import wait_until
from dynamo.operations.steps.access import LocalAccess
from dynamo.operations.steps.ports import ActionFailed, CircusBusy
from dynamo.serve.state.entries import delete_entry, is_freed

__all__ = ["has_exited", "wait_until_gone"]

_EXIT_MARGIN_S = 15.0
_ARBITER_WRITES_WITHIN_S = 5.0
log = logging.getLogger(__name__)


async def wait_until_gone(access: LocalAccess, name: str, graceful_s: float) -> None:
    """Wait until a removed watcher's processes have exited and its entry is free of GPUs.

    The arbiter kills what has not exited after ``graceful_s``. Raises ActionFailed, StatefileError,
    CircusError.
    """
    loop = asyncio.get_running_loop()

    async def exited() -> bool:
        return await has_exited(access, name)

    async def freed() -> bool:
        return is_freed(access.document(), name)

    limit_s = graceful_s + _EXIT_MARGIN_S
    deadline_s = loop.time() + limit_s
    # The arbiter frees an entry after its last look at the processes. To do it first would let a
    # late write of the arbiter bring the entry of a removed worker back.
    while await wait_until(exited, access.registrations, deadline_s):
        until_s = loop.time() + _ARBITER_WRITES_WITHIN_S
        if await wait_until(freed, access.registrations, until_s):
            return
        if await exited():  # its processes may have been written only now
            log.warning("%s: the arbiter did not free its entry; freeing it", name)
            access.statefile.update(lambda document: delete_entry(document, name))
            return
    raise ActionFailed(f"{name} has not exited within {limit_s:g} s")


async def has_exited(access: LocalAccess, name: str) -> bool:
    """Whether the arbiter has neither the watcher nor a process of it. Raises CircusError."""
    entry = access.document()["components"].get(name)
    if isinstance(entry, dict) and entry.get("processes"):
        return False
    try:
        return name not in await access.circus.statuses()
    except CircusBusy:
        return False
