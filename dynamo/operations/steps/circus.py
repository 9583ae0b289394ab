"""Commands to the arbiter over its ZeroMQ endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from dynamo.errors import DynamoError

STOPPED, STOPPING = "stopped", "stopping"
"""Status of a watcher that starts no process: stopped by command, or given up; its processes have
exited, or not yet."""
COMMAND_TIMEOUT_S = 30.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
_REPLY_TIMEOUT_S = 10.0
_CHECK_MS = 1000
_SOCKET_S = 2.0
"""How long the socket of an arbiter that starts may be missing."""
# Commands of dynamo.serve.supervision.arbiter, which imports circus.
_ROLL, _RELOAD = "roll_watchers", "reload_graph"
_BUSY = ("arbiter is already running", "arbiter is restarting")
"""What the refusal of a command says while another one runs."""
_GPUS = "CUDA_VISIBLE_DEVICES"
T = TypeVar("T")


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


class CircusEndpoint:
    """The commands of the arbiter at ``endpoint``. Close it after use.

    Each raises CircusError, and sends one message only; none while ``is_running`` says that the
    deployment has ended, since the next one has the same endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        reply_timeout_s: float = _REPLY_TIMEOUT_S,
        is_running: Callable[[], bool] = lambda: True,
    ) -> None:
        self.endpoint = endpoint
        self._is_running = is_running
        self._timeout_ms = int(reply_timeout_s * 1000)
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        # Without lingering: an arbiter that has ended takes no more messages.
        self._context.destroy(linger=0)

    async def statuses(self) -> Mapping[str, str]:
        """Return the status of each watcher, by name. Circus ignores the case of names."""
        return read_statuses(await self._call("status"))

    async def options(self, name: str) -> WatcherOptions:
        """Return the options of a watcher."""
        keys = ["cmd", "args", "env", "graceful_timeout", "numprocesses"]
        return read_options(await self._call("get", name=name, keys=keys))

    async def add(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Add a watcher, not started; do nothing if there is one of this name."""
        # The command is a list of words: circus would split and format a line.
        program, *args = argv
        try:
            await self._call(
                "add",
                name=name,
                cmd=shlex.quote(program),
                args=args,
                start=False,
                options={"env": dict(env)},
            )
        except CircusError as error:
            # A repeated command, whose first reply came too late, has added it already.
            if "already exist" not in error.message:
                raise

    async def start(self, name: str) -> None:
        """Start the processes of a watcher; do nothing if they run."""
        # "simple": circus takes names for shell patterns by default.
        await self._call("start", name=name, match="simple")

    async def signal(self, name: str, signum: int) -> None:
        """Send ``signum`` to the processes of a watcher."""
        await self._call("signal", name=name, signum=int(signum))

    async def decrease(self, name: str) -> None:
        """Stop the newest process of a watcher gracefully; it has one less from now on."""
        await self._call("decr", name=name, nb=1)

    async def remove(self, name: str) -> None:
        """Remove a watcher; its processes are stopped gracefully, after the reply."""
        await self._call("rm", name=name)

    async def reload_graph(
        self, request: Mapping[str, Any], is_running: Callable[[], bool]
    ) -> dict[str, Any]:
        """Apply a changed graph; return the reply, also that of a reload that failed.

        See :class:`~dynamo.serve.supervision.arbiter.ReloadGraph`, and :meth:`roll`.
        """
        reply = await self._exchange(_RELOAD, {**request, "waiting": True}, is_running)
        if is_busy(reply):
            raise _refused(_RELOAD, {}, str(reply.get("reason")))
        return reply

    async def roll(self, names: Sequence[str], is_running: Callable[[], bool]) -> None:
        """Replace the processes of watchers one after another; return when the new ones serve.

        Loading a model has no time limit. Raises CircusError if a new process failed, or if
        ``is_running()`` becomes false: then there is no answer any more.
        """
        reply = await self._exchange(_ROLL, {"names": list(names), "waiting": True}, is_running)
        if reply.get("status") == "error":
            if is_busy(reply):
                raise _refused(_ROLL, {}, str(reply.get("reason")))
            raise CircusError(str(reply.get("reason")))

    async def _call(self, command: str, **properties: Any) -> dict[str, Any]:
        reply = await self._exchange(command, properties)
        if reply.get("status") == "error":
            raise _refused(command, properties, str(reply.get("reason")))
        return dict(reply)

    async def _exchange(
        self,
        command: str,
        properties: Mapping[str, Any],
        is_running: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """Send a command, return the reply; with ``is_running`` it may take any time."""
        await self._check_socket()
        runs = is_running or self._is_running
        ended = CircusError(f"the deployment ended before {command!r} was complete")
        if not runs():
            raise ended
        message = {"id": uuid.uuid4().hex, "command": command, "properties": properties}
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        try:
            socket.connect(self.endpoint)
            await socket.send(json.dumps(message).encode())
            left_ms = math.inf if is_running else self._timeout_ms
            # In pieces: the end of the deployment is no event of the socket.
            while not await socket.poll(int(min(left_ms, _CHECK_MS))):
                if not runs():
                    raise ended
                left_ms -= _CHECK_MS
                if left_ms <= 0:
                    raise CircusBusy(
                        f"circus at {self.endpoint} did not answer {command!r} within "
                        f"{self._timeout_ms / 1000:g} s"
                    )
            return read_reply(await socket.recv())
        except zmq.ZMQError as error:
            raise CircusError(f"circus at {self.endpoint}: {command!r} failed: {error}") from error
        finally:
            socket.close()

    async def _check_socket(self) -> None:
        """Raise CircusError without a socket: ZeroMQ would wait for one as long as for a reply."""
        path = Path(self.endpoint.removeprefix("ipc://"))
        if path == Path(self.endpoint):
            return  # TCP
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _SOCKET_S
        while not path.exists():
            if loop.time() >= deadline_s:
                raise CircusError(
                    f"circus at {self.endpoint}: the socket was deleted; only a restart of the "
                    "deployment brings it back"
                )
            await asyncio.sleep(_SOCKET_S / 20)


async def retried(command: Callable[[], Awaitable[T]], deadline_s: float | None = None) -> T:
    """Return the result of ``command``, repeated while circus is busy.

    Raises CircusBusy at ``deadline_s`` on the loop's clock, by default after 30 s, and every other
    CircusError at once.
    """
    loop = asyncio.get_running_loop()
    if deadline_s is None:
        deadline_s = loop.time() + COMMAND_TIMEOUT_S
    delay_s = _FIRST_DELAY_S
    while True:
        try:
            return await command()
        except CircusBusy:
            if loop.time() + delay_s > deadline_s:
                raise
        await asyncio.sleep(delay_s)  # circus sends no event when a command ends
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)


def read_reply(data: bytes) -> dict[str, Any]:
    """Return a reply. Raises CircusError if another program sent it."""
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise CircusError(f"a reply that is not of circus: {error}") from error


def is_busy(reply: Mapping[str, Any]) -> bool:
    """Whether circus has refused a command because another one runs."""
    return any(mark in str(reply.get("reason")) for mark in _BUSY)


def read_statuses(reply: Mapping[str, Any]) -> dict[str, str]:
    """Return the status of each watcher. Raises CircusError if ``reply`` has none."""
    try:
        statuses = dict(reply.get("statuses") or {})
    except (ValueError, TypeError) as error:
        raise CircusError(f"a reply that is not of circus: {error}") from error
    return {str(name): str(status) for name, status in statuses.items()}


def read_options(reply: Mapping[str, Any]) -> WatcherOptions:
    """Return the options of a watcher. Raises CircusError if ``reply`` lacks some."""
    try:
        options = reply["options"]
        args = options.get("args") or ()
        words = shlex.split(args) if isinstance(args, str) else [str(word) for word in args]
        gpus = str((options.get("env") or {}).get(_GPUS) or "")
        return WatcherOptions(
            argv=(*shlex.split(options["cmd"]), *words),
            gpus=tuple(gpu for gpu in gpus.split(",") if gpu),
            graceful_timeout_s=float(options["graceful_timeout"]),
            numprocesses=int(options["numprocesses"]),
        )
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise CircusError(f"options that are not of circus: {error!r}") from error


def _refused(command: str, properties: Mapping[str, Any], reason: str) -> CircusError:
    text = f"circus refused {command} {properties.get('name', '')}".rstrip() + f": {reason}"
    if is_busy({"reason": reason}):  # a normal reply while another command runs
        return CircusBusy(text)
    if reason.startswith("program ") and reason.endswith(" not found"):
        return NoSuchWatcher(text)
    return CircusError(text)
