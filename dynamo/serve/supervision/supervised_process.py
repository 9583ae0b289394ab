"""The circus Process of a deployment: a session leader whose exit is an event."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial

import psutil
from circus.process import RUNNING, UNEXISTING, Process

from dynamo.serve.graph.facts import FrontendAddress
from dynamo.serve.state.process_table import die_with_parent, end_group, stat
from dynamo.serve.supervision.output import OutputPipe

_VARIABLE = "DYN_HTTP_LISTEN_FD"
log = logging.getLogger(__name__)


class FrontendListener:
    """The listening socket of a frontend's watcher, bound to ``address``; none for None.

    It outlives the frontend's processes: clients that connect while one is restarted, or after its
    death, wait for the next one instead of being refused. The process itself starts to listen, so
    nothing waits at the first start.
    """

    def __init__(self, address: FrontendAddress | None) -> None:
        self.address = address
        self._bound: tuple[FrontendAddress, socket.socket] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether several processes can listen on the socket."""
        return self._bound is not None

    def inherited(self, env: Mapping[str, str]) -> tuple[dict[str, str], tuple[int, ...]]:
        """Return the environment and the descriptors for a process of ``env``.

        Binds at the first call, and again after :meth:`close` or at another address. If that fails,
        the process binds itself and reports the reason.
        """
        if self._bound is not None and self._bound[0] != self.address:
            self.close()  # a process that still listens there has its own copy
        if self.address is not None and self._bound is None:
            bound = _bind(self.address)
            self._bound = None if bound is None else (self.address, bound)
        if self._bound is None:
            return dict(env), ()
        number = self._bound[1].fileno()
        return {**env, _VARIABLE: str(number)}, (number,)

    def close(self) -> None:
        """Refuse clients once the processes have closed their copies, too. Idempotent."""
        if self._bound is not None:
            self._bound[1].close()
            self._bound = None


def _bind(address: FrontendAddress) -> socket.socket | None:
    """Bind to ``address``; None if that fails, or if the name has several addresses."""
    try:
        addresses = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        if len(addresses) != 1:
            return None
        family, kind, protocol, _, where = addresses[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # "::" takes IPv4, too.
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "::")
            bound.bind(where)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        log.debug("%s: %s", address.url, error)
        return None
    bound.setblocking(False)
    return bound


class SupervisedProcess(Process):  # type: ignore[misc]
    """One process: a session leader whose output arrives through an OutputPipe."""

    exited: asyncio.Event
    exit_status: int | None = None
    start_ticks = 0
    gpus: Mapping[str, float] = {}
    """Its share of each GPU that was assigned to its watcher when it started."""
    on_trial = False
    """Whether it is to replace another one once it serves; it is not restarted until then."""

    def format_args(self, sockets_fds: object = None) -> list[str]:
        """Return the words of the command unchanged."""
        return command_words(self.cmd, self.args)

    def spawn(self) -> None:
        """Start the process. Raises OSError or ValueError."""
        self.started = time.time()
        self.exited = asyncio.Event()
        self.output = OutputPipe(self.watcher.on_line)
        env, fds = self.watcher.listener.inherited(self.env)
        try:
            self._popen = subprocess.Popen(
                self.format_args(),
                cwd=self.working_dir,
                env=env,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=self.output.write_fd,
                stderr=self.output.write_fd,  # the same pipe keeps both in order
                start_new_session=True,
                preexec_fn=partial(_before_exec, os.getpid()),
            )
        except BaseException:
            self.output.close()
            raise
        self.output.close_write_end()
        # circus reads name, memory and children from it. Never poll it: that would reap it.
        self._worker = psutil.Process(self._popen.pid)
        process_stat = stat(self._popen.pid)
        self.start_ticks = process_stat.start_ticks if process_stat else 0

    def reaped(self, status: int) -> None:
        """Record that the arbiter reaped the process; ``status`` is negative for a signal."""
        self.exit_status = status
        self._popen.returncode = status
        self.output.close()
        self.exited.set()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self.exit_status

    @property
    def status(self) -> int:
        """Running until it is reaped: circus replaces a zombie without asking why it exited."""
        return int(RUNNING if self.is_alive() else UNEXISTING)

    def is_alive(self) -> bool:
        """Whether it has not been reaped."""
        return not self.exited.is_set()

    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self.exit_status

    def send_signal(self, sig: int) -> None:
        """Signal the process, unless it has exited."""
        if self.is_alive():
            os.kill(self.pid, sig)

    def is_listening(self, port: int) -> bool:
        """Whether the process listens on TCP ``port``; True for a living one that denies access."""
        try:
            connections = self._worker.net_connections("tcp")
        except psutil.AccessDenied:
            return self.is_alive()
        except psutil.Error:
            return False
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for connection in connections
        )

    def kill_session(self) -> None:
        """SIGKILL the process and its group."""
        if self.is_alive():
            end_group(self.pid)

    def stop(self) -> None:
        """Do nothing: circus calls it after the end, and all is released already."""


def _before_exec(arbiter: int) -> None:
    """Run in the child between fork and exec."""
    if not die_with_parent(signal.SIGKILL, arbiter):
        # The arbiter died before the request: the kernel will send no signal.
        os._exit(128 + signal.SIGKILL)


def command_words(cmd: str, args: str | Sequence[str] | None) -> list[str]:
    """Return the command as a list; ``circusctl set`` gives ``args`` as text. Raises ValueError."""
    return [*shlex.split(cmd), *(shlex.split(args) if isinstance(args, str) else args or ())]


def quote_program(argv: Sequence[str]) -> str:
    """Quote the program of ``argv`` for circus's ``cmd``, which is split like shell words."""
    return shlex.quote(argv[0])


def describe_exit(status: int | None) -> str:
    """Describe an exit: ``exited with status 1``, ``was killed by SIGKILL``."""
    if status is None:
        return "is running"
    if status == os.EX_TEMPFAIL:
        return f"exited with status {status}, a temporary failure"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
