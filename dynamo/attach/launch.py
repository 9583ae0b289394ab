"""A server that this worker starts, logs, and ends with itself."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

from dynamo.attach.launcher import STOP_TIMEOUT_S
from dynamo.errors import ConfigError, DynamoError
from dynamo.serve.state.process_table import become_subreaper, end_descendants
from dynamo.serve.supervision.output import OutputPipe, both_ends, cause_in

_TAIL_LINES = 20
_PORT = "{port}"
_GRACE_S = 10.0
log = logging.getLogger(__name__)


class ServerExited(DynamoError):
    """The server that this worker started has exited."""

    code = "server_exited"


def command_line(command: str, port: int | None) -> tuple[list[str], int]:
    """Return the words of ``command`` and the port of the server.

    ``{port}`` becomes ``port``, by default one that is free now. Raises ConfigError.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--exec {command!r}: {error}") from None
    if not words:
        raise ConfigError("--exec is empty; give the command of a server")
    if port is None and not any(_PORT in word for word in words):
        raise ConfigError(
            f"--exec {command!r} has no {{port}}: write {{port}} where the server takes its port, "
            "or give --url too"
        )
    port = free_port() if port is None else port
    return [word.replace(_PORT, str(port)) for word in words], port


class LaunchedServer:
    """The process tree of ``words``. Make one per process: it becomes a subreaper.

    ``exited`` is set at the end; :meth:`cause` then returns the reason.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.exited = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._stopping = False

    def start(self) -> None:
        """Start it. Raises OSError if Python itself cannot be started."""
        # Before the start: processes that outlive the launcher become children of this one.
        become_subreaper()
        loop = asyncio.get_running_loop()
        self._started_s = loop.time()
        self._output = OutputPipe(self._on_line)
        command = [sys.executable, "-m", "dynamo.attach.launcher", str(os.getpid()), *self.words]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output.write_fd,
            stderr=self._output.write_fd,
            start_new_session=True,  # Ctrl-C at a terminal reaches the worker alone, which drains
        )
        # The child has a copy: with one here, too, the pipe would never end.
        self._output.close_write_end()
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        log.info("started the server (pid %d): %s", self._process.pid, shlex.join(self.words))

    def cause(self) -> ServerExited:
        """Return why the server ended: its status and error, or the signal, and its last lines."""
        status = self._process.returncode
        how, error = f"exited with status {status}", cause_in(self._tail)
        if status > 128 or status < 0:
            # The launcher returns 128 + the signal; Popen returns its own as a negative number.
            number = status - 128 if status > 128 else -status
            names = {signum.value: signum.name for signum in signal.Signals}
            how, error = f"was ended by {names.get(number, f'signal {number}')}", ""
        lived_s = asyncio.get_running_loop().time() - self._started_s
        lines = "".join(f"\n  {line}" for line in self._tail) or " (none)"
        return ServerExited(
            f"the server ({Path(self.words[0]).name}) {how} after {lived_s:.0f} s"
            + (f": {error}" if error else "")
            + f"; its last output:{lines}"
        )

    async def stop(self) -> None:
        """End the whole tree: SIGTERM, SIGKILL after a while. Idempotent."""
        self._stopping = True
        try:
            if not self.exited.is_set():
                self._process.terminate()
                async with asyncio.timeout(STOP_TIMEOUT_S + _GRACE_S):
                    await self.exited.wait()
        except TimeoutError:
            log.error("the server does not end: killing it")
            self._process.kill()
            await self.exited.wait()

    def _on_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        self._tail.append(both_ends(line).decode("utf-8", "replace"))
        log.info("server: %s", text)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # A pidfd is readable when its process has ended: this does not block.
        self._process.wait()
        end_descendants(_GRACE_S)  # only if the launcher was killed is there anything left
        self._output.close()
        if self._stopping:
            log.info("the server exited")
        self.exited.set()


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
