"""Load for tests of restarts: clients on kept connections that count every outcome."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serving import Serving

GRAPH = """
Frontend: {{run: dynamo.frontend, http-port: {port}, router-mode: kv}}
Worker:
  run: dynamo.mocker
  model-path: {model}
  model-name: tiny
  reply: random
  speedup-ratio: {speed}
  ServiceArgs: {{workers: {workers}}}
"""
"""A frontend, and mock workers whose answers last long enough to meet a restart."""


class Load:
    """``clients`` threads that send completions, ``pause_s`` apart, until it is closed.

    Every other one streams. ``failures`` has a text for each request that was not answered with
    exactly ``tokens`` tokens; None: with any number.
    """

    def __init__(
        self,
        port: int,
        clients: int = 6,
        tokens: int | None = 40,
        model: str = "tiny",
        pause_s: float = 0.0,
    ) -> None:
        self.pause_s = pause_s
        self.model = model
        self.port = port
        self.tokens = tokens
        self.answered = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                problem = self._request(connection, f"{number} {count}", number % 2 == 0)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
                connection.close()
            with self._lock:
                if problem:
                    self.failures.append(problem)
                else:
                    self.answered += 1
            self._stop.wait(self.pause_s)
        connection.close()

    def _request(self, connection: http.client.HTTPConnection, prompt: str, stream: bool) -> str:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.tokens,
            "stream": stream,
        }
        body["ignore_eos"] = True
        if stream:
            body["stream_options"] = {"include_usage": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            return f"{answer.status} {text}"
        if stream:
            events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
            if events[-1] != "[DONE]" or '"error"' in text:
                return text[-300:]
            text = events[-2]
        if self.tokens is None:
            return ""
        tokens = json.loads(text)["usage"]["completion_tokens"]
        return "" if tokens == self.tokens else f"{tokens} tokens"


@contextmanager
def under_load(
    port: int,
    clients: int = 6,
    model: str = "tiny",
    tokens: int | None = 40,
    pause_s: float = 0.0,
) -> Iterator[Load]:
    """Run the block under load; then no request may have failed."""
    load = Load(port, clients, tokens, model, pause_s)
    try:
        yield load
    finally:
        load.close()
    assert not load.failures, (load.answered, load.failures[:5], len(load.failures))


def some_requests(serving: Serving, load: Load, count: int = 20) -> None:
    """Wait until ``count`` more requests were answered."""
    enough = load.answered + count
    serving.until(lambda: load.answered >= enough)
