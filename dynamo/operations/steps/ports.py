"""What the actions need of a deployment: its arbiter, and what its workers registered.

Tests replace both; time is that of the running loop.

Waiting for a deployment: commands repeated while circus is busy, conditions with a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dynamo.errors import DynamoError
from dynamo.serve.state.registered import RegisteredWorker

STOPPED, STOPPING = "stopped", "stopping"
"""Status of a watcher that starts no process: stopped by command, or given up; its processes have
exited, or not yet."""
T = TypeVar("T")
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
_RECHECK_S = 1.0  # for what causes no event, such as a watcher that is given up


async def retried(command: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """Return the result of ``command``, repeated while circus is busy.

    Raises CircusBusy at ``deadline_s`` on the loop's clock, and every other CircusError at once.
    """
    loop = asyncio.get_running_loop()
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            return await command()
        except CircusBusy:
            if loop.time() + delay_s > deadline_s:
                raise
        await asyncio.sleep(delay_s)  # circus sends no event when a command ends
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


async def wait_until(
    condition: Callable[[], Awaitable[bool]], registrations: Registrations, deadline_s: float
) -> bool:
    """Wait until ``condition()`` holds; False if it does not at ``deadline_s`` on the loop's clock.

    Checks again at each change of the registrations, and every second.
    """
    loop = asyncio.get_running_loop()
    while True:
        change = registrations.next_change()  # before the check: a change during it counts
        if await condition():
            return True
        left_s = deadline_s - loop.time()
        if left_s <= 0:
            return False
        try:
            async with asyncio.timeout(min(left_s, _RECHECK_S)):
                await change.wait()
        except TimeoutError:
            continue


class ActionFailed(DynamoError):
    """A worker could not be added or removed; everything reserved for it is free again."""

    code = "action_failed"
    status = 409
    kind = "Conflict"


class CircusError(DynamoError):
    """The arbiter refused a command, or did not answer."""

    code = "circus"


class CircusBusy(CircusError):
    """The arbiter runs another command, or is too busy to answer: the same command may succeed."""

    code = "circus_busy"


class NoSuchWatcher(CircusError):
    """The arbiter has no watcher of this name."""

    code = "no_such_watcher"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherOptions:
    """What a watcher runs: its command, its GPUs, how many processes, how long they may drain."""

    argv: tuple[str, ...]
    gpus: tuple[str, ...] = ()
    graceful_timeout_s: float = 30.0
    numprocesses: int = 1


class CircusControl(Protocol):
    """The commands of the arbiter. Each raises CircusError, and sends one message only."""

    async def statuses(self) -> Mapping[str, str]:
        """Return the status of each watcher, by name. Circus ignores the case of names."""

    async def options(self, name: str) -> WatcherOptions:
        """Return the options of a watcher."""

    async def add(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Add a watcher, not started; do nothing if there is one of this name."""

    async def start(self, name: str) -> None:
        """Start the processes of a watcher; do nothing if they run."""

    async def signal(self, name: str, signum: int) -> None:
        """Send ``signum`` to the processes of a watcher."""

    async def decrease(self, name: str) -> None:
        """Stop the newest process of a watcher gracefully; it has one less from now on."""

    async def remove(self, name: str) -> None:
        """Remove a watcher; its processes are stopped gracefully, after the reply."""


class Registrations(Protocol):
    """The leases and model cards of the workers on this machine."""

    def workers(self) -> Mapping[int, RegisteredWorker]:
        """Return what is registered now, by the pid of the process that the arbiter started."""

    async def revoke(self, lease_id: int) -> None:
        """End a lease; its process finishes its requests and exits. Idempotent."""

    def next_change(self) -> asyncio.Event:
        """Return an event that is set at the next change of leases, cards or statefile."""


class EngineControls(Protocol):
    """The engines of workers that can sleep: keep their process, but free their GPU memory."""

    async def can_sleep(self, lease: int) -> bool:
        """Whether the worker under ``lease`` has an engine with a sleep mode."""

    async def is_sleeping(self, lease: int) -> bool | None:
        """Whether its engine sleeps; None if it cannot, or does not answer."""

    async def sleep(self, lease: int) -> None:
        """Let its requests finish, and free its memory. Raises DynamoError."""

    async def wake(self, lease: int, timeout_s: float) -> None:
        """Restore its memory; return when it serves. Raises DynamoError."""
