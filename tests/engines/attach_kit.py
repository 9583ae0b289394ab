"""Attach workers over a small real server, called as a frontend calls them."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployment import Deployment, free_port
from mocker_kit import Caller

from dynamo.protocols import codec
from dynamo.protocols.control import MODEL_CARDS, ModelCard, decode_card
from dynamo.protocols.engine import HttpRequest, HttpResponseHead
from dynamo.runtime import Context
from dynamo.runtime.discovery import KeyEvent
from dynamo.runtime.requests import ResponseStream

__all__ = ["CHAT", "Cards", "Upstream", "fetch", "open_request", "upstream"]

SERVER = Path(__file__).with_name("upstream_server.py")
CHAT = "/v1/chat/completions"
_HEAD = codec.decoder(HttpResponseHead).decode


class Upstream:
    """One ``upstream_server.py``."""

    def __init__(self, deployment: Deployment, profile: str, models: tuple[str, ...]) -> None:
        self.port = free_port()
        self._deployment = deployment
        self._words = [sys.executable, str(SERVER), str(self.port), profile, *models]
        self.process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)
        self._deployment.until(lambda: self.ask("GET", "/v1/models"), "upstream")

    def until(self, condition: Callable[[], Any]) -> None:
        """Poll ``condition``."""
        self._deployment.until(condition)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def set(self, **values: Any) -> None:
        """Change the server's state."""
        self.ask("POST", "/_set", values)

    @property
    def seen(self) -> dict[str, Any]:
        """The requests, connections and aborted responses so far."""
        found: dict[str, Any] = self.ask("GET", "/_seen")
        return found


@contextmanager
def upstream(
    deployment: Deployment, profile: str = "openai", models: tuple[str, ...] = ("m",)
) -> Iterator[Upstream]:
    """Yield a started server."""
    server = Upstream(deployment, profile, models)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def open_request(
    here: Caller,
    body: Any,
    path: str = CHAT,
    headers: tuple[tuple[str, str], ...] = (),
    context: Context | None = None,
) -> ResponseStream:
    """Open a request on the first worker; the stream yields the encoded items.

    ``path`` may have a method in front.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    method, _, path = path.rpartition(" ")
    payload = codec.encode(HttpRequest(method or "POST", path, list(headers), data))
    stream = ResponseStream(decode=lambda item: item)
    worker = here.client.instance_ids()[0]
    return stream.attach(here.client.open(worker, payload, stream.sink, None, context))


async def fetch(
    here: Caller, body: Any, path: str = CHAT, headers: tuple[tuple[str, str], ...] = ()
) -> tuple[HttpResponseHead, bytes]:
    """Return head and body of one response."""
    items = [item async for item in open_request(here, body, path, headers)]
    return _HEAD(items[0]), b"".join(items[1:])


class Cards:
    """The registered cards by model name, as a frontend sees them."""

    def __init__(self, here: Caller) -> None:
        self.by_key: dict[str, ModelCard] = {}
        self._here = here
        here.runtime.discovery.watch(MODEL_CARDS, self._on_event)

    def __getitem__(self, name: str) -> ModelCard:
        return {card.display_name: card for card in self.by_key.values()}[name]

    @property
    def names(self) -> list[str]:
        return sorted(card.display_name for card in self.by_key.values())

    def _on_event(self, event: KeyEvent) -> None:
        self.by_key.pop(event.key, None)
        if event.value is not None:
            self.by_key[event.key] = decode_card(event.value)
        self._here.changed()
