"""Replaces what programs ask of the system by the simulated machine: time, processes, files.

:func:`install` comes before the first import of ``dynamo``, in a Python process of its own. Files,
inotify and flock(2) are the kernel's, on a file system in memory; they belong to the simulated
process that opened them, which loses them when it ends.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import errno
import fcntl
import io
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import Machine, Process
from process_end import ProcessKilled

__all__ = ["Launched", "current_machine", "install", "machine", "run_main", "use"]

STATE = "dynamo-simulate"
"""Is in the path of each file of a deployment."""
_ABOVE_MONOTONIC_NS = 10**18

_machine: Machine | None = None


class Launched(BaseException):
    """Raised by the simulated ``asyncio.run``: the main function has reached its coroutine."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.coroutine = coroutine


def machine() -> Machine:
    """The machine of this run."""
    assert _machine is not None
    return _machine


def use(new: Machine | None) -> None:
    """Make ``new`` the machine of what is installed; None: the system itself."""
    global _machine
    _machine = new
    if new is not None:
        random.seed(new.random.getrandbits(64))


def current_machine() -> Machine | None:
    """The machine of this run, if one runs."""
    return _machine


def _current() -> Process | None:
    return None if _machine is None else _machine.current


def install() -> None:
    """Replace the functions. Before the first :func:`use`, they answer as before."""
    _install_time()
    _install_chance()
    _install_processes()
    _install_files()
    _install_threads()


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(module, name, make(getattr(module, name)))


def _either(real: Any, simulated: Any) -> Any:
    """Return a function that asks the machine in a simulated process, else the system."""
    return lambda *args: real(*args) if _current() is None else simulated(*args)


# -- time and chance


def _install_time() -> None:
    def seconds(real: Any) -> Any:
        return lambda: real() if _machine is None else _machine.now_s

    def nanoseconds(real: Any) -> Any:
        return lambda: real() if _machine is None else int(_machine.now_s * 1e9)

    for name in ("monotonic", "perf_counter"):
        _replace(time, name, seconds)
        _replace(time, f"{name}_ns", nanoseconds)
    _replace(time, "time", lambda real: lambda: real() if _machine is None else _machine.unix_s)
    _replace(time, "time_ns", lambda real: lambda: real() if _machine is None else _unix_ns())

    boot = time.clock_gettime
    time.clock_gettime = lambda clock: boot(clock) if _machine is None else _machine.now_s

    def sleep(seconds: float) -> None:
        if _machine is None:
            real_sleep(seconds)
        elif _machine.overlap is not None and _machine.current is not None:
            _machine.overlap.rest(seconds)
        else:
            _machine.now_s += seconds

    real_sleep = time.sleep
    time.sleep = sleep  # type: ignore[assignment]


def _install_chance() -> None:
    real = os.urandom

    def urandom(size: int) -> bytes:
        return real(size) if _machine is None else _machine.random.randbytes(size)

    os.urandom = urandom
    random._urandom = urandom  # type: ignore[attr-defined]
    plain = random.Random

    class SeededRandom(plain):  # type: ignore[misc, valid-type]
        """Without a seed, one from the machine."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return super().__new__(cls)

        def __init__(self, x: Any = None) -> None:
            if x is None and _machine is not None:
                x = _machine.random.getrandbits(64)
            super().__init__(x)

    random.Random = SeededRandom  # type: ignore[misc]


# -- processes


def _pid_of(pid: int) -> Process | None:
    return machine().processes.get(pid)


def _install_processes() -> None:
    real_pid = os.getpid
    os.getpid = lambda: p.pid if (p := _current()) is not None else real_pid()
    real_parent = os.getppid
    os.getppid = lambda: (
        (p.parent.pid if p.parent is not None else 1)
        if (p := _current()) is not None
        else real_parent()
    )
    real_session = os.getsid
    os.getsid = lambda pid: real_session(pid) if _current() is None else _session(pid)
    real_kill = os.kill
    os.kill = lambda pid, sig: (
        machine().kill(pid, int(sig)) if _machine is not None else real_kill(pid, sig)
    )
    os.killpg = os.kill
    _replace(os, "pidfd_open", lambda real: _either(real, _pidfd_open))
    _replace(signal, "pidfd_send_signal", lambda real: _either(real, _pidfd_send_signal))
    _replace(os, "waitid", lambda real: _either(real, _waitid))
    _replace(os, "waitpid", lambda real: _either(real, _waitpid))
    _replace(os, "_exit", lambda real: lambda status: _exit(status, real))
    _replace(signal, "pthread_sigmask", lambda real: _either(real, lambda *args: set()))
    _replace(signal, "signal", lambda real: _either(real, lambda *args: signal.SIG_DFL))
    _replace(signal, "siginterrupt", lambda real: _either(real, lambda *args: None))
    asyncio.run = run_main


def _session(pid: int) -> int:
    if pid == 0:
        return os.getpid()
    if pid not in machine().processes:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    return pid


def run_main(main: Coroutine[Any, Any, Any], **options: Any) -> Any:
    """Stand in for ``asyncio.run``: what starts a program awaits ``main``, a verb waits for it."""
    process = _current()
    if process is not None and process.printed is not None:
        return wait_for_main(main)
    raise Launched(main)


def wait_for_main(main: Coroutine[Any, Any, Any]) -> Any:
    """Run ``main`` in a process that runs already. Replaced by :mod:`threads`."""
    raise NotImplementedError


def _exit(status: int, real: Callable[[int], Any]) -> None:
    process = _current()
    if process is None:
        real(status)
    else:
        machine().exit(process, status)


def _pidfd_open(pid: int, flags: int = 0) -> int:
    process = _pid_of(pid)
    if process is None:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    owner = _current()
    if owner is not None:
        machine().files[fd] = owner
    machine().process_ends[fd] = (process, [])
    if not process.alive:
        machine().process_ends[fd][1].append(fd)
        os.eventfd_write(fd, 1)
    return fd


def _pidfd_send_signal(fd: int, sig: int) -> None:
    machine().kill(machine().process_ends[fd][0].pid, int(sig))


def _waitid(kind: int, pid: int, options: int) -> Any:
    process = _current()
    assert process is not None
    if not process.children:
        raise ChildProcessError(errno.ECHILD, "No child processes")
    for child in process.children.values():
        if child.state == "Z":
            return SimpleNamespace(si_pid=child.pid)
    return None


def _waitpid(pid: int, options: int) -> tuple[int, int]:
    process = _current()
    assert process is not None
    return machine().reap(process, pid) or (0, 0)


# -- files


def _dies() -> None:
    """A process that is dead has no effect any more."""
    process = _current()
    if process is not None and not process.alive:
        raise ProcessKilled


def _unix_ns() -> int:
    assert _machine is not None
    return int(_machine.unix_s * 1e9)


def _times() -> tuple[int, int]:
    """Return access and change time of a file that is written now.

    On a system both are far above the monotonic clock, with which simulated ones begin together.
    """
    return _unix_ns() + _ABOVE_MONOTONIC_NS, _unix_ns()


def _install_files() -> None:
    for name in ("rmdir", "truncate", "ftruncate", "pwrite", "chmod"):
        _replace(os, name, _guarded)
    _replace(os, "fsync", _syncing)
    _replace(fcntl, "flock", _resting)
    _replace(os, "unlink", _unlinking)
    os.remove = os.unlink
    _replace(os, "mkdir", lambda real: _guarded(real, grows=True))
    stamp = os.utime
    _replace(os, "utime", _stamped)
    _replace(os, "replace", lambda real: _replacing(real, stamp))
    os.rename = os.replace
    _replace(os, "open", _opening)
    _replace(os, "close", _closing)
    _install_open()
    _replace(socket.socket, "__init__", _binding)


def _stamped(real: Any) -> Any:
    def utime(path: Any, times: Any = None, *, ns: Any = None, **rest: Any) -> None:
        file_step(path)
        if times is None and ns is None and _machine is not None:
            ns = _times()
        if ns is not None:
            real(path, ns=ns, **rest)
        else:
            real(path, times, **rest)

    return utime


def _replacing(real: Any, stamp: Any) -> Any:
    def replace(source: Any, target: Any, **rest: Any) -> None:
        file_step(target)
        if _machine is not None:
            stamp(source, ns=_times())  # the file has the virtual time
            if _machine.disk is not None:
                _machine.disk.rename(os.fspath(source), os.fspath(target))
        real(source, target, **rest)
        if _machine is not None:
            _machine.on_file(target, True)

    return replace


def _opening(real: Any) -> Any:
    def os_open(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            file_step(path, bool(flags & os.O_CREAT))
            _disk_changes(path)
        fd: int = real(path, flags, mode, **rest)
        process = _current()
        if process is not None:
            machine().files[fd] = process
        return fd

    return os_open


def _closing(real: Any) -> Any:
    def os_close(fd: int) -> None:
        if _machine is not None:
            _dies()
            _machine.files_changed = True
            _machine.files.pop(fd, None)
            _machine.process_ends.pop(fd, None)
        real(fd)

    return os_close


def _binding(real: Any) -> Any:
    def socket_init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        process = _current()
        if _machine is not None:
            _machine.files_changed = True  # it is bound next
            _machine.files.pop(self.fileno(), None)  # the number of a file that was closed
        if process is not None and self.family == socket.AF_UNIX:
            process.held.append(self)

    return socket_init


def _install_open() -> None:
    real = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _machine is not None and isinstance(file, int):
            _machine.files.pop(file, None)  # the object closes it from now on
        writes = not isinstance(file, int) and not set(mode).isdisjoint("wax+")
        if _machine is not None and not writes and STATE in str(file):
            _rests()
        if _machine is None or not writes:
            return real(file, mode, *args, **kwargs)
        file_step(file, True)
        _disk_changes(file)
        made = real(file, mode, *args, **kwargs)
        _machine.files.pop(made.fileno(), None)  # an opener's; the object closes it
        if _machine.current is None or "b" not in mode:
            return made
        return TornFile(made, os.fspath(file))

    io.open = opened
    builtins.open = opened


class TornFile:
    """A file whose writes a crash or a full disk may cut in the middle."""

    def __init__(self, file: Any, path: Any) -> None:
        self._file = file
        self._path = path

    def write(self, data: Any) -> Any:
        try:
            file_step(self._path, True)
        except (ProcessKilled, OSError):
            self._file.write(bytes(data)[: machine().random.randrange(len(data) + 1)])
            self._file.flush()
            raise
        return self._file.write(data)

    def __enter__(self) -> TornFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _disk_changes(path: Any, torn: bool = True) -> None:
    if _machine is not None and _machine.disk is not None and _machine.current is not None:
        _machine.disk.change(os.fspath(path), torn)


def _unlinking(real: Any) -> Any:
    def unlink(path: Any, **rest: Any) -> None:
        file_step(path)
        if not rest:
            _disk_changes(path, torn=False)
        real(path, **rest)
        if _machine is not None:
            _machine.on_file(path, False)

    return unlink


def _syncing(real: Any) -> Any:
    def fsync(fd: Any) -> None:
        file_step(fd)
        if _machine is not None and _machine.disk is not None:
            number = fd if isinstance(fd, int) else fd.fileno()
            _machine.disk.sync(str(Path(f"/proc/self/fd/{number}").readlink()))
        real(fd)

    return fsync


def _guarded(real: Any, grows: bool = False) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        file_step(args[0] if args else None, grows)
        return real(*args, **kwargs)

    return call


def file_step(path: Any, grows: bool = False) -> None:
    """A process is about to change a file: here it may be killed, or find the disk full."""
    if _machine is None:
        return
    if _machine.current is not None:
        _dies()
        _rests()
        if _machine.file_faults is not None:
            _machine.file_faults(_machine.current, path, grows)
    _machine.files_changed = True  # after the rest, in which others looked


def _rests() -> None:
    """Others may run before a process goes on."""
    if _machine is not None and _machine.overlap is not None and _machine.current is not None:
        _machine.overlap.at_file()


def _resting(real: Any) -> Any:
    def call(*args: Any) -> Any:
        _rests()
        return real(*args)

    return call


# -- threads


def _install_threads() -> None:
    concurrent.futures.ThreadPoolExecutor = InlineExecutor  # type: ignore[misc, assignment]
    threading.Thread = InlineThread  # type: ignore[misc]
    threading.Timer = NoTimer  # type: ignore[misc, assignment]


class InlineExecutor(concurrent.futures.Executor):
    """Runs at once: a simulated process has one thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``fn``; return a future that is done."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)
        return future

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Nothing runs."""


class InlineThread(threading.Thread):
    """A thread of a simulated process runs at once; one that waits for ever must not start."""

    _target: Any
    _args: Any
    _kwargs: Any

    def start(self) -> None:
        """Run its target."""
        if _machine is None:
            super().start()
        elif self._target is not None:
            self._target(*self._args, **self._kwargs)


class NoTimer:
    """A timer thread that never fires: only the exit of a process uses one."""

    daemon = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def start(self) -> None:
        """Do nothing."""

    def cancel(self) -> None:
        """Do nothing."""
