"""Requests to a deployment, and faults of the workers that serve them."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import re
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployment import Deployment

_libc = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438
PROMPT = "A request goes on where the last worker stopped. " * 6


class Workers:
    """The mocker processes of a deployment by their worker ids."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *flags: str, **env: str) -> int:
        """Start a worker whose tokens follow from all before; return its id."""
        number = len(self._deployment.processes)
        process = self._deployment.mocker(
            "--reply", "sequence", "--block-size", "16", *flags, **env
        )
        log = self._deployment.logs / f"{number}-dynamo.mocker.log"
        found: list[str] = []

        def started() -> bool:
            found[:] = re.findall(r" as ([0-9a-f]+)\b", log.read_text(errors="replace"))
            return bool(found)

        self._deployment.until(started, "a worker")
        worker_id = int(found[0], 16)
        self._processes[worker_id] = process
        return worker_id

    def signal(self, worker_id: int, number: int) -> None:
        self._processes[worker_id].send_signal(number)

    def wait(self, worker_id: int) -> int:
        return self._processes[worker_id].wait(20)

    def cut_connections(self, worker_id: int) -> int:
        """Shut down every connection to the worker's UNIX sockets; return how many."""
        pid = self._processes[worker_id].pid
        process, cut = os.pidfd_open(pid), 0
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                copied = _libc.syscall(_PIDFD_GETFD, process, int(entry.name), 0)
                if copied >= 0:
                    cut += _shut_down(copied)
        finally:
            os.close(process)
        return cut


class Answer:
    """What the client of one request received."""

    def __init__(self) -> None:
        self.text = ""
        self.reason: str | None = None
        self.usage: Any = None
        self.error: Any = None
        self.worker_id = 0

    @property
    def content(self) -> tuple[str, str | None, Any]:
        """The parts that must not depend on faults."""
        usage = {key: self.usage[key] for key in ("prompt_tokens", "completion_tokens")}
        return self.text, self.reason, usage


def body(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 150,
        "nvext": {"extra_fields": ["worker_id"]},
        **more,
    }


def unary(deployment: Deployment, **more: Any) -> Answer:
    """Return the answer to one request that does not stream."""
    status, _, raw = deployment.request("POST", "/v1/completions", body(**more))
    found, parsed = Answer(), json.loads(raw)
    if status != 200:
        found.error = parsed
        return found
    choice = parsed["choices"][0]
    found.text, found.reason, found.usage = choice["text"], choice["finish_reason"], parsed["usage"]
    found.worker_id = parsed["nvext"]["worker_id"]["decode_worker_id"]
    return found


def stream(
    deployment: Deployment,
    at_text: Callable[[Answer], None] = lambda _: None,
    calls: int = 1,
    **more: Any,
) -> Answer:
    """Return a streamed answer; call ``at_text`` each time some text has arrived, ``calls``
    times."""
    connection = http.client.HTTPConnection("127.0.0.1", deployment.port, timeout=60)
    sent = body(stream=True, stream_options={"include_usage": True}, **more)
    answer, called = Answer(), 0
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(sent), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                _add(answer, json.loads(line[6:]))
            if called < calls and len(answer.text) > 60 * (called + 1):
                called += 1
                at_text(answer)
    finally:
        connection.close()
    return answer


def _add(answer: Answer, event: dict[str, Any]) -> None:
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    shown = (event.get("nvext") or {}).get("worker_id")
    if shown:
        answer.worker_id = shown["decode_worker_id"]
    for choice in event.get("choices", ()):
        assert answer.reason is None, "nothing follows the finish reason"
        answer.text += choice["text"]
        answer.reason = choice["finish_reason"]


def _shut_down(descriptor: int) -> bool:
    """Shut down the connection behind ``descriptor``, if it is one to a UNIX socket of a worker."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return False
    with socket.socket(fileno=descriptor) as found:
        if found.family != socket.AF_UNIX or ".events" in str(found.getsockname()):
            return False
        try:
            found.getpeername()
        except OSError:
            return False  # it listens
        if not found.getsockname():
            return False  # the worker is the client
        found.shutdown(socket.SHUT_RDWR)
        return True
