"""What boxes with operators at a shell have beside others: logs, a status socket, alerts, verbs."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import alerts_seen
import fake_os
import threads
from machine import Process

if TYPE_CHECKING:
    from dynamo.config.runtime import RuntimeSettings

__all__ = ["connect_shells", "log_line", "own_format", "watched"]

_FREE_BYTES = 100 << 30


def connect_shells() -> None:
    """Give the modules that block what waits in virtual time; import the verbs."""
    import importlib

    from dynamo.cli import main
    from dynamo.doctor import alert_watch, alerts
    from dynamo.doctor.facts import FileSystemFacts
    from dynamo.status import deployment, reading, status_socket

    for verb in main.VERBS.values():
        importlib.import_module(f"dynamo.cli.{verb.run.partition(':')[0]}")
    for module in (reading, deployment, status_socket):
        module.socket = threads.sockets  # type: ignore[attr-defined]
    for module in (alert_watch, status_socket):
        module.threading = threads.threading  # type: ignore[attr-defined]
    vars(reading)["listening_users"] = lambda port: iter((os.geteuid(),))
    main.rival_distribution = lambda: None
    fake_os.wait_for_main = threads.run_here

    def file_system(path: Any) -> FileSystemFacts:
        is_full = fake_os.machine().is_disk_full()
        without_files = (
            is_full and fake_os.machine().lacks_inodes
        )  # its bytes or its inodes are used
        free = 0 if is_full and not without_files else _FREE_BYTES
        files = 0 if without_files else 1000
        return FileSystemFacts(path="/simulated", kind="ext4", free_bytes=free, free_files=files)

    vars(alert_watch)["file_system"] = file_system
    alerts.AlertConditions.find = alerts_seen.found(  # type: ignore[method-assign]
        alerts.AlertConditions.find
    )


@contextlib.contextmanager
def watched(runtime: RuntimeSettings) -> Iterator[None]:
    """Answer ``dynamo ps`` and look for alerts while the arbiter runs, as ``dynamo serve`` does."""
    from dynamo.doctor.alert_watch import AlertWatch
    from dynamo.runtime.process.paths import socket_path
    from dynamo.status.deployment import STATUS_SOCKET
    from dynamo.status.reading import report
    from dynamo.status.status_socket import StatusSocket

    if not threads.is_threaded():
        yield
        return
    path = socket_path(runtime, STATUS_SOCKET)
    with StatusSocket(path, partial(report, runtime)), AlertWatch(runtime):
        yield


# -- logs


def own_format(service: str, level: str = "", jsonl: bool = False, stream: Any = None) -> None:
    """Stand in for ``setup_logging``: the log of this process goes to its arbiter."""
    from dynamo.observability.logs import JsonFormatter, LineFormatter, RepeatFilter

    process = fake_os.machine().current
    assert process is not None
    process.formatter = JsonFormatter(service) if jsonl else LineFormatter()
    process.repeats = RepeatFilter()


def output_of(made: Process, on_line: Any) -> Any:
    """Return the pipe that the arbiter reads of ``made``; None without logs."""
    from dynamo.serve.supervision.output import OutputPipe

    if not threads.is_threaded():
        return None
    pipe = OutputPipe(on_line)
    made.output = os.dup(pipe.write_fd)
    os.set_blocking(made.output, False)
    pipe.close_write_end()

    def close() -> None:
        with contextlib.suppress(OSError):
            os.close(made.output)
        made.output = -1

    made.on_death[close] = None
    return pipe


def log_line(process: Process | None, record: logging.LogRecord) -> None:
    """Write a record to the log of its process."""
    if process is None or process.output < 0 or process.formatter is None:
        return
    kind = process.pid, record.name, str(record.msg)
    logged = process.machine.records[kind]
    logged[0] += 1
    if not process.repeats.filter(record):
        return
    logged[1] += 1 + getattr(record, "suppressed", 0)
    if logged[1] > logged[0]:
        process.machine.failures.append(
            f"{process} says that {logged[1]} records were logged, {logged[0]} were: {record.msg}"
        )
    text = process.formatter.format(record)
    machine = process.machine
    try:
        os.write(process.output, text.encode(errors="replace") + b"\n")
    except BlockingIOError:
        return  # the program would drop it, too
    machine.files_changed = True
    machine.logged[process.name] += [(machine.now_s, line) for line in text.splitlines()]
